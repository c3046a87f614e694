"""Results of 8 bits that are merged to 16 first: the same bits however many weights share the memory between."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from test_scaled import GROUPS, adapter, base, weight
from torch import Tensor

from lora_merge import Plan, Segment
from lora_merge.kernels import cpu, merged_first, native, reference
from lora_merge.kernels.merged_first import ByOperations, MergedFirst, between
from lora_merge.kernels.scaled import Placed, Scaled, place

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


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.__name__.rpartition(".")[2])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("run", [(False, 0), (True, 5)], ids=["nearest", "stochastic"])
def test_turns_do_not_show(backend: Any, group: str, run: tuple[bool, int]) -> None:
    """All weights at once, one by one, and some together."""
    found = []
    for room in (1 << 30, 1, 150_000):
        placed, targets = work(group)
        launch = MergedFirst(backend.prepare, ByOperations, placed, CPU, room)
        assert len(launch._steps) == {1 << 30: 1, 1: len(SHAPES)}.get(room, len(launch._steps))
        launch(*run)
        found.append(bits(targets))
        launch(*run)  # what the first run left in the memory between changes nothing
        assert_same(bits(targets), found[-1])
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


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


def test_plans_share_the_memory_between() -> None:
    """As much as the largest needs, and none when they are gone."""
    gc.collect()
    assert CPU not in merged_first._between
    small, large = between(CPU, 1000), between(CPU, 4000)
    assert between(CPU, 2000) is large
    assert between(CPU, 4000) is large is not small
    del small, large
    gc.collect()
    assert CPU not in merged_first._between


def test_runs_in_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have one memory, and one of them at a time."""
    monkeypatch.setenv("LORA_MERGE_BACKEND", BACKENDS[-1].__name__.rpartition(".")[2])
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
