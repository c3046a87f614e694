"""What is used of vLLM without its promise stands in one module, and a vLLM that lacks some of it is told from it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.model_executor.model_loader.reload.layerwise as layerwise
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor

import lora_merge.engine
from lora_merge.engine.vllm import internals

FOLDER = Path(lora_merge.engine.__file__).parent
SOURCES = {path: path.read_text() for path in FOLDER.rglob("*.py")}
PROMISED = {
    "vllm",
    "vllm.config",
    "vllm.lora.request",
    "vllm.distributed.weight_transfer.base",
    "vllm.distributed.weight_transfer.factory",
    "vllm.v1.worker.worker_base",
}
"""What third parties are meant to import: configurations, requests, and where a weight-transfer backend registers."""


def worker(**runner: Any) -> Any:
    return SimpleNamespace(model_runner=SimpleNamespace(**runner))


def test_this_vllm_lacks_nothing() -> None:
    assert internals.lacks(worker()) == []
    for name in {*internals._WHERE, *internals._LATER}:
        assert getattr(internals, name) is not None


def test_every_use_is_known() -> None:
    ours = [text for path, text in SOURCES.items() if path.parent.name != "sglang"]
    used = {name for text in ours for name in re.findall(r'\binternals\.(?:has\(")?(\w+)', text)}
    assert used - {"NAME", "has", "lacks"} == {*internals._WHERE, *internals._LATER} - {"LayerReloadingInfo"}
    imported = {m for t in SOURCES.values() for m in re.findall(r"^ *(?:from|import) (vllm[\w.]*)", t, re.M)}
    assert imported <= PROMISED, "vLLM's own names belong into internals.py"


@pytest.mark.parametrize(
    ("owner", "name", "word"),
    [
        (layerwise, "_layerwise_process", "reload.layerwise._layerwise_process"),
        (LoRAModel, "from_lora_tensors", "LoRAModel.from_lora_tensors"),
    ],
)
def test_what_is_not_there_is_named(owner: Any, name: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(owner, name)
    internals._lacks.cache_clear()
    try:
        assert [found.endswith(word) for found in internals.lacks(worker())] == [True]
    finally:
        internals._lacks.cache_clear()


def test_a_manager_of_another_vllm() -> None:
    assert internals.lacks(worker(lora_manager=SimpleNamespace())) == ["SimpleNamespace._adapter_manager"]
    inner = SimpleNamespace(**dict.fromkeys(internals._OF_MANAGERS))
    assert internals.lacks(worker(lora_manager=SimpleNamespace(_adapter_manager=inner))) == []
    del inner.capacity
    assert internals.lacks(worker(lora_manager=SimpleNamespace(_adapter_manager=inner))) == ["SimpleNamespace.capacity"]
    with pytest.raises(AttributeError, match="none of vLLM's names"):
        internals.something  # noqa: B018


def test_vllm_loads_adapters_from_files_alone() -> None:
    """Where a request can carry an adapter's tensors, `KeptAdapters` and the door of `kept_requests` may not be needed
    any more."""
    fields = {"lora_name", "lora_int_id", "lora_path", "base_model_name", "load_inplace", "is_3d_lora_weight"}
    assert set(LoRARequest.__struct_fields__) <= fields | {"tensorizer_config_dict"}
    assert list(inspect.signature(LRUCacheWorkerLoRAManager._load_adapter).parameters) == ["self", "lora_request"]
    assert list(inspect.signature(EngineCore.add_request).parameters) == ["self", "request", "request_wave"]
    called = list(inspect.signature(EngineCore.collective_rpc).parameters)
    assert called == ["self", "method", "timeout", "args", "kwargs"]
    assert list(inspect.signature(InputProcessor._validate_lora).parameters) == ["self", "lora_request"]
