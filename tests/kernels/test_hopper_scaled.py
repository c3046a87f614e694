"""Results of 8 bits by the kernel for compute capability 9: which weights it takes, and that its bits are those of a
merge in 16 bits that is scaled from there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from lora_merge import Plan, Segment
from lora_merge.kernels.bindings import native
from lora_merge.kernels.cuda import backend as cuda
from lora_merge.kernels.cuda import hopper
from lora_merge.kernels.cuda import table as cuda_table
from lora_merge.kernels.cuda.kernel import Units, Work
from lora_merge.kernels.cuda.scaled import CudaScale, HopperScaled, MergedAtOnce, separate
from lora_merge.kernels.scaled.two_step import TwoStepScaled
from lora_merge.kernels.scaled.weights import Scaled, place
from lora_merge.kernels.segments import seed_key
from tests.kernels.test_hopper import on_hopper
from tests.kernels.test_scaled import GROUPS, adapter, base, weight

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ALL = [*GROUPS, "compiled"]
SHAPES = [(64, 256), (128, 128), (1024, 1024), (1000, 1200), (130, 144), (40, 16), (192, 400), (2508, 272), (257, 3584)]
"""Whole blocks and parts of them; strips that lack boxes; more units than one of a block of threads."""


def of(
    group: str, rows: int, cols: int, rank: int, device: torch.device, dtype: torch.dtype = BF16,
    adapters: torch.dtype = FP32, number: int = 0,
) -> tuple[Segment, Scaled]:  # fmt: skip
    target = weight(rows, cols, group, device, dtype)
    lora_A, lora_B = adapter(rows, cols, rank, adapters, device)
    return Segment("w", base(rows, cols, dtype, device, number), target.weight, lora_A, lora_B, 0.5), target


def bits(targets: Sequence[Scaled]) -> list[torch.Tensor]:
    return [t.view(torch.uint8).clone() for s in targets for t in (s.weight, s.scales)]


def check(segments: Sequence[Segment], targets: Sequence[Scaled], stochastic: bool = False) -> None:
    """By both ways; all of it is taken by the kernel."""
    placed = place(segments, targets)
    here, rest = separate(placed, GPU)
    assert here
    assert not rest
    TwoStepScaled(cuda.prepare, CudaScale, placed, GPU)(stochastic, seed_key(3))
    expected = bits(targets)
    launch = MergedAtOnce(here, GPU)
    for _ in range(2):  # what was the largest before does not count
        for target in targets:
            target.weight.view(torch.uint8).fill_(0x7F)
            target.scales.fill_(float("nan"))
        launch(stochastic, seed_key(3))
        assert all(map(torch.equal, bits(targets), expected))


@on_hopper
@pytest.mark.parametrize("of_unit", [128, 1024])
@pytest.mark.parametrize("group", ALL)
def test_shapes(group: str, of_unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few rows in a unit, as small weights have, and with many, as many large ones have together."""
    monkeypatch.setattr(HopperScaled, "units", lambda self, work, shape: Units(shape.strip_cols, of_unit, of_unit))
    for (rows, cols), (rank, adapters) in itertools.product(
        SHAPES, ((1, BF16), (8, BF16), (32, FP32), (40, BF16), (72, FP32), (128, BF16))
    ):
        if max(rank, 8) * (rows + cols) * 16 > rows * cols and (rank % 8 or adapters == FP32):
            continue  # such adapters are not laid out for it
        segment, target = of(group, rows, cols, rank, GPU, adapters=adapters)
        check([segment], [target])


@on_hopper
@pytest.mark.parametrize("group", ALL)
def test_many_at_once(group: str) -> None:
    """Matrices of several shapes, ranks and dtypes in one plan, as a table on the device; row factors; stochastic
    rounding."""
    segments, targets = [], []
    kinds = itertools.cycle(((16, BF16, BF16), (32, BF16, FP32), (64, BF16, FP32), (16, FP16, FP16), (24, FP16, FP32)))
    for number, ((rows, cols), (rank, dtype, adapters)) in enumerate(
        zip([(1024, 1040), (512, 2048), (3000, 528)] * 10, kinds, strict=False)
    ):
        segment, target = of(group, rows, cols, rank, GPU, dtype, adapters, number)
        if number % 4 == 1:
            segment = replace(segment, row_scale=torch.rand(rows, device=GPU) + 0.5)
        segments.append(segment)
        targets.append(target)
    check(segments, targets)
    check(segments, targets, stochastic=True)


@on_hopper
@pytest.mark.parametrize("group", ALL)
def test_parts_of_a_weight(group: str) -> None:
    """Segments below each other and side by side share scales; of different ranks, so in launches of their own."""
    rows, cols = 1280, 1024
    target, segments = weight(rows, cols, group, GPU), []
    for number, (top, bottom, left, right) in enumerate(
        [(0, 256, 0, cols), (256, 640, 0, 384), (256, 640, 384, cols), (640, rows, 0, cols)]
    ):
        rank, dtype = [(8, BF16), (32, FP32), (16, BF16), (40, BF16)][number]
        w = base(bottom - top, right - left, BF16, GPU, number) * (number + 1)
        lora_A, lora_B = adapter(bottom - top, right - left, rank, dtype, GPU)
        segments.append(Segment(f"w{number}", w, target.weight[top:bottom, left:right], lora_A, lora_B, 0.5))
    check(segments, [target])


