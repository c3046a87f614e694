"""Ranks of a trainer, each with an in-process `LLM` of its own, as TRL and ms-swift start it in colocate mode: by
vLLM's "external_launcher", and without a weight-transfer backend."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
import torch.distributed as dist
from engines import ask, assert_answers
from torch import nn
from vllm import LLM

from lora_merge import PushFailed, VllmSync
from lora_merge.engine.vllm.loader import Loader

LAUNCHED = {"distributed_executor_backend": "external_launcher", "weight_transfer_config": None, "seed": 0}


kept: list[Any] = []
"""Engines live as long as their process: with one, vLLM takes the ranks' own process group down."""


def plain(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def colocated(rank: int, wrap: Callable[[nn.Module], nn.Module], folder: Path, port: int) -> None:
    """Every rank pushes to its own engine, and each engine answers as the policy; a failure on one rank leaves the
    other's engine valid, and the next push heals."""
    world = dist.get_world_size()
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{world}", "LOCAL_WORLD_SIZE": f"{world}"}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "OMP_NUM_THREADS": "1"}
    build = {"target_modules": engines.LINEARS}
    policy = models.with_lora(engines.qwen2, **build)
    engines.save_base(policy.get_base_model(), folder / f"base{rank}")
    options = engines.engine_options(policy) | LAUNCHED | {"enable_lora": True, "max_lora_rank": 8}
    llm = LLM(str(folder / f"base{rank}"), **options)
    kept.append(llm)
    assert llm.llm_engine.vllm_config.parallel_config.rank == rank, "the number of the rank, not of the worker"
    model = wrap(models.with_lora(engines.qwen2, **build))
    # The handle that TRL has, and the one that ms-swift has.
    sync = VllmSync(model, llm if rank else llm.llm_engine, bucket_bytes=1 << 17)
    for step, mode in enumerate(["merged", "adapter", "adapter", "merged"]):
        for one in (model, policy):
            train_alike(one, step)
        report = sync.push(mode=mode, verify=step % 2 == 0)
        assert report.transports == ("local",), report
        assert_answers(ask(llm, sync.lora_request()), policy)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Loader, "load", broken)
        with pytest.raises(PushFailed, match=r"engine 1 is dirty: .*injected; engine 0 is valid"):
            sync.push()
    assert [state.kind for state in sync.states()] == ["dirty" if rank else "merged"]
    sync.push()
    assert_answers(ask(llm), policy)
    sync.close()


def train_alike(model: nn.Module, step: int) -> None:
    """A step of training that does not depend on how parameters are cut."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-1.25 if step % 2 else 1.1)


def broken(*args: Any) -> None:
    raise RuntimeError("injected")
