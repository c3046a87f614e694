"""Ranks of a trainer, each with an in-process `LLM` of its own, as TRL and ms-swift start it in colocate mode: by
vLLM's "external_launcher", and without a weight-transfer backend."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
import torch.distributed as dist
from engines import ask
from torch import nn
from vllm import LLM

from lora_merge import InvalidInput, PushFailed, VllmSync
from lora_merge.engine.vllm.loading.loader import Loader
from tests.shards.test_shards_merge import device

LAUNCHED = {"distributed_executor_backend": "external_launcher", "weight_transfer_config": None, "seed": 0}


kept: list[Any] = []
"""Engines live as long as their process: with one, vLLM takes the ranks' own process group down."""


def plain(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def free_port() -> int:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        return int(reserved.getsockname()[1])


def colocated(
    rank: int,
    wrap: Callable[[nn.Module], nn.Module],
    folder: Path,
    port: int,
    tp: int = 1,
    options: dict[str, Any] | None = None,
    tolerance: float = 12e-6,
) -> None:
    """Every rank pushes to its own engine, or to its worker of a common one, and each engine answers as the policy; a
    failure on one rank leaves the other's engine valid, if it is another one, and the next push heals."""
    world = dist.get_world_size()
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{world}", "LOCAL_WORLD_SIZE": f"{world}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "OMP_NUM_THREADS": "1"}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    build = {"target_modules": engines.LINEARS, "dtype": torch.bfloat16 if options else torch.float32}
    policy = models.with_lora(engines.qwen2, **build).to(device())
    engines.save_base(policy.get_base_model(), folder / f"base{rank}")
    dist.barrier()
    shares = wrap is ddp and tp == 1 and not options
    more = options or {}
    if shares:  # for all of the process
        engines.plain_layout(pytest.MonkeyPatch())
        more = {"load_format": "auto"}
    chosen = engines.engine_options(policy) | LAUNCHED | {"enable_lora": True, "max_lora_rank": 8} | more
    llm = LLM(str(folder / "base0"), **chosen | {"tensor_parallel_size": tp})
    kept.append(llm)
    model = wrap(models.with_lora(engines.qwen2, **build).to(device()))
    if shares:
        share(rank, model, llm)
    elif wrap is not plain and not options:
        with pytest.raises(InvalidInput, match=r"share=True: the trainer's weights are sharded"):
            VllmSync(model, llm, share=True)
    # The handle that TRL has, and the one that ms-swift has.
    sync = VllmSync(model, llm if rank else llm.llm_engine, bucket_bytes=1 << 17)

    def check() -> None:
        engines.assert_answers(ask(llm, sync.lora_request()), policy, tolerance=tolerance, greedy=not options)

    for step, mode in enumerate(["merged", "adapter", "adapter", "merged"]):
        for one in (model, policy):
            train_alike(one, step)
        report = sync.push(mode=mode, verify=step % 2 == 0)
        assert report.transports == ("local",), report
        check()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Loader, "finish", broken)
        with pytest.raises(PushFailed, match=r"engine 1 is dirty: .*injected"):
            sync.push()
    assert [state.kind for state in sync.states()] == ["dirty" if rank or tp > 1 else "merged"]
    sync.push()
    check()
    sync.close()


def share(rank: int, model: Any, llm: LLM) -> None:
    """Each rank's weights lie in its own engine, or no rank's do."""

    def scale(served: nn.Module, by: float) -> None:
        next(served.parameters()).data.mul_(by)

    base = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" not in name}
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}
    if rank == 1:
        llm.apply_model(partial(scale, by=2))
    with pytest.raises(InvalidInput, match="the engine holds other values" if rank else "rank 1 failed"):
        VllmSync(model, llm, share=True)
    theirs = {p.untyped_storage().data_ptr() for p in llm.apply_model(lambda served: list(served.parameters()))[0]}
    assert theirs.isdisjoint(p.untyped_storage().data_ptr() for p in model.parameters())
    if rank == 1:
        llm.apply_model(partial(scale, by=0.5))
    tokens = torch.tensor(engines.prompts()[rank : rank + 1])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, fused=True)
    with closing(VllmSync(model, llm, share=True)) as sync:
        for _ in range(3):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = sync.push()
            assert (report.nbytes, report.shared) == (0, sum(t.nbytes for t in base.values()))
            engines.assert_answers(ask(llm), model)
    for name, parameter in model.named_parameters():
        if name in base:
            assert torch.equal(parameter, base[name])
        else:
            parameter.data = before[name]


def train_alike(model: nn.Module, step: int) -> None:
    """A step of training that does not depend on how parameters are cut."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-1.25 if step % 2 else 1.1)


def broken(*args: Any) -> None:
    raise RuntimeError("injected")
