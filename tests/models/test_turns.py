"""Threads that read one model for different adapters: which act is the model's state, so one reads at a time."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable

import pytest

pytest.importorskip("peft")

import models
import torch
from torch import nn

import lora_merge
from lora_merge import MergedWeights, merged
from lora_merge.models.peft import chosen


def values(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in MergedWeights(model, adapter_names=[name])}


@pytest.mark.parametrize("reader", ["stream", "merged"])
def test_threads_that_choose_other_adapters(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets its own, and those that act are as before: the second begins while the first one reads."""
    model = models.with_lora(models.qwen2, adapters=("a", "b"))
    wanted = {name: values(model, name) for name in "ab"}
    began, second, found = threading.Event(), threading.Event(), dict[str, dict[str, torch.Tensor]]()
    real: Callable[..., object] = chosen._changes

    def slow(model: nn.Module, names: list[str]) -> object:
        changes = real(model, names)
        if names == ["a"]:
            began.set()
            second.wait(1)  # in vain, where the second one has to wait
        else:
            second.set()
        return changes

    monkeypatch.setattr(chosen, "_changes", slow)

    def first() -> None:
        if reader == "stream":
            found["a"] = values(model, "a")
            return
        with merged(model, adapter_names=["a"]):
            found["a"] = {key: p.detach().clone() for key, p in model.named_parameters() if "lora_" not in key}

    thread = threading.Thread(target=first)
    thread.start()
    assert began.wait(10)
    try:
        found["b"] = values(model, "b")
    except lora_merge.AlreadyMerged:
        assert reader == "merged"
    thread.join()
    assert model.base_model.active_adapters == ["a", "b"]
    if reader == "stream":
        assert all(torch.equal(tensor, wanted[name][key]) for name in "ab" for key, tensor in found[name].items())
    else:
        inside = {k.removeprefix("base_model.model.").replace(".base_layer", ""): v for k, v in found["a"].items()}
        assert all(torch.equal(tensor, wanted["a"][key]) for key, tensor in inside.items())


def test_a_block_that_ends_while_another_thread_chooses() -> None:
    """What the thread puts back is what it found, which would be the block's choice for good."""
    model = models.with_lora(models.qwen2, adapters=("a", "b"))
    inside, chose, left = (threading.Event() for _ in range(3))

    def block() -> None:
        with merged(model, adapter_names=["a"]):
            inside.set()
            assert chose.wait(10)
        left.set()

    thread = threading.Thread(target=block)
    thread.start()
    assert inside.wait(10)
    with chosen.chosen(model, ["b"]):
        chose.set()
        assert not left.wait(0.5)  # it waits for its turn
        assert model.base_model.active_adapters == ["b"]
    thread.join(10)
    assert left.is_set()
    assert model.base_model.active_adapters == ["a", "b"]


def test_a_process_forked_while_another_thread_reads() -> None:
    """The reading thread, which held the lock, does not exist there."""
    model = models.with_lora(models.qwen2, adapters=("a", "b"))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def read() -> None:
        with chosen.chosen(model, ["a"]):
            queue.put(model.base_model.active_adapters)

    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with chosen._turned:  # about to begin, or to end
            held.set()
            forked.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = context.Process(target=read)
    child.start()
    forked.set()
    thread.join()
    try:
        assert queue.get(timeout=30) == ["a"]
    finally:
        child.kill()
        child.join()
