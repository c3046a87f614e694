"""What an object that pushes is not for: copies of it, and generating by other adapters."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import models
import pytest

from lora_merge import InvalidInput, SglangSync


@pytest.mark.parametrize("call", [copy.copy, copy.deepcopy, pickle.dumps, lambda sync: copy.deepcopy({"a": [sync]})])
def test_it_is_neither_copied_nor_pickled(call: Callable[[Any], object]) -> None:
    sync = SglangSync(models.with_lora(models.qwen2), "http://127.0.0.1:9")
    with pytest.raises(InvalidInput, match=r"a SglangSync is neither copied nor pickled: .* make it there"):
        call(sync)


def test_generate_sets_the_adapter_by_itself() -> None:
    sync = SglangSync(models.with_lora(models.qwen2), "http://127.0.0.1:9")
    with pytest.raises(InvalidInput, match=r"generate\(\) sets lora_path by itself; for another adapter"):
        sync.generate("once", lora_path="mine")


def test_sglang_shares_no_weights() -> None:
    with pytest.raises(InvalidInput, match="share=True: SGLang's schedulers, which hold its weights, run in processes"):
        SglangSync(models.with_lora(models.qwen2), "http://127.0.0.1:9", share=True)
