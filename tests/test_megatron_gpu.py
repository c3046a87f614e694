"""What `test_megatron_merge.py` shows over gloo, over NCCL: two GPUs, megatron-core without TransformerEngine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="the megatron tests run in an environment of their own")

import torch
from megatron_models import Grid
from processes import spawn
from test_megatron_merge import check, work
from test_megatron_read import Case

BF16 = {"dtype": torch.bfloat16}
CASES = [
    Case("llama", Grid(tp=2), 2, "bridge"),
    Case("qwen2", Grid(tp=2), 2, "mcore", hf=BF16),
    Case("qwen3", Grid(tp=2), 2, "canonical", hf=BF16),
    Case("llama", Grid(pp=2), 2, "several"),
    Case("qwen3_moe", Grid(tp=2, ep=2, etp=1), 2, "bridge"),
]


def to_file(rank: int, folder: Path, case: Case, bucket_bytes: int) -> None:
    torch.save(work(case, bucket_bytes), folder / f"{rank}.pt")


def check_in_processes_of_its_own(case: Case, folder: Path, backend: str, device: str) -> None:
    def run(world: int, fn: Any, *args: Any) -> list[Any]:
        spawn(world, to_file, folder, *args, backend=backend)
        return [torch.load(folder / f"{rank}.pt", weights_only=False, map_location="cpu") for rank in range(world)]

    check(case, run=run, device=device)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_merged_in_place_and_streamed_on_gpus(case: Case, tmp_path: Path) -> None:
    check_in_processes_of_its_own(case, tmp_path, "cpu:gloo,cuda:nccl", "cuda")


def test_these_processes_work_without_gpus_too(tmp_path: Path) -> None:
    check_in_processes_of_its_own(Case("llama", Grid(), 1, "bridge"), tmp_path, "gloo", "cpu")
