"""A trainer of several ranks that pushes to real engines; run by `processes.spawn` on gloo and on NCCL."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
import torch.distributed as dist
from engines import ask, engine
from helpers import assert_same_bits
from test_shards_merge import device, local_bits
from torch import nn

from lora_merge import PushFailed, VllmSync
from lora_merge.stream import Filler

LORA = {"enable_lora": True, "max_lora_rank": 8}


def train_alike(model: nn.Module) -> None:
    """A step of training that does not depend on how parameters are cut."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-1.25)


def check_answers(llm: Any, sync: VllmSync, plain: Any, tolerance: float, greedy: bool) -> None:
    engines.assert_answers(ask(llm, sync.lora_request()), plain, tolerance=tolerance, greedy=greedy)


def pushes(
    rank: int, wrap: Any, folder: Path, dtype: torch.dtype, gpus: list[str], options: dict[str, Any], tolerance: float
) -> None:
    """Every mode and a failure on one rank, with one replica for each entry of `gpus`; all handles are rank 0's."""
    build = {"dtype": dtype, "target_modules": engines.LINEARS}
    plain = models.with_lora(engines.qwen2, **build).to(device())
    with ExitStack() as stack:
        llms = []
        for index, visible in enumerate(gpus if rank == 0 else ()):
            if visible:
                os.environ["CUDA_VISIBLE_DEVICES"] = visible  # of the engine's processes; this one has begun
            llms.append(stack.enter_context(engine(plain, folder / f"base{index}", processes=True, **LORA, **options)))
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        model = wrap(models.with_lora(engines.qwen2, **build).to(device()))
        dist.barrier()
        sync = VllmSync(model, llms or None, bucket_bytes=1 << 18)
        for step, mode in enumerate(["merged", "adapter", "adapter", "merged"]):
            train_alike(plain)
            train_alike(model)
            before = local_bits(model)
            report = sync.push(mode=mode, verify=step < 2)
            for now, then in zip(local_bits(model), before, strict=True):
                assert_same_bits(now, then, "a shard after a push")
            assert report.version == step + 1
            assert report.base_sent == (step == 1)
            for llm in llms:
                check_answers(llm, sync, plain, tolerance, dtype == torch.float32)
        fill = Filler.fill

        def broken(self: Filler, index: int, *args: Any) -> None:
            fill(self, index, *args)
            if index == 1 and rank == 1:
                raise RuntimeError("injected")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Filler, "fill", broken)
            with pytest.raises(PushFailed, match="injected"):
                sync.push()
        assert [state.kind for state in sync.states()] == ["dirty"] * len(llms)
        train_alike(plain)
        train_alike(model)
        sync.push(verify=True)
        for llm in llms:
            check_answers(llm, sync, plain, tolerance, dtype == torch.float32)
        sync.close()
