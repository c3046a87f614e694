"""Sharded merging over NCCL, on 2 and 4 GPUs; the cases of test_shards_merge.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import spawn
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from tests.shards.test_shards import one_long_value, values_of_any_size
from tests.shards.test_shards_adapters import ahead, changing, failing, two_ranks
from tests.shards.test_shards_merge import (
    MODELS,
    WRAPS,
    every_wrap,
    fsdp1,
    fsdp2,
    fsdp2_columns,
    hsdp,
    layers_of,
    tensor_parallel,
)
from tests.shards.test_shards_parts import many, several

pytestmark = pytest.mark.gpu
DENSE = [name for name in MODELS if name != "qwen2 float32"]


def fsdp2_offloaded(model: Any) -> nn.Module:
    """Shards on the CPU, buckets on the GPU."""
    for layer in layers_of(model):
        fully_shard(layer, offload_policy=CPUOffloadPolicy())
    return fully_shard(model, offload_policy=CPUOffloadPolicy())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus() -> None:
    spawn(2, every_wrap, [wrap for wrap in WRAPS if wrap not in (hsdp, tensor_parallel)], ["qwen2"], backend="nccl")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_every_model_on_two_gpus() -> None:
    spawn(2, every_wrap, [fsdp2], DENSE, backend="nccl")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_adapters_come_bucket_by_bucket() -> None:
    """Prefetched on NCCL's own stream; passes that stop early leave a gather under way."""
    spawn(2, two_ranks, (changing, ahead, failing), backend="nccl")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_offloaded_shards(backend: str) -> None:
    spawn(2, every_wrap, [fsdp2_offloaded], ["qwen2"], backend=backend)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("values", [values_of_any_size, one_long_value])
def test_values(values: Callable[[int], None]) -> None:
    """Python values: bytes are gathered and summed on GPUs."""
    spawn(2, values, backend="nccl")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_parts() -> None:
    """Each rank gets what it wants, in one all-to-all of NCCL's."""
    spawn(2, many, backend="nccl")
    spawn(2, several, (fsdp2, fsdp2_columns, fsdp2_offloaded), backend="nccl")


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_four_gpus() -> None:
    spawn(4, every_wrap, [fsdp2, fsdp2_columns, hsdp, tensor_parallel, fsdp1], ["qwen2"], backend="nccl")
