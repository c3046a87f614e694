"""DeepSpeed's ZeRO-3 over NCCL, on 2 GPUs: the cases of test_libraries_zero3.py, and what a stream takes of memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import models
import pytest
import torch
from processes import spawn
from torch import nn

from lora_merge import MergedWeights, merged
from tests.libraries import test_libraries_zero3 as zero3
from tests.libraries.test_libraries_zero3_training import training
from tests.shards.test_shards_merge import device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed"),
]
CASES: list[Callable[[int], None]] = [
    zero3.in_bf16,
    training,
    zero3.gathered,
    zero3.written_while_gathered,
    zero3.written_inside,
    zero3.raised_inside,
    zero3.in_a_forward,
    zero3.moved,
    zero3.parts,
    zero3.before_the_engine,
    zero3.tied,
    zero3.fails_on_one_rank,
]


def on_gpus(rank: int, work: Callable[..., None], *args: Any) -> None:
    """In a rank's process, before it imports DeepSpeed."""
    os.environ["DS_ACCELERATOR"] = "cuda"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # runs are compared bit by bit
    work(rank, *args)


@pytest.mark.parametrize("config", list(zero3.CONFIGS))
def test_every_config(config: str) -> None:
    spawn(2, on_gpus, zero3.every_config, [config], ["qwen2", "qwen2 float32"], backend="cpu:gloo,cuda:nccl")


def test_every_model() -> None:
    names = [name for name in zero3.MODELS if "qwen2" not in name or "head" in name]
    spawn(2, on_gpus, zero3.every_config, ["some persist"], names, backend="cpu:gloo,cuda:nccl")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_case(case: Callable[[int], None]) -> None:
    spawn(2, on_gpus, zero3.every_case, [case], backend="cpu:gloo,cuda:nccl")


def test_nccl_alone() -> None:
    spawn(2, on_gpus, zero3.every_config, ["some persist"], ["qwen2"], backend="nccl")


def _peak(call: Callable[[], object]) -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def memory(rank: int, configs: Sequence[str]) -> None:
    """What a push sends takes two buckets, and the adapters of one bucket twice; merging in place next to nothing. A
    stream of whole tensors puts each together beside them."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4}

    def large() -> nn.Module:
        return models.with_lora(lambda: models.qwen2(**sizes), dtype=torch.bfloat16)

    bucket = 8 << 20
    for config in configs:
        model = zero3.engine(large().to(device()), **zero3.CONFIGS[config])
        weights = MergedWeights(model, bucket_bytes=bucket)
        whole = sum(p.ds_numel * p.element_size() for p in model.parameters())
        largest = max(p.ds_numel * p.element_size() for p in model.parameters())
        assert whole > 6 * bucket, whole

        def push(weights: MergedWeights = weights) -> None:
            writer = weights.bucket_writer()
            with writer.buffers() as buffers:
                for _ in writer.filled(buffers, {"rounding": "nearest"}):
                    pass

        def loop(weights: MergedWeights = weights) -> None:
            for _ in weights:
                pass

        def in_place(model: nn.Module = model) -> None:
            with merged(model):
                pass

        staged = bucket if config == "offloaded" else 0
        room = 2.25 * bucket + staged + (2 << 20)
        found = {call.__name__: _peak(call) for call in (push, loop, in_place)}
        assert found["push"] <= room, (config, found)
        assert found["loop"] <= room + bucket + largest, (config, found)
        weights.release()


def test_memory() -> None:
    spawn(2, on_gpus, memory, ["partitioned", "some persist", "offloaded"], backend="cpu:gloo,cuda:nccl")
