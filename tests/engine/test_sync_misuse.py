"""What an object that pushes needs, and what it is not for: copies of it, and generating by other adapters."""

from __future__ import annotations

import asyncio
import copy
import pickle
import socket
import sys
from collections.abc import Callable
from typing import Any

import models
import pytest

from lora_merge import InvalidInput, MissingExtra, PushRefused, SglangSync, VllmSync
from lora_merge.engine.push.pusher import Pusher


@pytest.mark.parametrize("call", [copy.copy, copy.deepcopy, pickle.dumps, lambda sync: copy.deepcopy({"a": [sync]})])
def test_it_is_neither_copied_nor_pickled(call: Callable[[Any], object]) -> None:
    sync = SglangSync(models.with_lora(models.qwen2), "http://127.0.0.1:9")
    with pytest.raises(InvalidInput, match=r"a SglangSync cannot be copied or pickled: .* make it there"):
        call(sync)


def test_generate_sets_the_adapter_by_itself() -> None:
    sync = SglangSync(models.with_lora(models.qwen2), "http://127.0.0.1:9")
    with pytest.raises(InvalidInput, match=r"generate\(\) sets lora_path by itself; for another adapter"):
        sync.generate("once", lora_path="mine")


def test_a_server_is_asked_by_its_own_calls() -> None:
    with pytest.raises(InvalidInput, match="Ask other engines by their own calls: after push"):
        VllmSync(models.with_lora(models.qwen2), "http://127.0.0.1:9").generate("once")


def test_an_interrupt_changes_not_how_requests_name_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests named the adapter as the push would have brought it that was interrupted in its checks."""

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    sync = VllmSync(models.with_lora(models.qwen2), "http://127.0.0.1:9", mode="adapter")
    monkeypatch.setattr(Pusher, "_push", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sync.push(keep=2)
    with pytest.raises(InvalidInput, match="engines keep no versions"):
        sync.lora_request(1)


@pytest.mark.parametrize("kind", [VllmSync, SglangSync])
def test_a_server_needs_no_engine_here(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A push gets as far as asking it; a handle of this process is another matter."""
    for name in ("vllm", "sglang"):
        monkeypatch.setitem(sys.modules, name, None)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with kind(models.with_lora(models.qwen2), [url]) as sync, pytest.raises(PushRefused, match=url):
            sync.push()
    with pytest.raises(InvalidInput, match=f"this {kind.__name__} was closed"):
        sync.push()
    with pytest.raises(MissingExtra, match=r"VllmSync needs vLLM"):
        VllmSync(models.with_lora(models.qwen2), [url, object()])


def test_a_block_that_has_to_be_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    sync = SglangSync(models.with_lora(models.qwen2), "http://127.0.0.1:9")

    async def block() -> SglangSync:
        async with sync as entered:
            return entered

    assert asyncio.run(block()) is sync
    with pytest.raises(InvalidInput, match="was closed"):
        sync.push()
    monkeypatch.setattr(type(sync._trainer.controls[0]), "suspends", True)
    with pytest.raises(InvalidInput, match=r"has to be awaited: write `async with SglangSync\(\.\.\.\)`"), sync:
        pass


@pytest.mark.parametrize(
    "option", ["mode", "merge", "pause", "rounding", "strategy"], ids=lambda option: f"{option}='other'"
)
def test_words_that_are_none(option: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{option} must be .*got 'other'"):
        SglangSync(models.with_lora(models.qwen2), "http://127.0.0.1:9", **{option: "other"})


def test_sglang_shares_no_weights() -> None:
    with pytest.raises(InvalidInput, match="share=True: SGLang's schedulers, which hold its weights, run in processes"):
        SglangSync(models.with_lora(models.qwen2), "http://127.0.0.1:9", share=True)


def test_full_fine_tuning_shares_no_weights() -> None:
    """It is told so at once, and not after it has moved its engine into its own process."""
    with pytest.raises(InvalidInput, match="no LoRA layers, and full fine-tuning shares no weights: leave share out"):
        VllmSync(models.qwen2(), "http://127.0.0.1:9", share=True)
