"""The stream of verl's Megatron engine, ours and its own, on megatron-core models with Megatron-Bridge's adapters.

verl builds its engine for GPUs. Here it gets the chunks and the bridge that it would have built; the methods are real.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from repository import ROOT

sys.path.append(str(ROOT / ".venv" / "megatron"))  # where `make` puts it
if find_spec("verl") is None or find_spec("megatron") is None:
    pytest.skip("verl's tests run in an environment of their own, with megatron-core's", allow_module_level=True)

import cuda_cpu
import megatron_models as mm
import vllm  # noqa: F401 - verl does, and what it imports of PyTorch would take the stand-in for Triton
from helpers import assert_same_bits
from megatron_models import Grid
from megatron_processes import POOL

from lora_merge.integrations.compat import TrainerRefused
from tests.megatron.test_megatron_bridge_bind import VOCABULARY, auto_bridge
from tests.megatron.test_megatron_read import Case
from tests.trainers.verl.test_trainer_verl import ENVIRONMENT  # noqa: F401 - of this process, and so of the ranks


@mock.patch.dict(sys.modules, mm.stand_ins())
@cuda_cpu.triton()  # Megatron-Bridge imports kernels of models that are not here
def streams(case: Case, folder: Path) -> dict[str, Any]:
    """On each rank: what verl's engine hands to its rollout, and what ours does."""
    chunks = mm.megatron(case.kind, mm.hf_model(case.kind), case.grid)
    mm.adapt(chunks, "bridge")
    bridge = auto_bridge(folder)
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    import lora_merge.integrations.verl
    from lora_merge.integrations.verl_engines.megatron import LoraMergeMegatronEngine

    assert lora_merge.integrations.verl
    ours = EngineRegistry.get_engine_cls("language_model", "megatron")
    assert ours is LoraMergeMegatronEngine
    other = object.__new__(ours)
    other.engine_config = SimpleNamespace(forward_only=False)
    other.model_config = SimpleNamespace(lora={"merge": True, "rank": 0}, lora_rank=4)  # as FSDP engines read it
    with pytest.raises(
        TrainerRefused, match=r"model\.lora_rank=4 is not read .* set actor_rollout_ref\.model\.lora\.rank=4"
    ):
        other.initialize()
    answer: dict[str, Any] = {}
    before = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
    for kind in (MegatronEngineWithLMHead, ours):
        engine = object.__new__(kind)
        engine.__dict__ |= {
            "module": chunks,
            "bridge": bridge,
            "peft_cls": object(),
            "vanilla_bridge": False,
            "_hf_export_tasks": None,
            "_qat_enabled": False,
            "model_config": SimpleNamespace(lora={"merge": True, "rank": 4}, lora_rank=0),
            "engine_config": SimpleNamespace(forward_only=False),
        }
        if kind is ours:
            engine._stream = engine._make_stream()
        stream, peft_config = engine.get_per_tensor_param(base_sync_done=True)
        assert peft_config is None
        answer[kind.__name__] = {name: tensor.clone() for name, tensor in stream}
    for p, was in zip((p for chunk in chunks for p in chunk.parameters()), before, strict=True):
        assert_same_bits(p.detach(), was, "a shard after the streams")
    return answer


@pytest.mark.parametrize("case", [Case("llama", Grid(tp=2), 2)], ids=str)
def test_megatron_engine_streams_as_its_own(case: Case, tmp_path: Path) -> None:
    mm.hf_model(case.kind).save_pretrained(tmp_path)
    for rank in POOL.run(case.world, streams, case, tmp_path):
        stock, ours = rank["MegatronEngineWithLMHead"], rank["LoraMergeMegatronEngine"]
        assert ours.keys() == stock.keys()
        for name, tensor in ours.items():
            wanted = stock[name][: tensor.shape[0]] if name in VOCABULARY else stock[name]
            assert tensor.dtype == wanted.dtype, name
            assert tensor.shape == wanted.shape, name
            assert float((tensor - wanted).abs().max()) <= 2.0**-20 * float(wanted.abs().max()), name
