"""Results of 8 bits that are merged to 16 first: the same bits however many weights share the memory between."""

from __future__ import annotations

import ctypes
import gc
import threading
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lora_merge import Plan, Segment
from lora_merge.kernels import cpu, reference
from lora_merge.kernels.backend import name_of
from lora_merge.kernels.bindings import layout, native, operators
from lora_merge.kernels.cuda.scaled import CudaScale
from lora_merge.kernels.scaled import two_step
from lora_merge.kernels.scaled.two_step import ByOperations, TwoStepScaled, between
from lora_merge.kernels.scaled.weights import Placed, Scaled, place, quantise
from lora_merge.kernels.segments import FLOATS
from tests.kernels.test_scaled import GROUPS, adapter, base, weight

CPU = torch.device("cpu")
BACKENDS = [reference] + ([cpu] if native.load_error() is None else [])
SHAPES = [(256, 384), (130, 200), (1, 8), (77, 1), (300, 129), (512, 128)]


def work(group: str, dtype: torch.dtype = torch.bfloat16) -> tuple[list[Placed], list[Scaled]]:
    """Weights of several shapes in parts, with and without adapters, one with a factor for each row."""
    segments: list[Segment] = []
    targets: list[Scaled] = []
    for number, (rows, cols) in enumerate(SHAPES):
        w, target = base(rows, cols, dtype, CPU, seed=number), weight(rows, cols, group, CPU)
        targets.append(target)
        for begin in range(0, rows, 128):
            end = min(begin + 128, rows)
            a, b = adapter(end - begin, cols, 5 + number, torch.float32, CPU) if number % 3 else (None, None)
            norms = torch.linspace(0.5, 2, end - begin) if number == 1 else None
            part = w[begin:end]
            segments.append(Segment(f"w{number}", part, target.weight[begin:end], a, b, 0.5, norms, first=begin * cols))
    return place(segments, targets), targets


def bits(targets: list[Scaled]) -> list[Tensor]:
    return [t.clone() for s in targets for t in (s.weight.view(torch.uint8), s.scales.view(torch.int32))]


