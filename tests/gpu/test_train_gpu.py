"""Training on the merged weight over NCCL, on 2 and 4 GPUs; the cases of test_train_layouts.py."""

from __future__ import annotations

import pytest
import torch
from processes import spawn

from tests.shards.test_shards_merge import fsdp1, hsdp
from tests.training.test_train_layouts import (
    ONE,
    PARALLEL,
    TWO,
    by_base,
    by_sequence,
    every,
    every_2d,
    every_parallel,
    fsdp2_offloaded,
    fsdp2_regathered,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
BOTH = "cpu:gloo,cuda:nccl"


def test_fsdp() -> None:
    spawn(2, every, [wrap for wrap in (*TWO, *ONE) if wrap is not fsdp2_offloaded], backend="nccl")


def test_fsdp2_offloaded() -> None:
    spawn(2, every, [fsdp2_offloaded], backend=BOTH)


def test_tensor_parallel() -> None:
    spawn(2, every_parallel, PARALLEL, backend="nccl")


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_four_gpus() -> None:
    spawn(4, every, [hsdp, fsdp2_regathered, fsdp1], backend="nccl")
    spawn(4, every_2d, [by_base, by_sequence], backend="nccl")
