"""Runs every path of the CUDA kernels once, on small shapes: compute-sanitizer watches (tests/gpu/gpu.sh).

python tests/support/sanitize.py [plain] [tracked] [scaled]        (default: all)
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from typing import get_args

os.environ["LORA_MERGE_BACKEND"] = "cuda"

import torch
from helpers import LAYOUTS, assert_accurate, make_segment

from lora_merge import Plan, Segment
from lora_merge.kernels.bindings import native
from lora_merge.kernels.cuda import backend as cuda
from lora_merge.kernels.cuda.scaled import CudaScale, MergedAtOnce, separate
from lora_merge.kernels.scaled.two_step import TwoStepScaled
from lora_merge.kernels.scaled.weights import Group, Scaled, place
from lora_merge.kernels.segments import FP8
from lora_merge.kernels.tracked import one_pass
from lora_merge.restore import TrackedPlan

DEVICE = torch.device("cuda", 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GROUPS: tuple[Group, ...] = get_args(Group)


def main() -> None:
    assert native.load_error() is None
    segments = shapes()
    for part in sys.argv[1:] or PARTS:
        PARTS[part](segments)
    torch.cuda.synchronize()
    print("all paths ran")


def shapes() -> list[Segment]:
    segments: list[Segment] = []
    # Narrow and wide products, one chunk of the rank and several, staged and direct, whole tiles and edges.
    for (base, out), adapters, rank in itertools.product(
        ((BF16, BF16), (FP32, BF16), (BF16, FP32), (FP16, FP16)), (BF16, FP32), (16, 24, 33, 128, 512)
    ):
        for rows, cols in ((72, 128), (37, 91)):
            segments.append(make_segment("shapes", rows, cols, rank, (base, out, adapters, adapters), DEVICE))
    # fp16 products; ranks that are repacked in front of the merge, in every layout.
    segments += [make_segment("fp16", *shape, 40, (FP16,) * 4, DEVICE) for shape in ((72, 128), (37, 91))]
    for (base, adapters), rank, layout in itertools.product(
        ((BF16, BF16), (FP16, FP16), (BF16, FP32)), (1, 12), LAYOUTS
    ):
        layouts = ("contiguous", "contiguous", layout, layout)
        segments.append(
            make_segment("repacked", 520, 520, rank, (base, base, adapters, adapters), DEVICE, layouts=layouts)
        )
    for layout in LAYOUTS:
        segments.append(make_segment(layout, 40, 72, 20, (BF16,) * 4, DEVICE, layouts=(layout,) * 4))
        segments.append(make_segment("convert", 3, 9000, 0, (FP32, BF16, BF16, BF16), DEVICE))
    return segments


def plain(segments: list[Segment]) -> None:
    for group in (segments, *([s] for s in segments[::9])):  # as a table on the device, and as a kernel argument
        Plan(group).run()
        for s in group:
            assert_accurate(s, s.destination)
        Plan(group).run(rounding="stochastic", seed=1)
    for dtype, layout in itertools.product((torch.uint8, torch.int16, FP32, torch.int64), LAYOUTS):
        copy = make_segment(layout, 40, 72, 0, (FP32,) * 4, DEVICE)
        source = copy.source.to(dtype)
        target = torch.empty(72, 40, dtype=dtype, device=DEVICE).t()
        Plan([Segment("bits", source, target), Segment("run", source, torch.empty_like(source))]).run()
        assert torch.equal(source, target)
    for rank in (8, 40, 512):
        s = make_segment("norms", 70, 200, rank, (BF16, BF16, FP32, FP32), DEVICE)
        scale = torch.rand(70, device=DEVICE)
        plan = Plan([Segment("norms", s.source, s.destination, s.lora_A, s.lora_B, s.scaling, scale)])
        plan.row_norms()
        plan.run()


def tracked(segments: list[Segment]) -> None:
    in_place = [dataclasses.replace(s, destination=s.source) for s in segments if s.rank]
    scaled = make_segment("scaled", 70, 200, 40, (BF16,) * 4, DEVICE)
    in_place.append(dataclasses.replace(scaled, destination=scaled.source, row_scale=torch.rand(70, device=DEVICE)))
    before = [s.source.clone() for s in in_place]
    others = [dataclasses.replace(s, scaling=2 * s.scaling) for s in in_place]
    for one_pass.FIRST_ROOM, one_pass.LEFT_OVER in ((1000, 512), (1, 1)):  # the arena ends on the way; chunks
        # Segments that a launch of both adapters has no room for would send all of them the way of two passes.
        for low, high in ((0, 128), (129, 512)):
            ranks = [number for number, s in enumerate(in_place) if low <= s.rank <= high]
            plan, other = (TrackedPlan([some[number] for number in ranks]) for some in (in_place, others))
            plan.merge()
            other.remerge(plan)
            plan.remerge(other)
            plan.unmerge()
        assert all(torch.equal(s.source, old) for s, old in zip(in_place, before, strict=True))


def scaled(_: list[Segment]) -> None:
    """Results of 8 bits: whole vectors and edges, rows that lanes keep and longer ones, bands in two streams."""
    for group, base in itertools.product(GROUPS, (BF16, FP16, FP32)):
        segments, targets = [], list[Scaled]()
        for rank, (rows, cols) in itertools.product((0, 8, 40), ((256, 384), (130, 200), (77, 1), (9, 21000))):
            s = make_segment("scaled", rows, cols, rank, (base, BF16, FP32, FP32), DEVICE)
            count = {"tensor": 1, "channel": rows}.get(group, -(-rows // 128) * -(-cols // 128))
            values, scales = torch.empty(rows, cols, dtype=FP8, device=DEVICE), torch.empty(count, device=DEVICE)
            target = Scaled(values, scales, group, BF16 if len(targets) % 2 else FP16)
            segments.append(dataclasses.replace(s, destination=target.weight))
            targets.append(target)
        TwoStepScaled(cuda.prepare, CudaScale, place(segments, targets), DEVICE, room=1 << 15)(False, 0)
        assert all(target.scales.isfinite().all() for target in targets)
        if base != FP32:
            at_once(group, base)


def at_once(group: Group, base: torch.dtype) -> None:
    """The same by one kernel, where it is there: blocks whole and cut, strips that lack boxes, all products."""
    segments, targets = [], list[Scaled]()
    for (rank, adapters), (rows, cols) in itertools.product(
        ((8, base), (16, FP32), (40, FP32), (136, base)), ((256, 384), (130, 208), (520, 560))
    ):
        s = make_segment("scaled", rows, cols, rank, (base, BF16, adapters, adapters), DEVICE)
        count = {"tensor": 1, "channel": rows}.get(group, -(-rows // 128) * -(-cols // 128))
        values, scales = torch.empty(rows, cols, dtype=FP8, device=DEVICE), torch.empty(count, device=DEVICE)
        targets.append(Scaled(values, scales, group, base))
        segments.append(dataclasses.replace(s, destination=values))
    here, _ = separate(place(segments, targets), DEVICE)
    assert here or torch.cuda.get_device_capability() != (9, 0)
    if here:
        MergedAtOnce(here, DEVICE)(False, 0)
        assert all(p.scaled.scales.isfinite().all() for p in here)


PARTS = {"plain": plain, "tracked": tracked, "scaled": scaled}

main()