def assert_same(got: list[Tensor], wanted: list[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize("backend", BACKENDS, ids=name_of)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("run", [(False, 0), (True, 5)], ids=["nearest", "stochastic"])
def test_turns_do_not_show(backend: Any, group: str, run: tuple[bool, int]) -> None:
    """All weights at once, one by one, and some together."""
    found = []
    for room in (1 << 30, 1, 150_000):
        placed, targets = work(group)
        launch = TwoStepScaled(backend.prepare, ByOperations, placed, CPU, room)
        merged = {p.scaled.weight.data_ptr(): p.scaled for p in placed if p.ready is None}
        groups = sum(s.grid[0] for s in merged.values())
        assert len(launch._steps) == {1 << 30: 1, 1: groups}.get(room, len(launch._steps))
        launch(*run)
        found.append(bits(targets))
        launch(*run)  # what the first run left in the memory between changes nothing
        assert_same(bits(targets), found[-1])
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_cut(data: st.DataObject) -> None:
    """However weights are cut into segments and bands, and whichever groups are written: their bits are those of the
    whole weight, and the rest stays."""
    group = data.draw(st.sampled_from(GROUPS))
    rows, cols = data.draw(st.integers(1, 400)), data.draw(st.integers(1, 400))
    w, target = base(rows, cols, torch.bfloat16, CPU, seed=rows), weight(rows, cols, group, CPU)
    (down, across), (groups_down, groups_across) = target.sizes, target.grid
    top = data.draw(st.integers(0, groups_down - 1)) * down
    bottom = min(data.draw(st.integers(top // down + 1, groups_down)) * down, rows)
    left = data.draw(st.integers(0, groups_across - 1)) * across
    right = min(data.draw(st.integers(left // across + 1, groups_across)) * across, cols)
    edges = sorted({top, bottom, *data.draw(st.lists(st.integers(top, bottom), max_size=4))})
    a, b = adapter(rows, cols, 3, torch.float32, CPU)
    segments = [
        Segment("w", w[i:j, left:right], target.weight[i:j, left:right], a[:, left:right], b[i:j])
        if data.draw(st.booleans())
        else Segment("w", w[i:j, left:right], target.weight[i:j, left:right])
        for i, j in pairwise(edges)
    ]
    merged = torch.zeros(rows, cols, dtype=torch.bfloat16)
    Plan(
        [replace(s, destination=merged[i:j, left:right]) for s, (i, j) in zip(segments, pairwise(edges), strict=True)]
    ).run()
    bits, scales = quantise(merged, group)  # type: ignore[arg-type]
    TwoStepScaled(reference.prepare, ByOperations, place(segments, [target]), CPU, data.draw(st.integers(1, 100_000)))(
        False, 0
    )
    here = torch.zeros(rows, cols, dtype=torch.bool)
    here[top:bottom, left:right] = True
    written = torch.where(here, bits.view(torch.uint8), torch.full((rows, cols), 0x7F, dtype=torch.uint8))
    assert torch.equal(target.weight.view(torch.uint8), written)
    grid = torch.zeros(target.grid, dtype=torch.bool)
    grid[top // down : -(-bottom // down), left // across : -(-right // across)] = True
    assert torch.equal(target.scales.view(target.grid)[grid], scales.view(target.grid)[grid])
    assert target.scales.view(target.grid)[~grid].isnan().all()


def test_parts_of_weights_leave_the_rest_as_it_was() -> None:
    target = weight(256, 256, "block", CPU)
    before = target.weight.view(torch.uint8).clone()
    w = base(128, 128, torch.bfloat16, CPU)
    Plan([Segment("w", w, target.weight[128:, :128])], [target]).run()
    after = target.weight.view(torch.uint8)
    assert torch.equal(after[:128], before[:128])
    assert torch.equal(after[128:, 128:], before[128:, 128:])
    assert not torch.equal(after[128:, :128], before[128:, :128])
    assert target.scales.isnan().tolist() == [True, True, False, True]


def scale_here(jobs: Tensor, dtype: int, group: int, part: int, device: int, *_: object) -> None:
    """What the CUDA kernel does with the words that it gets, on memory of the CPU."""

    def at(address: int, dtype: torch.dtype, rows: int, cols: int, pitch: int) -> Tensor:
        nbytes = ((rows - 1) * pitch + cols) * dtype.itemsize
        memory = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8).view(dtype)
        return memory.as_strided((rows, cols), (pitch, 1))

    name = {code: name.lower() for name, code in layout.GROUPS.items()}[group]
    for source, to, scale, largest, rows, cols, source_pitch, pitch, across, _ in jobs.tolist():
        x = at(source, FLOATS[dtype], rows, cols, source_pitch)
        if part == layout.SCALE_MEASURE:
            most = at(largest, torch.float32, 1, 1, 1)
            most.copy_(torch.maximum(most, x.float().abs().max()))
            continue
        if name == "tensor":
            assert at(largest, torch.float32, 1, 1, 1).item() == x.float().abs().max(), "it has been measured"
        values, scales = quantise(x, name)  # type: ignore[arg-type]
        grid = scales.view({"tensor": (1, 1), "channel": (rows, 1)}.get(name, (-(-rows // 128), -(-cols // 128))))
        at(to, torch.uint8, rows, cols, pitch).copy_(values.view(torch.uint8))
        at(scale, torch.float32, *grid.shape, across).copy_(grid)


@pytest.mark.parametrize("group", GROUPS)
def test_jobs_of_gpus(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses, sizes and scales of what the CUDA kernel is given are those of the weights: a mock of it, which reads
    the words, has the bits of the tensor operations; more jobs than a launch takes, and parts of weights."""
    monkeypatch.setattr(operators, "scale_cuda", scale_here)
    monkeypatch.setattr("lora_merge.kernels.cuda.scaled.index_of", lambda device: 0)

    def everything() -> tuple[list[Placed], list[Scaled]]:
        placed, targets = [], []
        for _ in range(9):
            some, more = work(group)
            placed, targets = placed + some, targets + more
        target = weight(384, 384, group, CPU)
        if group != "tensor":
            w = base(384, 384, torch.bfloat16, CPU)
            boxes = {"block": [(0, 128, 128, 384), (256, 384, 0, 128)], "channel": [(5, 9, 0, 384), (20, 21, 0, 384)]}
            segments = [
                Segment("part", w[i:j, k:m], target.weight[i:j, k:m], *adapter(j - i, m - k, 3, torch.float32, CPU))
                for i, j, k, m in boxes[group]
            ]
            placed, targets = placed + place(segments, [target]), [*targets, target]
        return placed, targets

    found = []
    for scale in (ByOperations, CudaScale):
        placed, targets = everything()
        launch = TwoStepScaled(reference.prepare, scale, placed, CPU, 1 << 30)
        if scale is CudaScale:
            assert max(len(one.args[0]) for one in launch._steps[0][1].launches) == layout.INLINE_ROUNDED
        launch(False, 0)
        launch(False, 0)  # what was the largest before does not count
        found.append(bits(targets))
    assert_same(found[1], found[0])


def test_plans_share_the_memory_between() -> None:
    """As much as the largest needs, and none when they are gone."""
    gc.collect()
    assert CPU not in two_step._between
    small, large = between(CPU, 1000), between(CPU, 4000)
    assert between(CPU, 2000) is large
    assert between(CPU, 4000) is large is not small
    del small, large
    gc.collect()
    assert CPU not in two_step._between


def test_runs_in_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have one memory, and one of them at a time."""
    monkeypatch.setenv("LORA_MERGE_BACKEND", name_of(BACKENDS[-1]))
    made = [work("channel") for _ in range(4)]
    plans = [Plan([p.segment for p in placed], targets) for placed, targets in made]
    plans[0].run()
    wanted = bits(made[0][1])

    def again(plan: Plan) -> None:
        for _ in range(20):
            plan.run()

    threads = [threading.Thread(target=again, args=(plan,)) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _, targets in made:
        assert_same(bits(targets), wanted)
