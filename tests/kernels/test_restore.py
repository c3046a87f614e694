"""TrackedPlan: the bits of `Plan.run` while merged, every bit of the base after, and a bound on the memory between."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from backends import BACKENDS, Backend
from helpers import LAYOUTS, assert_same_bits, bits, cut, cuts, in_place, make_segment
from hypothesis import given
from hypothesis import strategies as st

from lora_merge import Plan, Segment
from lora_merge.errors import AlreadyMerged, InvalidInput, NotRestored
from lora_merge.kernels.segments import FLOATS
from lora_merge.kernels.tracked import composed, one_pass
from lora_merge.restore import TrackedPlan

VALUES = (0.0, -0.0, 1e-42, -6e-8, float("inf"), float("-inf"), float("nan"), 6e4, -1e-30)


def with_special_values(s: Segment, payload: int = 0x2B) -> Segment:
    """Zeros, subnormals, infinities and NaN spread over a base; one NaN with a payload and one that signals."""
    for start, value in enumerate(VALUES):
        s.source[start % s.source.shape[0], start :: len(VALUES) + 2] = value
    word, quiet = bits(s.source), {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00, torch.float32: 0x7FC00000}
    top = quiet[s.source.dtype]
    word[-1, -1], word[-1, 0] = top | payload, (top ^ (top & -top) | payload)
    s.source.view(word.dtype).copy_(word) if s.source.is_contiguous() else s.source.copy_(word.view(s.source.dtype))
    return s


def round_trip(segments: list[Segment]) -> tuple[int, int]:
    """Merge and unmerge segments in place; returns the bytes held while merged, and those of the bases."""
    before = [s.source.clone() for s in segments]
    wanted = [in_place(s) for s in segments]
    Plan(wanted).run()
    plan = TrackedPlan(segments)
    assert plan.nbytes == 0
    plan.merge()
    held = plan.nbytes
    for s, other in zip(segments, wanted, strict=True):
        assert_same_bits(s.source, other.source, f"{s.name}, merged")
    plan.unmerge()
    assert plan.nbytes == 0
    for s, old in zip(segments, before, strict=True):
        assert_same_bits(s.source, old, f"{s.name}, restored")
    return held, sum(s.source.nbytes for s in segments)


@pytest.mark.parametrize("adapters", FLOATS)
@pytest.mark.parametrize("base", FLOATS)
def test_any_values_in_any_layout(backend: Backend, base: torch.dtype, adapters: torch.dtype) -> None:
    segments, updates, dtypes = [], (0.001, 1.0, 1e4), (base, base, adapters, adapters)
    turn = FLOATS.index(base) + FLOATS.index(adapters)
    for index, layout in enumerate(LAYOUTS):
        # The interpreter meets each layout with each update, and all of both with each pair of dtypes.
        for update in (updates[(index + turn) % 3],) if backend.interpreted else updates:
            s = make_segment(
                layout, 37, 71, 5, dtypes, backend.device, layouts=(layout,) * 4, update=update, seed=index
            )
            segments.append(in_place(with_special_values(s)))
    round_trip(segments)


@given(data=st.data())
def test_any_size_and_cut(backend: Backend, data: st.DataObject) -> None:
    """Pieces of one tensor, blocks that end anywhere, DoRA, a factor of zero, and no adapter at all."""
    most = 40 if backend.interpreted else 150
    rows, cols = data.draw(st.integers(1, most), "rows"), data.draw(st.integers(1, most), "columns")
    rank = data.draw(st.sampled_from((1, 16, 33, 0)), "rank")
    base = data.draw(st.sampled_from(FLOATS), "base")
    adapters = data.draw(st.sampled_from(FLOATS), "adapters")
    layout = data.draw(st.sampled_from(LAYOUTS), "layout")
    update = data.draw(st.sampled_from((0.01, 1.0, 1e3)), "update")
    s = in_place(
        make_segment("w", rows, cols, rank, (base, base, adapters, adapters), backend.device, layouts=(layout,) * 4,
                     update=update)
    )  # fmt: skip
    if data.draw(st.booleans(), "row scale"):
        s = dataclasses.replace(s, row_scale=torch.linspace(0.0, 2.0, rows, device=backend.device))
    parts = cut(s, data.draw(cuts(rows, cols), "cuts"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_pass, "FIRST_ROOM", data.draw(st.sampled_from((1, 64, 10**9)), "room"))
        patch.setattr(composed, "BLOCK", data.draw(st.integers(1, 3 * most * most) if backend.compiled
                                                  else st.integers(most * most, 3 * most * most), "block"))  # fmt: skip
        before = s.source.clone()
        whole = in_place(s)
        Plan([whole]).run()
        plan = TrackedPlan(parts)
        plan.merge()
        assert_same_bits(s.source, whole.source, "merged")
        plan.unmerge()
        assert_same_bits(s.source, before, "restored")


def test_an_arena_that_ends_on_the_way(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some units of work find room and others do not, in several tensors of several dtypes, more than a unit wide."""
    monkeypatch.setattr(one_pass, "FIRST_ROOM", 17)  # of these weights' bytes: an odd number
    rows, cols = (40, 70) if backend.interpreted else (201, 1100)
    segments = [
        in_place(make_segment(str(dtype), rows, cols, 8, (dtype,) * 4, backend.device, update=1.0)) for dtype in FLOATS
    ]
    held, base = round_trip([with_special_values(s) for s in segments])
    assert held > base / 8


