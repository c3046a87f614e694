"""Every backend on the same cases: accuracy, layouts, and results that do not depend on how a weight is cut."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from backends import Backend
from helpers import (
    FLOAT32_ERROR_OF_TORCH,
    LAYOUTS,
    assert_accurate,
    assert_correctly_rounded,
    assert_same_bits,
    cut,
    cuts,
    exact,
    in_place,
    make_segment,
    pairwise,
    run,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_merge import Plan, Segment
from lora_merge.kernels.segments import FLOATS

RANKS = (16, 1, 32, 5, 64, 33, 8, 127, 2, 100, 256, 31, 3, 48, 511, 128, 17, 255)


@pytest.mark.parametrize("case", range(9))
def test_dtypes(backend: Backend, case: int) -> None:
    """Every combination of base, output and adapter dtypes (pairwise on the interpreter), ragged shapes, many ranks."""
    if backend.interpreted:
        combinations = [pairwise(case)]
    else:
        combinations = [(*pairwise(case)[:2], a, b) for a in FLOATS for b in FLOATS]
    rows, cols = (130, 200) if backend.interpreted else (67, 387)
    segments = []
    for index, dtypes in enumerate(combinations):
        rank = RANKS[(case * len(combinations) + index) % len(RANKS)]
        label = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        segments.append(make_segment(f"{label}, rank {rank}", rows, cols, rank, dtypes, backend.device, seed=index))
    run(*segments)
    for s in segments:
        assert_accurate(s, s.destination)
        assert_correctly_rounded(s, s.destination)


def test_every_rank(backend: Backend) -> None:
    """Ranks from 1 to 512, float32 adapters on a bf16 base; updates as large as the weights."""
    ranks = range(1, 513) if backend.compiled else (1, 2, 15, 16, 17, 32, 47, 100, 512)
    dtypes = (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
    segments = [make_segment(f"rank {r}", 9, 37, r, dtypes, backend.device, update=1.0, seed=r) for r in ranks]
    run(*segments)
    for s in segments:
        assert_accurate(s, s.destination)


@pytest.mark.parametrize("rank", [1, 16, 64, 300])
@pytest.mark.parametrize("update", [0.1, 1.0])
def test_float32_is_as_good_as_torch(backend: Backend, rank: int, update: float) -> None:
    torch.set_float32_matmul_precision("highest")
    s = make_segment("float32", 192, 256, rank, (torch.float32,) * 4, backend.device, update=update)
    run(s)
    error = s.destination.double() - exact(s)
    torchs = torch.addmm(s.source, s.lora_B, s.lora_A, alpha=s.scaling).double() - exact(s)
    largest, torchs_largest = error.abs().max().item(), torchs.abs().max().item()
    rms, torchs_rms = error.square().mean().sqrt().item(), torchs.square().mean().sqrt().item()
    assert largest <= FLOAT32_ERROR_OF_TORCH * torchs_largest, f"largest {largest:.3g}, torch's {torchs_largest:.3g}"
    assert rms <= FLOAT32_ERROR_OF_TORCH * torchs_rms, f"RMS {rms:.3g}, torch's {torchs_rms:.3g}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", ["source", "destination", "lora_A", "lora_B", "all"])
def test_layouts(backend: Backend, layout: str, place: str) -> None:
    """Any strides of any tensor, single rows and columns; nothing beside the destination is written."""
    places = ("source", "destination", "lora_A", "lora_B")
    layouts = [layout if place in (p, "all") else "contiguous" for p in places]
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16)
    shapes = [(70, 131, 20), (1, 77, 3), (77, 1, 3), (16, 16, 16)]
    segments = [
        make_segment(f"{place} {layout} {rows}x{cols}", rows, cols, rank, dtypes, backend.device, layouts=layouts)
        for rows, cols, rank in (shapes[:3] if backend.interpreted else shapes)
    ]
    segments += [in_place(dataclasses.replace(s, name=f"{s.name} in place")) for s in segments]
    originals = [s.source.clone() for s in segments]
    run(*segments)
    for s, original in zip(segments, originals, strict=True):
        assert_accurate(dataclasses.replace(s, source=original), s.destination)


@settings(max_examples=60)
@given(data=st.data())
def test_drawn(backend: Backend, data: st.DataObject) -> None:
    """Shapes, ranks, dtypes, strides and scalings as hypothesis draws them."""
    size = st.integers(0, 70)
    rows, cols = data.draw(size, "rows"), data.draw(size, "cols")
    rank = data.draw(st.sampled_from([0, 1, 2, 8, 16, 19, 32, 65, 128]), "rank")
    dtypes = [data.draw(st.sampled_from(FLOATS), "dtype") for _ in range(4)]
    layouts = [data.draw(st.sampled_from(LAYOUTS), "layout") for _ in range(4)]
    scaling = data.draw(st.sampled_from([1.0, -0.25, 0.0, 2.0, 1 / 3]), "scaling")
    update = data.draw(st.sampled_from([1e-3, 0.1, 1.0, 30.0]), "update")
    s = make_segment(
        "drawn", rows, cols, rank, dtypes, backend.device, layouts=layouts, update=update, scaling=scaling or 1.0
    )
    s = dataclasses.replace(s, scaling=scaling)
    run(s)
    assert_accurate(s, s.destination)


@settings(max_examples=40)
@given(data=st.data())
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_cuts_do_not_show(backend: Backend, rounding: str, data: st.DataObject) -> None:
    """However a weight is cut into rectangles, in place or not: the same bits."""
    seed = 7 if rounding == "stochastic" else None
    # Compiled kernels get shapes beyond their tiles, and ranks beyond their blocks.
    shapes, ranks = [(19, 40)], [0, 3, 16, 40]
    if not backend.interpreted:
        shapes, ranks = [(40, 75), (67, 140), (331, 270)], [*ranks, 130, 300]
    rows, cols = data.draw(st.sampled_from(shapes), "shape")
    dtypes = data.draw(st.sampled_from([pairwise(i) for i in range(9)]), "dtypes")
    rank = data.draw(st.sampled_from(ranks), "rank")
    whole = make_segment("whole", rows, cols, rank, dtypes, backend.device, update=1.0)
    run(whole, rounding=rounding, seed=seed)
    wanted = whole.destination.clone()

    parts = data.draw(cuts(rows, cols, 3 if backend.interpreted else 6), "cuts")
    apart = dataclasses.replace(whole, destination=torch.zeros_like(wanted))
    run(*cut(apart, parts), rounding=rounding, seed=seed)
    assert_same_bits(apart.destination, wanted, f"cut into {parts}")

    if dtypes[0] == dtypes[1]:
        same = in_place(whole)
        run(*cut(same, parts), rounding=rounding, seed=seed)
        assert_same_bits(same.destination, wanted, f"in place, cut into {parts}")


@pytest.mark.parametrize("adapters", FLOATS)
@pytest.mark.parametrize("base", FLOATS)
def test_where_it_lies_does_not_show(backend: Backend, base: torch.dtype, adapters: torch.dtype) -> None:
    """By rows or by columns, in place or not: the same bits, of single columns too."""
    rows, cols = (20, 40) if backend.interpreted else (70, 140)
    dtypes = (base, base, adapters, adapters)
    whole = make_segment("by rows", rows, cols, 64, dtypes, backend.device, update=1.0)
    by_columns = dataclasses.replace(whole, source=whole.source.t().contiguous().t())
    same = in_place(by_columns)
    column = torch.zeros(rows, 1, dtype=base, device=backend.device).t().contiguous().t()
    alone = dataclasses.replace(cut(whole, [(0, rows, 3, 4)])[0], destination=column)
    apart = dataclasses.replace(by_columns, destination=torch.zeros_like(whole.destination))
    for s in (whole, same, alone, apart):
        run(s)
    assert_same_bits(same.destination, whole.destination, "by columns, in place")
    assert_same_bits(apart.destination, whole.destination, "from columns to rows")
    assert_same_bits(alone.destination, whole.destination[:, 3:4], "a column alone")


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_deterministic(backend: Backend, rounding: str) -> None:
    """Launch after launch, and beside other segments, the same bits."""
    seed = 3 if rounding == "stochastic" else None
    segments = [make_segment(f"{i}", 50, 150, 48, pairwise(i), backend.device, seed=i) for i in range(9)]
    plan = Plan(segments)
    plan.run(rounding=rounding, seed=seed)
    first = [s.destination.clone() for s in segments]
    for s in segments:
        s.destination.zero_()
    plan.run(rounding=rounding, seed=seed)
    for s, wanted in zip(segments, first, strict=True):
        assert_same_bits(s.destination, wanted, "the second run")
        alone = dataclasses.replace(s, destination=torch.zeros_like(s.destination))
        run(alone, rounding=rounding, seed=seed)
        assert_same_bits(alone.destination, wanted, "the segment alone")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_sums_of_one_sign(backend: Backend, dtype: torch.dtype) -> None:
    """Where all products have one sign, what a matrix unit cuts off adds up, rank after rank."""
    rows, cols, rank = (16, 64, 96) if backend.interpreted else (192, 512, 384)
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(rows, cols, generator=generator).to(dtype)
    a, b = (torch.rand(*shape, generator=generator).add_(1).bfloat16() for shape in ((rank, cols), (rows, rank)))
    base, a, b = (t.to(backend.device) for t in (base, a, b))
    s = Segment("one sign", base, torch.zeros_like(base), a, b, 0.01)
    run(s)
    assert_accurate(s, s.destination)


def test_scaling_and_empty_rectangles(backend: Backend) -> None:
    """Rectangles without rows or columns are no work, and do not disturb their neighbours."""
    dtypes = (torch.float32,) * 4
    shapes = [(0, 8), (8, 0), (0, 0), (5, 7)]
    segments = [make_segment(f"{m}x{n}", m, n, 4, dtypes, backend.device) for m, n in shapes]
    run(*segments)
    assert_accurate(segments[-1], segments[-1].destination)
    Plan([]).run()
    Plan(segments[:3]).run()


def test_many_segments(backend: Backend) -> None:
    """20,000 rectangles of one table (fewer on the interpreter)."""
    count = 60 if backend.interpreted else 20_000
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(count, 5, 24, generator=generator).bfloat16().to(backend.device)
    a = torch.randn(count, 2, 24, generator=generator).to(backend.device)
    b = torch.randn(count, 5, 2, generator=generator).mul_(0.05).to(backend.device)
    out = torch.zeros_like(base)
    Plan([Segment(f"w{i}", base[i], out[i], a[i], b[i], 0.5) for i in range(count)]).run()
    flat = Segment("all", base.flatten(0, 1), out.flatten(0, 1), scaling=1.0)
    assert (out.double() - (base.double() + 0.5 * b.double() @ a.double())).abs().max() < 2**-6, "some weight is off"
    assert flat.destination.count_nonzero() > 0.99 * flat.destination.numel(), "some weight was not written"


def test_dora(backend: Backend) -> None:
    """`row_norms` is the squared norm of the merged rows; `row_scale` is a factor of each row."""
    shapes = [(33, 150, 24), (1, 300, 24), (70, 9, 24), (20, 100, 40 if backend.interpreted else 300)]
    segments = []
    for index, (rows, cols, rank) in enumerate(shapes):
        s = make_segment(f"dora {rows}x{cols}", rows, cols, rank, pairwise(index * 4), backend.device, seed=index)
        row_scale = torch.linspace(0.3, 2.0, rows, device=backend.device)
        segments.append(dataclasses.replace(s, row_scale=row_scale))
    segments.append(
        dataclasses.replace(
            segments[0], lora_A=None, lora_B=None, destination=torch.empty_like(segments[0].destination)
        )
    )
    plan = Plan(segments)
    for s, norms in zip(segments, plan.row_norms(), strict=True):
        wanted = exact(dataclasses.replace(s, row_scale=None)).square().sum(1)
        assert norms.dtype == torch.float64
        # Each term is a float32 sum, 2^-22 off after squaring; adapters add 2^-20 of their own products.
        assert ((norms - wanted).abs() <= 2**-19 * wanted).all(), s.name
    assert all(torch.equal(x, y) for x, y in zip(plan.row_norms(), plan.row_norms(), strict=True)), "not deterministic"
    run(*segments)
    for s in segments:
        assert_accurate(s, s.destination)