@on_hopper
@pytest.mark.parametrize("group", ALL)
def test_odd_values(group: str) -> None:
    """Zeros, subnormals, infinity and NaN, in the base and in adapters, also where a tile or a block ends."""
    for rows, cols in ((256, 512), (200, 336)):
        for where, odd in itertools.product(
            ((0, 0), (rows - 1, cols - 1), (130, 128)), (0.0, 1e-39, 3.3e38, float("inf"), float("nan"))
        ):
            segment, target = of(group, rows, cols, 8, GPU, adapters=BF16)
            w, lora_A, lora_B = segment.source.clone(), segment.lora_A, segment.lora_B
            assert lora_A is not None
            assert lora_B is not None
            w[where] = odd
            check([replace(segment, source=w)], [target])
            lora_A, lora_B = lora_A.clone(), lora_B.clone()
            lora_A[3, where[1]] = odd
            check([replace(segment, lora_A=lora_A)], [target])
            lora_B[where[0], 5] = odd
            check([replace(segment, lora_A=lora_A, lora_B=lora_B)], [target])
        segment, target = of(group, rows, cols, 8, GPU, adapters=BF16)
        zeros = torch.zeros_like(segment.source)
        check([replace(segment, source=zeros, scaling=0.0)], [target])


@on_hopper
def test_in_a_graph_and_through_a_plan() -> None:
    for group in ALL:
        segment, target = of(group, 512, 768, 16, GPU)
        plan = Plan([segment], [target])
        assert isinstance(plan._scaled, MergedAtOnce)
        plan.run()
        expected = bits([target])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan.run()
        target.weight.view(torch.uint8).zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, bits([target]), expected))


@on_hopper
def test_made_in_inference_mode() -> None:
    for group in ALL:
        segment, target = of(group, 512, 768, 16, GPU)
        with torch.inference_mode():
            plan = Plan([segment], [target])
        plan.run()
        expected = bits([target])
        check([segment], [target])
        assert all(map(torch.equal, bits([target]), expected))


def test_which_weights_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of whole vectors, whole blocks, no memory of another GPU, all of a weight or none; a strip of two blocks."""
    assert native.load_error() is None
    monkeypatch.setattr(hopper, "_available", lambda device: True)
    for module in (hopper, cuda_table):
        monkeypatch.setattr(module, "memory", lambda device: cuda_table.Memory(227 << 10, 228 << 10))

    def taken(segments: Sequence[Segment], targets: Sequence[Scaled]) -> int:
        here, rest = separate(place(segments, targets), CPU)
        assert len(here) + len(rest) == len(segments)
        return len(here)

    for group in GROUPS:
        segment, target = of(group, 640, 512, 16, CPU)
        assert taken([segment], [target]) == 1
        assert taken([replace(segment, peer=True)], [target]) == 0
        assert taken([replace(segment, source=segment.source.float())], [target]) == 0
        assert taken([Segment("w", segment.source, target.weight)], [target]) == 0
        assert taken([segment], [replace(target, dtype=FP16)]) == 0
        column = weight(4096, 1, group, CPU)
        w, lora_A, lora_B = (torch.zeros(shape, dtype=BF16).t() for shape in ((1, 4096), (1, 8), (8, 4096)))
        assert taken([Segment("w", w, column.weight, lora_A, lora_B)], [column]) == 0
        for rows, cols, rank, count in ((640, 520, 16, 0), (640, 528, 16, 1), (1, 256, 8, 1), (640, 512, 384, 0)):
            other, its = of(group, rows, cols, rank, CPU, adapters=BF16)
            assert taken([other], [its]) == count, (group, rows, cols, rank)
        # Two that share a weight: where one of them is not for the kernel, neither is.
        upper, lower = segment.part(0, 320), segment.part(320, 640)
        assert taken([upper, lower], [target]) == (0 if group == "block" else 2)
        upper, lower = segment.part(0, 256), segment.part(256, 640)
        assert taken([upper, lower], [target]) == 2
        assert taken([replace(upper, lora_A=None, lora_B=None), lower], [target]) == 0
        assert taken([upper, replace(lower, peer=True)], [target]) == 0
    kernel = HopperScaled()
    most = [hopper._most_rank(planes, 0, 227 << 10, kernel.ahead, kernel.narrowest) for planes in (1, 2, 3)]
    for planes, rank in zip((1, 2, 3), most, strict=True):
        for tiles in (hopper._tiles(r, planes, 0, 227 << 10, kernel.ahead) for r in range(32, rank + 1, 32)):
            assert tiles is not None
            assert tiles.strip_cols == kernel.narrowest
            assert not kernel.units(Work((0, 0, 0), np.empty((0, 0)), rank, CPU), tiles).rows % 128, "half a block"
    assert np.array(most).min() >= 32
