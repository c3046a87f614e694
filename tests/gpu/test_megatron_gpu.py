"""What `test_megatron_merge.py` shows over gloo, over NCCL: two and four GPUs, megatron-core without TransformerEngine.

Cases of two GPUs run on those that CUDA_VISIBLE_DEVICES names, so two runs fit side by side on four."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("megatron.core", reason="the megatron tests run in an environment of their own")

import torch
from megatron_models import Grid
from megatron_processes import Pool

from tests.megatron.test_megatron_merge import check
from tests.megatron.test_megatron_read import Case

BF16 = {"dtype": torch.bfloat16}
GPUS = torch.cuda.device_count()
CASES = [
    Case("qwen3_moe", Grid(tp=2, ep=2, etp=1), 2, "bridge"),
    Case("llama", Grid(tp=2), 2, "bridge"),
    Case("qwen2", Grid(tp=2), 2, "mcore", hf=BF16),
    Case("qwen3", Grid(tp=2), 2, "canonical", hf=BF16),
    Case("llama", Grid(pp=2), 2, "several"),
    Case("mixtral", Grid(tp=2, ep=2, etp=1), 2, "several"),
    Case("qwen3_moe", Grid(tp=2, ep=2, etp=1), 4, "bridge"),
    Case("qwen3_moe", Grid(tp=2, pp=2, ep=2, etp=1), 4, "mcore", hf=BF16),
    Case("llama", Grid(tp=4), 4, "bridge", hf={"heads": (8, 2)}),
    Case("qwen2", Grid(tp=4), 4, "mcore", hf={"tied": True} | BF16),
    Case("llama", Grid(tp=2, pp=2), 4, "bridge", hf={"tied": True}),
    Case("qwen3", Grid(tp=2, pp=2, vpp=2), 4, "canonical", hf={"layers": 4} | BF16),
]


@pytest.fixture(scope="module")
def gpus() -> Iterator[Pool]:
    """Processes of a GPU each, as many as there are GPUs."""
    pool = Pool(min(GPUS, 4), "cpu:gloo,cuda:nccl", "spawn")
    yield pool
    pool.close()


def marked(case: Case) -> object:
    few = pytest.mark.skipif(case.world > GPUS, reason=f"needs {case.world} GPUs")
    return pytest.param(case, marks=few, id=f"{case} x{case.world}")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_merged_in_place_and_streamed_on_gpus(case: Case, gpus: Pool) -> None:
    check(case, run=gpus.run, device="cuda")


def test_these_processes_work_without_gpus_too() -> None:
    pool = Pool(1, method="spawn")
    check(Case("llama", Grid(), 1, "bridge"), run=pool.run)
    pool.close()
