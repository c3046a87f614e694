"""Rounding: to nearest at every boundary, special values, copies of bits, and stochastic rounding."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from backends import Backend
from helpers import LAYOUTS, SUM_ERROR, assert_same_bits, empty, exact, run, ulp

from lora_merge import Plan, Segment
from lora_merge.kernels import reference
from lora_merge.kernels.segments import FLOATS, copies, name_key, seed_key
from lora_merge.shards import cut

SHORT = (torch.bfloat16, torch.float16)


def grid_of(dtype: torch.dtype, backend: Backend) -> torch.Tensor:
    """Every value of a 16-bit dtype; as float32: each of those, the middles between them, and the values beside.

    float32 values beyond both dtypes and below them are among them. The interpreter gets every 13th.
    """
    words = torch.arange(1 << 16, dtype=torch.int32)
    if dtype in SHORT:
        return words.to(torch.int16).view(dtype)
    near_bf16 = (words << 16)[:, None] + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    half = words.to(torch.int16).view(torch.float16).float()
    middle = half + ulp(half, torch.float16).float() * torch.where(half < 0, -0.5, 0.5)
    near_half = middle.view(torch.int32)[:, None] + torch.tensor([-1, 0, 1], dtype=torch.int32)
    values = torch.cat([near_bf16.flatten(), near_half.flatten()]).view(torch.float32)
    return values[::13] if backend.interpreted else values


@pytest.mark.parametrize("out", FLOATS)
@pytest.mark.parametrize("base", FLOATS)
@pytest.mark.parametrize("rank", [0, 1])
def test_nearest_at_every_boundary(backend: Backend, base: torch.dtype, out: torch.dtype, rank: int) -> None:
    """Without an update (rank 0, or an adapter of zeros) the result is PyTorch's own conversion, ties to even."""
    values = grid_of(base, backend).to(backend.device)
    values = values[: len(values) // 128 * 128].view(-1, 128)
    adapters = (torch.zeros(rank, 128), torch.zeros(len(values), rank)) if rank else (None, None)
    adapters = tuple(None if t is None else t.to(backend.device) for t in adapters)
    s = Segment("grid", values, empty("contiguous", *values.shape, out, backend.device), *adapters)
    run(s)
    if rank == 0 and base == out:
        assert_same_bits(s.destination, values, "a copy")  # the payload of NaN as well
        return
    wanted = (values + 0.0 if rank else values).to(out)  # -0.0 + 0.0 is 0.0
    assert torch.equal(s.destination.isnan(), wanted.isnan()), "NaN must stay NaN, and nothing else become one"
    there = ~wanted.isnan()
    assert_same_bits(s.destination[there], wanted[there])


INFINITE, LARGEST = math.inf, {d: torch.finfo(d).max for d in FLOATS}


@pytest.mark.parametrize(
    ("dtype", "weight", "update", "wanted"),
    [
        (torch.bfloat16, INFINITE, -1.0, INFINITE),
        (torch.float16, -INFINITE, 1.0, -INFINITE),
        (torch.float32, math.nan, 1.0, math.nan),
        (torch.bfloat16, LARGEST[torch.bfloat16], 2.0**119, INFINITE),  # half an ulp above: the tie is even above
        (torch.bfloat16, LARGEST[torch.bfloat16], 2.0**118, LARGEST[torch.bfloat16]),
        (torch.float16, LARGEST[torch.float16], 16.0, INFINITE),
        (torch.float16, LARGEST[torch.float16], 15.0, LARGEST[torch.float16]),
        (torch.float16, -LARGEST[torch.float16], -(2.0**14), -INFINITE),
        (torch.float32, LARGEST[torch.float32], 2.0**104, INFINITE),
        (torch.float16, 2.0**-24, 2.0**-24, 2.0**-23),  # subnormals
        (torch.float16, 2.0**-24, -(2.0**-24), 0.0),
        (torch.float16, 3 * 2.0**-24, 2.0**-25, 4 * 2.0**-24),  # a tie
        (torch.float16, 2 * 2.0**-24, 2.0**-25, 2 * 2.0**-24),
        (torch.bfloat16, 2.0**-133, 2.0**-126, 2.0**-126 + 2.0**-133),
        (torch.bfloat16, 1.0, 2.0**-8, 1.0),
        (torch.bfloat16, 1.0 + 2.0**-7, 2.0**-8, 1.0 + 2.0**-6),
        (torch.bfloat16, 1.0, 2.0**-8 + 2.0**-20, 1.0 + 2.0**-7),  # rounding the update first would lose this
    ],
)
@pytest.mark.parametrize("adapter", [torch.bfloat16, torch.float32])
def test_special_values(
    backend: Backend, dtype: torch.dtype, adapter: torch.dtype, weight: float, update: float, wanted: float
) -> None:
    """Infinities, NaN, overflow, subnormals and ties, with an update of exact products."""
    a = torch.full((2, 20), math.copysign(1.0, update), dtype=adapter, device=backend.device)
    b = torch.tensor([abs(update) * 0.5] * 2, dtype=torch.float32, device=backend.device).expand(3, 2).contiguous()
    source = torch.full((3, 20), weight, dtype=dtype, device=backend.device)
    s = Segment("special", source, torch.zeros_like(source), a, b)
    run(s)
    assert_same_bits(s.destination.nan_to_num(7.0), torch.full_like(source, wanted).nan_to_num(7.0))
    assert s.destination.isinf().all() == math.isinf(wanted)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("adapter", FLOATS)
def test_adapters_that_are_not_finite(backend: Backend, adapter: torch.dtype, value: float) -> None:
    """They reach the elements that they touch, as infinity or NaN, and no others."""
    a = torch.ones(3, 40, dtype=adapter, device=backend.device)
    b = torch.ones(20, 3, dtype=torch.float32, device=backend.device)
    a[1, 7] = value
    source = torch.ones(20, 40, dtype=torch.bfloat16, device=backend.device)
    s = Segment("not finite", source, torch.zeros_like(source), a, b)
    run(s)
    touched = torch.zeros(20, 40, dtype=torch.bool, device=backend.device)
    touched[:, 7] = True
    assert torch.equal(~s.destination.isfinite(), touched)
    assert (s.destination[~touched] == 4.0).all()


COPIED = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.float64)
COPIED += (torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_keep_every_bit(backend: Backend, layout: str) -> None:
    """Any dtype and strides without an adapter: NaN payloads, -0.0 and all."""
    segments = []
    for index, dtype in enumerate(COPIED):
        rows, cols = (1, 700) if dtype == torch.int16 else (37, 131)
        raw = torch.randint(0, 256, (rows * cols * dtype.itemsize,), generator=torch.Generator().manual_seed(index))
        raw = raw % 2 if dtype == torch.bool else raw
        source = empty(layout, rows, cols, dtype, backend.device)
        source.copy_(raw.to(torch.uint8).view(dtype).view(rows, cols))
        other = "contiguous" if index % 2 else layout
        segments.append(Segment(f"{dtype}", source, empty(other, rows, cols, dtype, backend.device)))
    run(*segments)
    for s in segments:
        assert_same_bits(s.destination, s.source, s.name)


# ---- stochastic ------------------------------------------------------------------------------------------------------


def test_random_bits_are_those_of_the_header() -> None:
    """The reference draws what csrc/segments.h says, here once more in integers of Python."""

    def avalanche(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & 0xFFFFFFFF
        x ^= x >> 15
        x = x * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    pitch = (1 << 33, 3)
    s = Segment("some.weight", torch.zeros(5, 4), torch.zeros(5, 4), first=12345678901, pitch=pitch)
    for seed in (0, 1, -1, 2**63):
        key = (name_key(s.name) ^ seed_key(seed)) & (1 << 64) - 1
        got = reference.random_bits(s, slice(1, 5), seed_key(seed))
        for i in range(1, 5):
            for j in range(4):
                index = s.first + i * pitch[0] + j * pitch[1]
                h = avalanche((index ^ key) & 0xFFFFFFFF)
                assert got[i - 1, j].item() == avalanche(h ^ index >> 32 ^ key >> 32)


@pytest.mark.parametrize("out", SHORT)
@pytest.mark.parametrize("base", FLOATS)
def test_every_backend_draws_the_same_bits(
    backend: Backend, base: torch.dtype, out: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversions have an exact float32 sum, so all backends agree bit for bit; fp16 subnormals and overflow as well.

    The element's index passes 2^32, and the layout in memory plays no part.
    """
    values = grid_of(base, backend).to(backend.device)
    values = values[values.isfinite()]
    values = values[: len(values) // 100 * 100].view(-1, 100)
    segments = [
        Segment(
            "converted",
            empty(layouts[0], *values.shape, base, backend.device).copy_(values),
            empty(layouts[1], *values.shape, out, backend.device),
            first=2**32 - 12345,
            pitch=(1009, 5),
        )
        for layouts in [("contiguous", "contiguous"), ("transposed", "transposed"), ("odd start", "padded rows")]
    ]
    run(*segments[: 1 if backend.interpreted else 3], rounding="stochastic", seed=2**40 + 1)
    got = [s.destination.clone() for s in segments]
    monkeypatch.setenv("LORA_MERGE_BACKEND", "reference")
    wanted = dataclasses.replace(segments[0], destination=torch.zeros_like(segments[0].destination))
    run(wanted, rounding="stochastic", seed=2**40 + 1)
    for result in got[: 1 if backend.interpreted else 3]:
        assert_same_bits(result, wanted.destination)


@pytest.mark.parametrize("out", SHORT)
def test_stochastic_is_unbiased(backend: Backend, out: torch.dtype) -> None:
    """The mean over many draws converges on the unrounded sum, also where the update is below half an ulp.

    A draw is one of the two neighbours; by Hoeffding's inequality the mean of n draws is further than t ulp from its
    expectation with a probability below 2 exp(-2 n t^2). t is chosen so that one of all rows fails once in 10^9 runs.
    """
    rows, cols, seeds = 24, 512, range(8)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, 1, generator=generator) * torch.logspace(-8, 3, rows, base=4.0)[:, None]
    weight[0], weight[1] = 1.0, -3.0  # exact in the output: the update alone is rounded
    update = torch.randn(rows, 1, generator=generator) * 0.01 * weight
    update[0], update[1] = 2.0**-13, -(2.0**-12)  # an eighth of an ulp of fp16 at 1, less of bf16
    source = weight.expand(rows, cols).contiguous().to(backend.device)
    b = update.to(backend.device)
    a = torch.ones(1, cols, device=backend.device)
    s = Segment("mean", source, torch.zeros(rows, cols, dtype=out, device=backend.device), a, b)
    total = torch.zeros(rows, dtype=torch.float64, device=backend.device)
    for seed in seeds:
        run(s, rounding="stochastic", seed=seed)
        total += s.destination.double().sum(1)
    draws = cols * len(seeds)
    spread = math.sqrt(math.log(2 * rows / 1e-9) / (2 * draws))
    wanted = exact(s)[:, 0]
    allowed = spread * ulp(wanted, out) + 2 * SUM_ERROR * wanted.abs()
    off = (total / draws - wanted).abs() / allowed
    assert (off <= 1).all(), f"row {off.argmax()} is {off.max():.2f} times the allowed distance from its mean"
    run(s)
    assert (s.destination[:2] == source[:2].to(out)).all(), "an update that rounding to nearest loses"
    moved = (total[:2] / draws - source[:2, 0].double()) / b[:2, 0].double()
    assert ((moved - 1).abs() < spread * ulp(wanted[:2], out) / b[:2, 0].double().abs()).all()


@pytest.mark.parametrize("exponent", [-32, -33, -40])
def test_stochastic_is_unbiased_far_below_the_least_number(backend: Backend, exponent: int) -> None:
    """Values below 2^-32, where more bits fall off than there are random ones, are served on average, too.

    So few of them become 2^-24 that the test cannot wait for it: the random bits are counted that would round up.
    """
    draws = torch.arange(1 << 16, dtype=torch.int64) << 15  # every 2^15th of 31 bits: an even grid of probabilities
    value = torch.full(draws.shape, 1.5 * 2.0**exponent)
    up = reference.round_stochastic(value, torch.float16, draws).double().mean().item()
    wanted, grid = 1.5 * 2.0**exponent, 2.0 ** -(16 + 24)
    assert abs(up - wanted) <= grid, f"{up / wanted:.3f} of the value"
    # Random bits below a bound round up: the bound is the probability times 2^31, to one.
    bound = int(1.5 * 2.0 ** (exponent + 24 + 31))
    near = torch.tensor([(1 << 31) - max(bound, 1) + at for at in (-1, 0)]) & ((1 << 31) - 1)
    low, high = reference.round_stochastic(value[:2], torch.float16, near).tolist()
    assert (low, high) == (0, 2.0**-24 if bound else 0)
    source = value[:512].view(16, 32).to(backend.device)
    s = Segment("tiny", source, torch.zeros(16, 32, dtype=torch.float16, device=backend.device))
    run(s, rounding="stochastic", seed=3)
    drawn = reference.random_bits(s, slice(0, 16), seed_key(3))
    assert_same_bits(s.destination, reference.round_stochastic(source, torch.float16, drawn))


@pytest.mark.parametrize("out", SHORT)
def test_stochastic_overflows_where_nearest_does(backend: Backend, out: torch.dtype) -> None:
    """Chance turns no finite number into infinity."""
    largest = torch.finfo(out).max
    edge = (
        largest + (largest - torch.nextafter(torch.tensor(largest, dtype=out), torch.tensor(0.0, dtype=out)).item()) / 2
    )
    below = torch.nextafter(torch.tensor(edge, dtype=torch.float32), torch.tensor(0.0))
    finite = torch.tensor([largest, (largest + edge) / 2, below.item()], dtype=torch.float32)
    infinite = torch.tensor([edge, math.inf], dtype=torch.float32)
    values = torch.cat([finite, -finite, infinite, -infinite])[:, None].expand(10, 256).contiguous().to(backend.device)
    s = Segment("large", values, torch.zeros(10, 256, dtype=out, device=backend.device))
    run(s, rounding="stochastic", seed=7)
    assert (s.destination[:6].abs().double() == largest).all()
    assert_same_bits(s.destination[6:], values[6:].sign().mul(math.inf).to(out))


def test_seeds_and_names_draw_apart(backend: Backend) -> None:
    """The same seed draws the same bits, another seed or another weight's name other ones; float32 draws none."""
    source = torch.full((16, 128), 1.0 + 2.0**-8, device=backend.device)  # halfway between two bf16

    def draw(name: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        s = Segment(name, source, torch.zeros(16, 128, dtype=dtype, device=backend.device))
        run(s, rounding="stochastic", seed=seed)
        return s.destination

    assert_same_bits(draw("a", 1), draw("a", 1))
    for other in (draw("a", 2), draw("b", 1), draw("a", -1), draw("a", 1 << 62)):
        same = (draw("a", 1) == other).double().mean().item()
        # 2048 fair coins: Hoeffding, once in 10^9.
        assert abs(same - 0.5) < math.sqrt(math.log(2 / 1e-9) / (2 * 2048)), f"{same:.1%} equal"
    assert_same_bits(draw("a", 1, torch.float32), source)


def test_stochastic_copies_do_not_show_how_they_were_cut() -> None:
    """Of a tensor without an adapter each part draws what it draws in the whole, whatever its layout."""
    g = torch.Generator().manual_seed(0)
    source = torch.randn(6, 10, 7, generator=g)
    whole, seed = torch.empty_like(source, dtype=torch.bfloat16), 5
    Plan(copies("w", source, whole)).run(rounding="stochastic", seed=seed)
    turned = source.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    boxes = [((0, 0, 0), (4, 10, 7)), ((4, 0, 0), (2, 3, 7)), ((4, 3, 0), (2, 7, 2)), ((4, 3, 2), (2, 7, 5))]
    for like in (source, turned):
        found = torch.empty_like(whole)
        for start, size in boxes:
            part = cut(like, (start, size))
            for held in (part, part.contiguous()):
                out = torch.empty_like(held, dtype=torch.bfloat16)
                Plan(copies("w", held, out, start, source.shape)).run(rounding="stochastic", seed=seed)
                cut(found, (start, size)).copy_(out)
                assert_same_bits(out.contiguous(), cut(whole, (start, size)).contiguous())
        assert_same_bits(found, whole)
    rows = torch.randn(30, generator=g)
    whole = torch.empty(30, dtype=torch.float16)
    Plan(copies("b", rows, whole)).run(rounding="stochastic", seed=seed)
    out = torch.empty(11, dtype=torch.float16)
    Plan(copies("b", rows[19:], out, (19,), (30,))).run(rounding="stochastic", seed=seed)
    assert_same_bits(out, whole[19:])
