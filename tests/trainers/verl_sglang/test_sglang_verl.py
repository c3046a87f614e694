"""verl with `rollout.name=sglang`: its FSDP2 engine, its own `ServerAdapter` and a real SGLang server, on a CPU.

All code is verl's and SGLang's own but for Ray's look-up of the server, and for what
tests/support/verl_sglang_cpu.py says.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import sglang_engines  # before transformers imports torchvision
import torch
import torch.distributed as dist
import verl_model
from torch.distributed.fsdp import FSDPModule

from tests.sglang.test_sglang_server import answers, serving
from tests.trainers.verl.test_trainer_verl import ENVIRONMENT

# verl reads these when it is imported, in the test.
os.environ |= ENVIRONMENT | {"VERL_USE_EXTERNAL_MODULES": "verl_sglang_cpu", "LORA_MERGE_DTYPE": "float32"}
os.environ |= {"RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1"}
no_leftovers = sglang_engines.no_leftovers


class Actor:
    """In the place of a Ray actor of verl's `SGLangHttpServer`: where its server is, and which step it has."""

    def __init__(self, url: str) -> None:
        self.steps: list[int] = []
        self.get_server_address = SimpleNamespace(remote=self._address)
        self.set_global_steps = SimpleNamespace(remote=self._step)
        self._url = urlsplit(url)

    async def _address(self) -> tuple[Any, Any]:
        return self._url.hostname, self._url.port

    async def _step(self, number: int) -> None:
        self.steps.append(number)


def train(model: Any, seed: int) -> None:
    """Move the shards of the adapter as a step of an optimizer would."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    g = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            local = parameter.detach().to_local()
            local.add_(torch.randn(local.shape, generator=g).to(local), alpha=0.05)


def test_streams_through_verls_own_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sync brings the policy as it is, adapter included, in buckets of verl's and SGLang's own making."""
    import ray
    from verl.workers.config import CheckpointEngineConfig, RolloutConfig
    from verl.workers.rollout.base import get_rollout_class
    from verl_engines import engine_of

    import lora_merge.integrations.verl  # noqa: F401

    folder = verl_model.save_model(tmp_path / "model")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with serving(folder) as url:
            actor = Actor(url)
            monkeypatch.setattr(ray, "get_actor", lambda name: {"sglang_server_0_0": actor}[name])
            engine = engine_of(folder)
            assert type(engine).__name__ == "LoraMergeFSDPEngine"
            buckets = CheckpointEngineConfig(update_weights_bucket_megabytes=1)
            config = RolloutConfig(name="sglang", tensor_model_parallel_size=1, checkpoint_engine=buckets)
            adapter = get_rollout_class("sglang", "async")(config, engine.model_config, None)
            for step in range(3):
                weights, peft = engine.get_per_tensor_param()
                assert peft is None
                update = adapter.update_weights(weights, global_steps=step, peft_config=peft, base_sync_done=step > 0)
                asyncio.run(update)
                sglang_engines.assert_answers(answers(url), engine.module)
                assert engine.stream().report.tensors == 27
                train(engine.module, step)
            assert actor.steps == [0, 1, 2]
    finally:
        dist.destroy_process_group()
