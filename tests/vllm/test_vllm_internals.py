"""What is used of vLLM without its promise stands in one module, and a vLLM that lacks some of it is told from it."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines  # noqa: F401 - the environment of engines
import models
import products
import pytest
import torch
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


EARLY = """
import sys
import models, policies
from vllm import EngineArgs, SamplingParams

policy = models.with_lora(policies.qwen2, target_modules=policies.LINEARS)
folder = policies.Path(sys.argv[1])
policies.save_base(policy.get_base_model(), folder)
sizes = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 64, "max_lora_rank": 8}
options = {"enforce_eager": True, "skip_tokenizer_init": True, "load_format": "dummy", "enable_lora": True}
arguments = EngineArgs(str(folder), **sizes, **options)
assert not {"vllm.v1.engine.core", "vllm.v1.engine.llm_engine"} & {*sys.modules}, "what this test is for"

from vllm import LLMEngine
from lora_merge import VllmSync

engine = LLMEngine.from_engine_args(arguments)
sync = VllmSync(policy, engine, mode="adapter")
sync.push()
late = sync.lora_request()
sync.push(mode="merged")
try:
    engine.add_request("late", {"prompt_token_ids": [1, 2]}, SamplingParams(), lora_request=late)
except ValueError as refused:
    assert "is not in this engine (any more)" in str(refused)
assert not engine.has_unfinished_requests()
"""


def test_an_engine_whose_arguments_were_made_before_its_classes_were_imported(tmp_path: Path) -> None:
    """vLLM loads plugins as the arguments are made, and once: the core had none of this package's methods, and every
    push into it failed at its end."""
    folders = [str(Path(models.__file__).parent), *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    command = [sys.executable, "-c", EARLY, str(tmp_path / "base")]
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_vllm_s_products_still_read_a_tensor_when_they_are_collected() -> None:
    """Otherwise tests/support/products.py is not needed any more."""
    assert "handler_tensor.item()" in inspect.getsource(products.read_by_vllm)
    products.free()
    handler = products.CPUDNNLGEMMHandler()
    handler.handler_tensor = torch.tensor(torch.ops._C.create_onednn_mm_handler(torch.zeros(32, 32).t(), 1))
    del handler
    assert (products.free(), products.free()) == (1, 0)