@pytest.mark.parametrize(("update", "most"), [(1e-3, 0.17), (1e-2, 0.17), (0.1, 0.17), (1.0, 0.27)])
def test_memory(backend: Backend, update: float, most: float) -> None:
    """Shares of the base's bytes; the sample is large enough that chance moves them by less than 0.005."""
    shape = (64, 256) if backend.interpreted else (512, 1024)
    s = in_place(make_segment("w", *shape, 16, (torch.bfloat16,) * 4, backend.device, update=update))
    held, base = round_trip([s])
    assert held <= most * base, f"{held / base:.3f} of the base's bytes"


def test_whatever_the_adapter_never_much_above_a_copy(backend: Backend) -> None:
    s = in_place(make_segment("w", 64, 256, 16, (torch.bfloat16,) * 4, backend.device, update=1e4))
    held, base = round_trip([s])
    units = s.source.numel() // 1024  # at most: each has a place and a checksum of 8 bytes
    left = base // one_pass.FIRST_ROOM  # of the first arena, which was too small for a unit
    assert held <= 1.125 * base + 16 * units + left, "2 bits an element on top of raw bits"


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_failing_merge_changes_nothing(backend: Backend, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    """Out of memory on the way: what was not merged yet is not written, and what was comes back."""
    monkeypatch.setattr(composed, "BLOCK", 2000)
    monkeypatch.setattr(one_pass, "FIRST_ROOM", 10)  # room for some of what escapes
    s = in_place(make_segment("w", 60, 100, 4, (torch.bfloat16,) * 4, backend.device, update=1.0))
    before, calls, empty = s.source.clone(), [], torch.empty

    def failing(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append(None)
        if len(calls) == fails_at:
            raise torch.OutOfMemoryError("no room")
        return empty(*args, **kwargs)

    plan = TrackedPlan([s])
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", failing)
        with pytest.raises(torch.OutOfMemoryError):
            plan.merge()
    assert_same_bits(s.source, before)
    assert plan.nbytes == 0
    plan.merge()  # and the plan still works
    plan.unmerge()
    assert_same_bits(s.source, before)


def flip(t: torch.Tensor, bit: int) -> None:
    """Of every element, as far as bits go."""
    word = bits(t)
    word ^= 1 << bit if bit < 8 * t.element_size() - 1 else -1 << bit
    t.copy_(word.view(t.dtype))


DAMAGE: dict[str, Callable[[torch.Tensor], object]] = {
    "the lowest bit of the first element": lambda t: flip(t[:1, :1], 0),
    "the sign of the last element": lambda t: flip(t[-1:, -1:], 8 * t.element_size() - 1),
    "all signs": lambda t: flip(t, 8 * t.element_size() - 1),
    "two neighbours exchanged": lambda t: t[0, :2].copy_(t[0, :2].flip(0)),
    "two rows exchanged": lambda t: t[:2].copy_(t[:2].flip(0)),
    "a column all zero": lambda t: t[:, 5].zero_(),
}


@pytest.mark.parametrize("what", DAMAGE)
@pytest.mark.parametrize("dtype", FLOATS)
def test_written_in_between(backend: Backend, dtype: torch.dtype, what: str) -> None:
    """What was written since is found, named and left as it is; the rest of the weight, and all others, come back."""
    rows, cols = (40, 70) if backend.interpreted else (250, 1500)
    segments = [
        in_place(make_segment(name, rows, cols, 8, (dtype,) * 4, backend.device, update=1e-3, layouts=(layout,) * 4))
        for name, layout in (("a", "contiguous"), ("b", "padded rows"), ("c", "transposed"))
    ]
    before = [s.source.clone() for s in segments]
    plan = TrackedPlan(segments)
    plan.merge()
    weight = segments[1].source
    DAMAGE[what](weight)
    left = weight.clone()
    with pytest.raises(NotRestored, match=r"^b: written while merged"):
        plan.unmerge()
    for s, old in zip(segments, before, strict=True):
        if s.name != "b":
            assert_same_bits(s.source, old, f"{s.name}, restored")
    as_left, as_before = bits(weight) == bits(left), bits(weight) == bits(before[1])
    assert (as_left | as_before).all(), "an element is neither what was written nor the base"
    if backend.compiled and "element" in what:  # a unit is a whole piece of a weight, or all that there is of it
        assert not as_left.all(), "units that nobody wrote were given up too"
    assert plan.nbytes == 0
    weight.copy_(before[1])
    plan.merge()  # and the plan still works
    plan.unmerge()
    assert_same_bits(weight, before[1])


def test_refused(backend: Backend) -> None:
    s = make_segment("w", 8, 8, 2, (torch.float32,) * 4, backend.device)
    with pytest.raises(InvalidInput, match="w: a tracked merge works in place"):
        TrackedPlan([s])
    copy = torch.zeros(4, 4, dtype=torch.int32, device=backend.device)
    with pytest.raises(InvalidInput, match="w: a tracked merge needs bf16, fp16 or fp32"):
        TrackedPlan([Segment("w", copy, copy)])
    same = in_place(s)
    with pytest.raises(InvalidInput, match="two segments write the same place"):
        TrackedPlan([same, same])
    plan = TrackedPlan([same])
    plan.merge()
    with pytest.raises(AlreadyMerged):
        plan.merge()
    plan.unmerge()
    plan.unmerge()
    TrackedPlan([]).merge()


@pytest.mark.parametrize("merging", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_denormals_come_back_whatever_a_thread_does_with_them(
    backend: Backend, dtype: torch.dtype, merging: bool
) -> None:
    """`torch.set_flush_denormal` is another one on the way back."""
    if not torch.set_flush_denormal(False):
        pytest.skip("this machine cannot flush denormals")
    torch.ones(1 << 22).sum()  # torch's threads begin with what this one does
    s = in_place(make_segment("denormal", 40, 64, 4, (dtype, dtype, torch.float32, torch.float32), backend.device))
    s.lora_B.zero_()
    flat = s.source.view(-1)
    flat[::7] = (torch.rand(flat[::7].shape) * torch.finfo(dtype).tiny).to(flat)
    before, plan = s.source.clone(), TrackedPlan([s])
    try:
        torch.set_flush_denormal(merging)
        plan.merge()
        torch.set_flush_denormal(not merging)
        plan.unmerge()
        flushes = (torch.full((1,), 1e-39) * 1).item() == 0
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(s.source, before)
    assert flushes is not merging, "the thread's own setting is another one now"


# ---- one update after another: TrackedPlan.remerge -------------------------------------------------------------------


def other_update(s: Segment, seed: int) -> Segment:
    """The same weight with an adapter of the same shapes, dtypes and layouts, another scaling and other row scales."""
    generator = torch.Generator().manual_seed(seed)

    def like(t: torch.Tensor) -> torch.Tensor:
        other = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        size = t.float().std(correction=0).nan_to_num().cpu()
        return other.copy_((torch.randn(t.shape, generator=generator) * size).to(t.dtype))

    assert s.lora_A is not None
    assert s.lora_B is not None
    scale = None if s.row_scale is None else torch.rand(s.row_scale.shape, generator=generator).to(s.row_scale)
    return dataclasses.replace(
        s, lora_A=like(s.lora_A), lora_B=like(s.lora_B), scaling=s.scaling * (0.5 + seed), row_scale=scale
    )


def fresh(base: Sequence[torch.Tensor], segments: Sequence[Segment]) -> list[torch.Tensor]:
    """What `Plan.run` makes of these bases, stored as the weights are."""
    made = []
    for old, s in zip(base, segments, strict=True):
        weight = torch.empty_strided(s.source.shape, s.source.stride(), dtype=old.dtype, device=old.device)
        weight.copy_(old)
        made.append(dataclasses.replace(s, source=weight, destination=weight))
    Plan(made).run()
    return [s.source for s in made]


def take_turns(segments: list[Segment], turns: int = 3) -> None:
    """Updates follow one another on the same weights, by two plans; each is what a merge of the base is, and the base
    comes back after the last."""
    base = [s.source.clone() for s in segments]
    updates = [segments, *([other_update(s, seed) for s in segments] for seed in range(turns))]
    plans = [TrackedPlan(update, keep=True) for update in updates]
    for number, plan in enumerate(plans):
        before = plans[number - 1]
        plan.remerge(before) if number else plan.merge()
        assert plan.merged
        assert not number or not before.merged
        for s, wanted in zip(segments, fresh(base, updates[number]), strict=True):
            assert_same_bits(s.source, wanted, f"{s.name}, update {number}")
    plans[-1].unmerge()
    for s, old in zip(segments, base, strict=True):
        assert_same_bits(s.source, old, f"{s.name}, restored")


@pytest.mark.parametrize("adapters", FLOATS)
@pytest.mark.parametrize("base", FLOATS)
def test_remerge_any_values_in_any_layout(backend: Backend, base: torch.dtype, adapters: torch.dtype) -> None:
    segments = []
    ranks = (5,) if backend.interpreted else (5, 40)
    for index, (layout, rank) in enumerate((layout, rank) for layout in LAYOUTS for rank in ranks):
        for update in (1.0,) if backend.interpreted else (0.001, 1.0):
            dtypes = (base, base, adapters, adapters)
            s = make_segment(
                layout, 37, 71, rank, dtypes, backend.device, layouts=(layout,) * 4, update=update, seed=index
            )
            segments.append(in_place(with_special_values(s)))
    take_turns(segments, 1 if backend.interpreted else 2)


@given(data=st.data())
def test_remerge_any_size_and_cut(backend: Backend, data: st.DataObject) -> None:
    most = 40 if backend.interpreted else 200
    rows, cols = data.draw(st.integers(1, most), "rows"), data.draw(st.integers(1, most), "columns")
    rank = data.draw(st.sampled_from((1, 8, 16, 32, 33, 64)), "rank")
    base = data.draw(st.sampled_from(FLOATS), "base")
    adapters = data.draw(st.sampled_from(FLOATS), "adapters")
    layout = data.draw(st.sampled_from(LAYOUTS), "layout")
    update = data.draw(st.sampled_from((0.01, 1.0, 1e3)), "update")
    s = in_place(
        make_segment("w", rows, cols, rank, (base, base, adapters, adapters), backend.device, layouts=(layout,) * 4,
                     update=update)
    )  # fmt: skip
    if data.draw(st.booleans(), "row scale"):
        s = dataclasses.replace(s, row_scale=torch.linspace(0.0, 2.0, rows, device=backend.device))
    pieces = data.draw(cuts(rows, cols), "cuts")
    before, other = s.source.clone(), other_update(s, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_pass, "FIRST_ROOM", data.draw(st.sampled_from((1, 64, 10**9)), "room"))
        plans = [TrackedPlan(cut(update, pieces), keep=True) for update in (s, other)]
        plans[0].merge()
        for number in (1,) if backend.interpreted else (1, 0, 1):
            plans[number].remerge(plans[1 - number])
            assert_same_bits(s.source, *fresh([before], [(s, other)[number]]), f"update {number}")
        plans[1].unmerge()
        assert_same_bits(s.source, before, "restored")


def test_remerge_is_one_pass_in_one_memory(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the backend has a kernel for it; and what is held is codes and records once, and a second arena."""
    shape = (64, 256) if backend.interpreted else (512, 1024)
    segments = [in_place(make_segment("w", *shape, 16, (torch.bfloat16,) * 4, backend.device, update=0.01))]
    one, two = TrackedPlan(segments, keep=True), TrackedPlan([other_update(s, 1) for s in segments], keep=True)
    one.merge()
    held, size = one.nbytes, segments[0].source.nbytes
    if backend.name in ("cuda", "cpu"):
        for plan in (one, two):
            assert plan._tracked is not None
            monkeypatch.setattr(plan._tracked, "unmerge", lambda *_: pytest.fail("taken off in a pass of its own"))
    two.remerge(one)
    one.remerge(two)
    assert one.nbytes + two.nbytes <= held + size // one_pass.FIRST_ROOM + 4


def test_remerge_where_plans_differ(backend: Backend) -> None:
    """Other ranks, dtypes, orders, weights, no adapter at all, and a plan that is not merged: right all the same."""
    dtypes = (torch.bfloat16,) * 4
    a, b = (in_place(make_segment(name, 40, 70, 8, dtypes, backend.device)) for name in "ab")
    base = [a.source.clone(), b.source.clone()]

    def adapter(s: Segment, rank: int, dtype: torch.dtype) -> Segment:
        other = make_segment("other", 40, 70, rank, (torch.bfloat16, torch.bfloat16, dtype, dtype), backend.device)
        return dataclasses.replace(s, lora_A=other.lora_A, lora_B=other.lora_B)

    scale = torch.linspace(0.5, 2.0, 40, device=backend.device)
    sets: list[list[Segment]] = [
        [a, b], [adapter(a, 16, torch.bfloat16), b], [b, a], [adapter(a, 8, torch.float32), b], [a],
        [dataclasses.replace(a, row_scale=scale), b], [], [a, b],
    ]  # fmt: skip
    plans = [TrackedPlan(segments) for segments in sets]
    for number, (plan, segments) in enumerate(zip(plans, sets, strict=True)):
        plan.remerge(plans[number - 1])
        merged = {s.name: w for s, w in zip(segments, fresh([base["ab".index(s.name)] for s in segments], segments),
                                            strict=True)}  # fmt: skip
        for s, old in zip((a, b), base, strict=True):
            assert_same_bits(s.source, merged.get(s.name, old), f"{s.name}, {number}")
    with pytest.raises(AlreadyMerged):
        plans[-1].remerge(plans[0])
    plans[-1].unmerge()
    for s, old in zip((a, b), base, strict=True):
        assert_same_bits(s.source, old, "restored")


@pytest.mark.parametrize("what", ["the lowest bit of the first element", "all signs"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_written_before_a_remerge(backend: Backend, dtype: torch.dtype, what: str) -> None:
    """What others wrote is named and left, all else is the base again, and neither plan is merged."""
    rows, cols = (40, 70) if backend.interpreted else (250, 1500)
    segments = [
        in_place(make_segment(name, rows, cols, 8, (dtype,) * 4, backend.device, update=1e-3)) for name in "abc"
    ]
    before = [s.source.clone() for s in segments]
    one, two = TrackedPlan(segments, keep=True), TrackedPlan([other_update(s, 1) for s in segments], keep=True)
    one.merge()
    weight = segments[1].source
    DAMAGE[what](weight)
    left = bits(weight.clone())
    with pytest.raises(NotRestored, match=r"^b: written while merged"):
        two.remerge(one)
    assert not one.merged
    assert not two.merged
    for s, old in zip(segments, before, strict=True):
        if s.name != "b":
            assert_same_bits(s.source, old, f"{s.name}, restored")
    assert ((bits(weight) == left) | (bits(weight) == bits(before[1]))).all()
    assert (bits(weight) == left).any()
    weight.copy_(before[1])
    two.merge()
    one.remerge(two)
    one.unmerge()
    for s, old in zip(segments, before, strict=True):
        assert_same_bits(s.source, old, f"{s.name}, restored")


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_remerge_without_memory(backend: Backend, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    """It goes on in two passes, or raises with every bit of the base in place; then the plans still work."""
    monkeypatch.setattr(composed, "BLOCK", 2000)
    monkeypatch.setattr(one_pass, "FIRST_ROOM", 64)
    s = in_place(make_segment("w", 60, 100, 4, (torch.bfloat16,) * 4, backend.device, update=1e-3))
    large = dataclasses.replace(other_update(s, 1), scaling=1e5)  # escapes more than there is room for
    before, calls, empty = s.source.clone(), [], torch.empty

    def failing(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append(None)
        if len(calls) == fails_at:
            raise torch.OutOfMemoryError("no room")
        return empty(*args, **kwargs)

    one, two = TrackedPlan([s], keep=True), TrackedPlan([large], keep=True)
    one.merge()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", failing)
        try:
            two.remerge(one)
        except torch.OutOfMemoryError:
            assert not two.merged
            assert not one.merged or backend.name == "reference"  # whose way back takes memory
        else:
            assert not one.merged
            assert_same_bits(s.source, *fresh([before], [large]))
    one.unmerge()
    two.unmerge()
    assert_same_bits(s.source, before)
    one.merge()
    two.remerge(one)
    two.unmerge()
    assert_same_bits(s.source, before)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("backend", [one for one in BACKENDS if not str(one.id).startswith("reference")], indirect=True)
def test_a_remerge_whose_kernel_is_interrupted(backend: Backend, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Whichever plan a unit of work is merged by then, it is brought back by that one."""
    segments, one, two = two_updates(backend)
    before = [s.source.clone() for s in segments]
    one.merge()
    kernels = two._tracked._kernels
    launch = kernels.retrack if backend.name in ("cuda", "cpu") else kernels.track

    def broken(*args: object) -> None:
        if when == "after":
            launch(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kernels, launch.__name__, broken)
        with pytest.raises(KeyboardInterrupt):
            two.remerge(one)
    assert_as_before(segments, before, one, two)


def test_a_remerge_that_is_interrupted_by_what_is_done_meanwhile(backend: Backend) -> None:
    """As of the others: brought back, and good for what comes."""
    segments, one, two = two_updates(backend)
    before = [s.source.clone() for s in segments]
    one.merge()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        two.remerge(one, interrupt)
    assert_as_before(segments, before, one, two)


def two_updates(backend: Backend) -> tuple[list[Segment], TrackedPlan, TrackedPlan]:
    """Two small matrices, and plans of two updates of them."""
    segments = [in_place(make_segment(name, 60, 100, 4, (torch.bfloat16,) * 4, backend.device)) for name in "ab"]
    one, two = TrackedPlan(segments, keep=True), TrackedPlan([other_update(s, 1) for s in segments], keep=True)
    return segments, one, two


def assert_as_before(
    segments: Sequence[Segment], before: Sequence[torch.Tensor], one: TrackedPlan, two: TrackedPlan
) -> None:
    """Neither plan is merged, the matrices are what they were, and merging goes on from there."""
    assert not one.merged
    assert not two.merged
    for s, old in zip(segments, before, strict=True):
        assert_same_bits(s.source, old, s.name)
    two.merge()
    one.remerge(two)
    one.unmerge()
    for s, old in zip(segments, before, strict=True):
        assert_same_bits(s.source, old, s.name)
