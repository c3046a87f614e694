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
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from lora_merge import LoraMergeError, PushFailed, VllmSync
from lora_merge.engine.payload.adapter import AdapterSource
from lora_merge.shards import here
from lora_merge.shards.ranks import Ranks
from lora_merge.stream.bucket_writer import BucketWriter
from tests.shards.test_shards_merge import (
    device,
    forward,
    fsdp2_columns,
    fsdp2_kept,
    fsdp2_mixed_precision,
    hsdp,
    layers_of,
    local_bits,
    tensor_parallel,
)

LORA = {"enable_lora": True, "max_lora_rank": 8}


def train_alike(model: nn.Module) -> None:
    """A step of training that does not depend on how parameters are cut."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                here(parameter).mul_(-1.25)


class Told:
    """What the ranks of a trainer tell each other beside weights: bytes of each value, and how many collectives it
    takes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.collectives = 0
        gather, reduce = Ranks._gather_heads, dist.all_reduce

        def gathered(ranks: Ranks, data: bytes) -> list[bytes]:
            self.sizes.append(int.from_bytes(data[:8], "little"))
            self.collectives += 1
            return gather(ranks, data)

        def reduced(*args: Any, **options: Any) -> Any:
            self.collectives += 1
            return reduce(*args, **options)

        patch.setattr(Ranks, "_gather_heads", gathered)
        patch.setattr(dist, "all_reduce", reduced)


def check_answers(llm: Any, sync: VllmSync, plain: Any, tolerance: float, greedy: bool) -> None:
    engines.assert_answers(ask(llm, sync.lora_request()), plain, tolerance=tolerance, greedy=greedy)


def broken(works: Any, at: int, rank: int) -> Any:
    """A rank other than the first fails, as its part of a bucket has gone (whatever that was)."""

    def call(self: Any, index: int, *args: Any) -> None:
        works(self, index, *args)
        if rank == 1 and index == at % len(self.table):
            raise RuntimeError("injected")

    return call


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
        for step, mode in enumerate(["merged", "adapter", "adapter", "merged", "merged"]):
            train_alike(plain)
            train_alike(model)
            before = local_bits(model)
            with pytest.MonkeyPatch.context() as patch:
                told = Told(patch)
                report = sync.push(mode=mode, verify=step < 2)
            assert step < 2 or max(told.sizes) < 4096, "what an engine said of the stream crosses once"
            # What two engines of two workers say of them is 2.4 KB (counted on a CPU), more than one collective takes.
            assert step < 4 or told.collectives <= 7 + (len(gpus) > 1), "benchmarks/scale.py counts on it"
            for now, then in zip(local_bits(model), before, strict=True):
                assert_same_bits(now, then, "a shard after a push")
            assert report.version == step + 1
            assert report.base_sent == (step == 1)
            for llm in llms:
                check_answers(llm, sync, plain, tolerance, dtype == torch.float32)

        for mode, at in (("merged", 1), ("merged", -1), ("adapter", -1)):
            with pytest.MonkeyPatch.context() as patch:
                for kind in (BucketWriter, AdapterSource):
                    patch.setattr(kind, "fill", broken(kind.fill, at, rank))
                    patch.setattr(kind, "write_direct", broken(kind.write_direct, at, rank))
                with pytest.raises(PushFailed, match="injected"):
                    sync.push(mode=mode)
            assert [state.kind for state in sync.states()] == ["dirty"] * len(llms)
            train_alike(plain)
            train_alike(model)
            sync.push(mode=mode, verify=mode == "merged")
            for llm in llms:
                check_answers(llm, sync, plain, tolerance, dtype == torch.float32)
        sync.close()
        trained_whole(wrap, llms, build, tolerance)


def trained_whole(wrap: Any, llms: list[Any], build: dict[str, Any], tolerance: float) -> None:
    """What is trained whole crosses in each push that engines merge, and is no part of the base: the optimizers of some
    trainers write it where no version shows it."""
    linears = [name for name in build["target_modules"] if name != "o_proj"]
    build = build | {"target_modules": linears, "modules_to_save": ["o_proj"]}
    plain, model = (models.with_lora(engines.qwen2, **build).to(device()) for _ in range(2))
    model = wrap(model)
    sync = VllmSync(model, llms or None, bucket_bytes=1 << 18, merge="engine")
    for step in range(3):
        for policy in (plain, model):
            train_alike(policy)
            for name, parameter in policy.named_parameters():
                if "modules_to_save" in name:
                    here(parameter).data.mul_(-1.25)
        report = sync.push()
        assert report.merge == "engine"
        assert report.base_sent == (step == 0)
        for llm in llms:
            check_answers(llm, sync, plain, tolerance, build["dtype"] == torch.float32)
    sync.close()


def offloaded(model: Any) -> nn.Module:
    return fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=torch.cuda.is_available()))


def every_layout(rank: int, folder: Path) -> None:
    """Four ranks push one layout after the other, right after a forward; then what only a part of them can push."""
    build = {"dtype": torch.float32, "target_modules": engines.LINEARS}
    plain = models.with_lora(engines.qwen2, **build)
    with ExitStack() as stack:
        llms = []
        if rank == 0:
            llms.append(stack.enter_context(engine(plain, folder / "base", processes=True, **LORA)))
        dist.barrier()
        for turn, wrap in enumerate(
            [tensor_parallel, fsdp2_columns, fsdp2_kept, fsdp2_mixed_precision, offloaded, hsdp]
        ):
            model = wrap(models.with_lora(engines.qwen2, **build))
            for _ in range(turn + 1):
                train_alike(model)
            train_alike(plain)
            if wrap is not tensor_parallel:
                forward(model)  # leaves units gathered
            sync = VllmSync(model, llms or None, bucket_bytes=1 << 18)
            sync.push(verify=True)
            for llm in llms:
                check_answers(llm, sync, plain, 5e-6, True)
            if wrap is not hsdp:
                sync.close()
        refused(rank, model, sync)
        sync.push(mode="merged")
        for llm in llms:
            check_answers(llm, sync, plain, 5e-6, True)
        sync.close()


def refused(rank: int, model: Any, sync: VllmSync) -> None:
    """HSDP: ranks 0 and 1 hold one copy of the model, 2 and 3 another. What is wrong with the second one is an error on
    all four, and the engine is as before."""
    layer = layers_of(model)[0].self_attn.q_proj
    weight = layer.base_layer.weight.to_local()

    def set_scale(scale: float) -> None:
        layer.set_scale("default", scale)

    def mark(kind: str | None) -> None:
        layer.__dict__.pop("quantization_backend", None)
        if kind:
            layer.quantization_backend = kind

    # what, on which ranks, how it is undone, which error in which mode
    cases: list[tuple[Any, set[int], Any, str, str]] = [
        (lambda: set_scale(7.0), {3}, lambda: set_scale(1.0), "disagree", "merged"),
        (lambda: set_scale(7.0), {2, 3}, lambda: set_scale(1.0), "disagree", "merged"),
        (lambda: mark("x"), {3}, lambda: mark(None), "quantised", "merged"),
        (lambda: weight.neg_(), {2, 3}, lambda: weight.neg_(), "different base weights", "adapter"),
    ]
    before = sync.states()
    for change, ranks, undo, message, mode in cases:
        with torch.no_grad():
            if rank in ranks:
                change()
            with pytest.raises(LoraMergeError, match=message):
                sync.push(mode=mode)
            if rank in ranks:
                undo()
        assert sync.states() == before, f"{message}: the engine is not as before"
