"""What only the Triton backend does: compiling without a GPU, and tables made while a CUDA graph is captured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from backends import GPU, Backend
from helpers import assert_same_bits, in_place, make_segment, pairwise
from repository import ROOT, SUPPORT

from lora_merge import Plan, Segment
from lora_merge.errors import NotRestored
from lora_merge.kernels.segments import FLOATS, UNIT_BEGIN, UNITS_ACROSS, WORDS
from lora_merge.kernels.triton import merge_kernels
from lora_merge.restore import TrackedPlan

TRITON = [pytest.param(("triton", "cuda"), marks=pytest.mark.gpu)] if GPU else [("triton", "cpu")]


def compiles(tmp_path: Path, *gpu: str) -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, str(SUPPORT / "compile_triton.py"), *gpu]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr


def test_compiles_for_hopper(tmp_path: Path) -> None:
    """Aligned tables move weights 16 bytes at a time, and adapters go through the matrix unit."""
    compiles(tmp_path)


@pytest.mark.parametrize("gpu", ["gfx942"])
def test_compiles_for_amd(gpu: str, tmp_path: Path) -> None:
    """The same for an MI300, with nothing of NVIDIA's assembly; none has run it yet."""
    compiles(tmp_path, gpu)


@pytest.mark.parametrize("backend", TRITON, indirect=True)
def test_tables_made_during_a_capture(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is built while a CUDA graph is captured holds the same table, without a copy from the host."""
    segments = [make_segment(f"{rows}", rows, 140, 3, pairwise(4), backend.device) for rows in (70, 1, 33)]
    Plan(segments).run()
    wanted = [s.destination.clone() for s in segments]
    for s in segments:
        s.destination.zero_()
    with monkeypatch.context() as patch:
        patch.setattr("lora_merge.kernels.triton.table._capturing", lambda device: True)
        plan = Plan(segments)
    plan.run()
    for s, result in zip(segments, wanted, strict=True):
        assert_same_bits(s.destination, result)


@pytest.mark.parametrize("backend", TRITON, indirect=True)
@pytest.mark.parametrize("base", FLOATS)
def test_tracked_ranks_of_tiles_and_parts_of_them(backend: Backend, base: torch.dtype) -> None:
    """More tiles than programs, whole ones and edges, ranks of one block and of three; adapters of every dtype."""
    before, segments = [], []
    for index, rank in enumerate((1, 7, 8, 32, 33, 70)):
        rows, cols = ((130, 200), (128, 192))[index % 2]
        dtypes = (base, base, FLOATS[index % 3], FLOATS[index % 3])
        s = in_place(make_segment(f"rank {rank}", rows, cols, rank, dtypes, backend.device, update=0.3))
        before.append(s.source.clone())
        segments.append(s)
    wanted = [in_place(s) for s in segments]
    Plan(wanted).run()
    plan = TrackedPlan(segments)
    plan.merge()
    for s, other in zip(segments, wanted, strict=True):
        assert_same_bits(s.source, other.source, f"{s.name}, merged")
    plan.unmerge()
    for s, old in zip(segments, before, strict=True):
        assert_same_bits(s.source, old, f"{s.name}, restored")


@pytest.mark.parametrize("backend", TRITON, indirect=True)
def test_tracked_leaves_alone_only_the_tile_that_was_written(backend: Backend) -> None:
    s = in_place(make_segment("w", 100, 200, 4, (torch.bfloat16,) * 4, backend.device))
    before, plan = s.source.clone(), TrackedPlan([s])
    plan.merge()
    s.source[70, 130] += 1
    left = s.source.clone()
    with pytest.raises(NotRestored, match="w: written while merged"):
        plan.unmerge()
    kept = torch.zeros_like(before, dtype=torch.bool)
    kept[64:, 128:192] = True
    assert_same_bits(s.source, torch.where(kept, left, before))


def test_a_sum_of_places_is_not_fooled_by_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one element each, in each other's place: sums of products with factors of rows plus columns are equal."""
    if GPU:
        pytest.skip("the interpreter is tested on machines without a GPU")
    monkeypatch.setenv("LORA_MERGE_BACKEND", "triton")
    w = torch.zeros(4, 8)
    w[0, 1] = w[1, 5] = 2.0
    s = Segment("w", w, w, torch.zeros(1, 8), torch.zeros(4, 1))
    plan = TrackedPlan([s])
    plan.merge()
    w[:2] = w[:2].flip(0)
    with pytest.raises(NotRestored):
        plan.unmerge()


@triton.jit
def corners(table, unit_segment, unit, out, TILE_M: tl.constexpr, TILE_N: tl.constexpr):  # noqa: ANN001, ANN201
    segment, row, column = merge_kernels.corner(table, unit_segment, unit, TILE_M, TILE_N)
    tl.store(out, (segment.to(tl.int64) - table.to(tl.int64)) // 8)
    tl.store(out + 1, row.to(tl.int64))
    tl.store(out + 2, column)


@pytest.mark.parametrize("backend", TRITON, indirect=True)
def test_tiles_beyond_2_to_31(backend: Backend) -> None:
    """A weight that lies in one piece is copied as one row of bytes, more than an int32 counts."""
    table, across = torch.zeros(2, WORDS, dtype=torch.int64, device=backend.device), 2**18
    table[1, UNITS_ACROSS] = across
    out = torch.zeros(3, dtype=torch.int64, device=backend.device)
    segments = torch.ones(1, dtype=torch.int32, device=backend.device)
    for unit in (across - 1, across, 3 * across - 1):
        table[1, UNIT_BEGIN] = -unit
        corners[(1,)](table, segments, 0, out, 2, 16384)
        assert out.tolist() == [WORDS, unit // across * 2, unit % across * 16384]
