"""Pairs of fp16 (csrc/parts.h) computed once more, in PyTorch: what the kernels for GPUs make of float32 adapters stays
within the bound of docs/design.md, whatever the numbers are. On a GPU the kernels themselves are run with them."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import pytest
import torch
from helpers import PRODUCT_ERROR, assert_same_bits, bound
from torch import Tensor

from lora_merge import Plan
from lora_merge.kernels import backend
from lora_merge.kernels.backend import idle
from lora_merge.kernels.bindings import layout
from lora_merge.kernels.cuda import backend as cuda
from lora_merge.kernels.cuda import hopper as cuda_hopper
from lora_merge.kernels.cuda import merge as cuda_merge
from lora_merge.kernels.cuda import repack as cuda_repack
from lora_merge.kernels.packed import Codes
from lora_merge.kernels.scaled.weights import Group, Scaled, quantise
from lora_merge.kernels.segments import Segment, pack

BF16, FP16 = torch.bfloat16, torch.float16

CHUNK, STEP = 32, 16
ANY_APART, ALONE = 0x200, 0x3FF
CUT_BITS = 26
"""Of the largest of what a step of the matrix unit adds, and of its sum before: what it keeps of all of them."""


class Pairs(NamedTuple):
    """Vectors `[n, rank]` as pairs, float64, and of each what undoes its scaling, and its notes."""

    high: Tensor
    low: Tensor
    factor: Tensor
    apart: Tensor
    lack: Tensor
    scaled: Tensor


def exponent(x: Tensor) -> Tensor:
    """ilogb."""
    return torch.frexp(x.double()).exponent.long() - 1


def pairs(vectors: Tensor) -> Pairs:
    """As csrc/cuda/parts.cu makes them."""
    x = vectors.float()
    size = x.abs()
    finite, most = x.isfinite().all(1), size.amax(1)
    some = finite & (most > 0)
    least = torch.where(size > 0, size, math.inf).amin(1)
    top = exponent(torch.where(some, most, 1.0))
    e = torch.where(some, ((13 - top) // 8).clamp(-11, 11) * 8, 0)
    scaled = (x.double() * torch.exp2(e.double())[:, None]).float()
    high = scaled.half()
    low = ((scaled - high.float()) * 2.0**11).half()
    small = ((x != 0) & (scaled.abs() < 2.0**-13)).sum(1)
    reach = 11 + top + e - torch.ceil(torch.log2(small.clamp(min=1).double())).long()
    lack = torch.where(small > 0, ANY_APART - reach, 0)
    apart = top - exponent(torch.where(some, least, 1.0)) + 1
    apart = torch.where((size == 0).any(1), ANY_APART, apart)
    apart, lack = (torch.where(most == 0, 0, note) for note in (apart, lack))
    alone = ~finite | ((most > 0) & ((most < 2.0**-80) | (most > 2.0**100)))
    apart, lack = (torch.where(alone, ALONE, note) for note in (apart, lack))
    return Pairs(high.double(), low.double(), torch.exp2(-e.double()), apart, lack, scaled)


def needs_exact(b: Pairs, a: Pairs) -> Tensor:
    """bool `[rows, cols]`."""
    one, other = b.apart[:, None] + a.lack[None], a.apart[None] + b.lack[:, None]
    return (one > ANY_APART) | (other > ANY_APART)


def cut(x: Tensor, unit: Tensor) -> Tensor:
    return torch.trunc(x / unit) * unit


def step(total: Tensor, products: list[Tensor]) -> Tensor:
    """A step of a matrix unit that cuts as much as any: each addend to some bits of the largest, their sum to
    float32."""
    added = torch.stack([total, *products])
    largest = added.abs().amax(0)
    unit = torch.exp2(exponent(torch.where(largest > 0, largest, 1.0)).double() - CUT_BITS + 1)
    result = cut(added, unit).sum(0)
    unit = torch.exp2(exponent(torch.where(result != 0, result, 1.0)).double() - 23)
    return cut(result, unit)


def product(b: Pairs, a: Pairs, turned: bool = False) -> Tensor:
    """lora_B lora_A, float64 `[rows, cols]`, where `needs_exact` does not say otherwise."""
    rank = a.high.shape[1]
    total = torch.zeros(len(b.high), len(a.high))
    order = [("low", "high"), ("high", "low")]

    def of(part_a: str, part_b: str, k: int) -> list[Tensor]:
        x, y = getattr(a, part_a), getattr(b, part_b)
        return [torch.outer(y[:, i], x[:, i]) for i in range(k, min(k + STEP, rank))]

    small = torch.zeros(len(b.high), len(a.high), dtype=torch.float64)
    for chunk in range(0, rank, CHUNK):
        large = torch.zeros_like(small)
        for k in range(chunk, min(chunk + CHUNK, rank), STEP):
            for part_a, part_b in reversed(order) if turned else order:
                small = step(small, of(part_a, part_b, k))
            large = step(large, of("high", "high", k))
        total += large.float()
    total = (total.double() + small * 2.0**-11).float()
    return (total.double() * (a.factor[None] * b.factor[:, None])).float().double()


def spread(rows: int, rank: int, seed: int) -> Tensor:
    """Vectors of all kinds: elements far beneath the largest, zeros, huge, tiny, all zero, worst for their format."""
    g = torch.Generator().manual_seed(seed)
    t = torch.randn(rows, rank, generator=g)
    for i in range(rows):
        some = torch.rand(rank, generator=g) < 0.5
        match i % 12:
            case 1:
                t[i] = torch.where(some, t[i] * 2.0 ** -(17 + i % 17), t[i])
            case 2:
                t[i] = torch.where(some, 0.0, t[i])
            case 3:
                t[i] *= 2.0 ** (60 if i % 2 else -60)
            case 4:
                t[i] *= torch.exp2(torch.randint(-40, 40, (rank,), generator=g).float())
            case 5:
                t[i] = 0.0
            case 6:  # low parts are as large as they can be
                t[i] = (1 + 2.0**-11) * torch.exp2(torch.randint(-19, 1, (rank,), generator=g).float())
            case 7:
                t[i] = torch.where(some, t[i] * 2.0**-45, 0.0)
            case 8:  # one large element, and all others just too small for pairs
                t[i] = (1 + 2.0**-12 - 2.0**-23) * 2.0**-20
                t[i, i % rank] = 1.0
            case 9:  # the other way round: almost nothing meets that large element
                t[i] = 1.0 + 2.0**-11
                t[i, i % rank] = 2.0 ** -(i % 29)
            case 10:
                t[i] = t[i].abs() * 2.0**-8 + 2.0**-7
            case 11:
                t[i] *= 2.0 ** -(i % 149)
    return t


def share_of_bound(a: Tensor, b: Tensor, turned: bool = False) -> Tensor:
    """The largest error of each element, in units of what design.md allows, where pairs are used."""
    of_a, of_b = pairs(a), pairs(b)
    each = b.double()[:, None] * a.double()[None]
    # In the same order, whichever is a: that of a product of matrices is the machine's.
    exact, allowed = each.sum(-1), PRODUCT_ERROR * each.abs().sum(-1)
    allowed += 2.0**-24 * exact.abs() + 2.0**-149  # the product's own rounding, and where float32 ends
    share = (product(of_b, of_a, turned) - exact).abs() / allowed
    return torch.where(needs_exact(of_b, of_a), 0.0, share)


@pytest.mark.parametrize("rank", [1, 2, 5, 16, 33, 64, 512])
def test_any_numbers_stay_within_the_bound(rank: int) -> None:
    """With a matrix unit that keeps two bits more than float32 has."""
    a, b = spread(132 if rank < 64 else 36, rank, 1), spread(120 if rank < 64 else 24, rank, 2)
    for one, other in ((a, b), (b, a)):
        share = share_of_bound(one, other)
        assert share.max() <= 1, (float(share.max()), share.argmax().item())
        assert torch.equal(share_of_bound(other, one, turned=True).t(), share), "turned"


@pytest.mark.parametrize("rank", [4, 32, 512])
@pytest.mark.parametrize("down", range(12, 32))
def test_small_elements_against_one_that_almost_nothing_meets(rank: int, down: int) -> None:
    """The worst for a rule by vectors: all elements but one are too small for pairs and meet large ones, and the
    vector's largest meets the smallest."""
    b = torch.full((8, rank), (1 + 2.0**-12 - 2.0**-23) * 2.0**-20)
    b *= torch.exp2(-torch.arange(8.0))[:, None]
    b[:, 0] = 1.0
    a = torch.full((8, rank), 1 + 2.0**-11)
    a[:, 0] = 2.0**-down
    a *= torch.exp2(torch.arange(8.0))[:, None]
    assert share_of_bound(a, b).max() <= 1


def test_usual_adapters_need_no_second_sum() -> None:
    g = torch.Generator().manual_seed(0)
    for rank in (1, 8, 64, 256):
        a = pairs((torch.rand(4096, rank, generator=g) - 0.5) * 0.03)
        b = pairs(torch.randn(4096, rank, generator=g) * 1e-3)
        assert needs_exact(b, a).float().mean() < 1e-4
        zeros = pairs(torch.zeros(3, rank))
        assert not needs_exact(zeros, a).any(), "an adapter that was not trained yet"


def test_what_is_not_finite_is_summed_once_more() -> None:
    for x in (math.inf, -math.inf, math.nan):
        b = torch.randn(2, 8)
        b[1, 3] = x
        for a in (torch.randn(3, 8), torch.zeros(3, 8), torch.full((3, 8), math.inf)):
            assert needs_exact(pairs(b), pairs(a))[1].all()


@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-126, 2.0**-81, 2.0**-80, 1.0, 2.0**100, 2.0**101, 2.0**127])
def test_ends_of_the_range(scale: float) -> None:
    """What is scaled is 2^6 to 2^14, also where the factor is the largest that there is; the rest is alone."""
    x = torch.tensor([[1.0, 0.5, 1.9]]).double().mul(scale).float()
    made = pairs(x)
    alone = not 2.0**-80 <= float(x.max()) <= 2.0**100
    assert bool((made.apart == ALONE).all()) == alone
    if not alone:
        assert 2**6 <= made.scaled.abs().max() < 2**14
        assert torch.equal(made.scaled.double() * made.factor, x.double())


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture
def device() -> torch.device:
    gpu = torch.device("cuda", 0)
    assert backend.pick(gpu) is cuda
    return gpu


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16])
@pytest.mark.parametrize("rank", [33, 40, 64, 130, 512])
def test_the_kernel_makes_the_same_pairs(rank: int, dtype: torch.dtype, device: torch.device) -> None:
    """Both parts, factors and notes, what 64 of them have in common, and zeros behind the ranks; adapters of any
    strides."""
    rows, cols = 333, 520
    a, b = spread(cols, rank, 5).t().to(device, dtype), spread(rows, rank, 6).to(device, dtype)
    source = torch.zeros(rows, cols, dtype=BF16 if dtype != BF16 else FP16, device=device)
    other = FP16 if dtype == BF16 else dtype  # two bf16 halves are multiplied as they are
    for one, two in ((a.contiguous(), b), (a, b.t().contiguous().t()), (a.contiguous()[:, 1:], b[1:])):
        s = Segment(
            "w", source[: len(two), : one.shape[1]], source[: len(two), : one.shape[1]], one, two.to(other), 1.0
        )
        made = cuda_repack.repack(pack([s]), device, cuda_merge.MERGES)
        for launch in cuda_merge.before(made, device, 8):
            launch(False, 0)
        for word, vectors in (("parts_A", one.t()), ("parts_B", two.to(other))):
            begin = int(made.table[0, layout.OFFSET[word]]) - made.memory.data_ptr()
            compare_pairs(made.memory[begin:], vectors.cpu(), word == "parts_A")


def compare_pairs(memory: Tensor, vectors: Tensor, of_A: bool) -> None:
    """`memory` from the high parts on, and what `pairs` makes of the vectors."""
    n, rank = vectors.shape
    ranks, groups = -(-rank // 8) * 8, -(-n // 64)
    shape = (ranks, groups * 64) if of_A else (n, ranks)
    size = 2 * shape[0] * shape[1]
    wanted = pairs(vectors)
    for i, part in enumerate((wanted.high, wanted.low)):
        got = memory[i * size : (i + 1) * size].view(FP16).view(shape).cpu()
        got = got.t() if of_A else got
        there = vectors.isfinite().all(1)  # others are summed from the adapter itself
        assert torch.equal(got[:n, :rank][there].double(), part[there])
        assert not got[:n, rank:].any()
        assert not got[n:].any()
    words = memory[2 * size : 2 * size + groups * 68 * 4].view(torch.int32).view(groups, 68).cpu()
    factors = words[:, :64].reshape(-1)[:n]
    empty = (vectors == 0).all(1)
    assert torch.equal((factors & 0x7F800000).view(torch.float32).double(), wanted.factor)
    assert torch.equal(factors >> 22 & 1, empty.int())
    assert torch.equal((factors & 0x3FF).long(), wanted.apart)
    assert torch.equal((factors >> 10 & 0x3FF).long(), wanted.lack)
    for i in range(groups):
        here = slice(64 * i, min(64 * i + 64, n))
        some = wanted.factor[here][~empty[here]].unique()
        common = words[i, 64:65].view(torch.float32).item()
        assert common == (1.0 if len(some) == 0 else float(some[0]) if len(some) == 1 else 0.0)
        assert int(words[i, 65]) & 0x3FF == int(wanted.apart[here].max())
        assert int(words[i, 65]) >> 10 == int(wanted.lack[here].max())


@pytest.mark.gpu
@pytest.mark.parametrize("usual", [True, False], ids=["usual", "any numbers"])
@pytest.mark.parametrize("rank", [33, 64, 70, 97, 160, 168, 256, 264])
@pytest.mark.parametrize("base", [BF16, FP16])
def test_merges_of_pairs(
    base: torch.dtype, rank: int, usual: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the bound wherever float32 itself does not overflow; the same bits however the weight is cut, by rows or
    by columns, tracked or not, from one update to the next, and from both kernels; what is not finite is not finite."""
    could = cuda_hopper.Hopper.could_serve
    g = torch.Generator().manual_seed(3)

    def adapters(seed: int) -> tuple[Tensor, Tensor]:
        if not usual:
            return spread(cols, rank, seed).t().contiguous().to(device), spread(rows, rank, seed + 1).to(device)
        g.manual_seed(seed)
        a, b = torch.randn(rank, cols, generator=g), torch.randn(rows, rank, generator=g)
        a[:, 300:] *= 2.0**-9  # another factor
        return a.to(device), (b * 2.0 ** -(5 + seed)).to(device)

    rows, cols = 333, 520
    (a, b), (a2, b2) = adapters(1), adapters(3)
    source = torch.randn(rows, cols, generator=g).to(device, base)
    bits: list[Tensor] = []
    for ours in (True, False):
        monkeypatch.setattr(cuda_hopper.Hopper, "could_serve", could if ours else lambda *args: could(*args) & False)
        out = torch.full_like(source, 7)
        s = Segment("w", source, out, a, b, 0.5)
        cuda.prepare([s], device)(False, 0)
        assert_within(s)
        bits.append(out)
        for cut in (slice(0, 100), slice(100, 333)):
            for across in (slice(0, 264), slice(264, 520)):
                piece = torch.full_like(source[cut, across], 7).contiguous()
                part = Segment("w", source[cut, across], piece, a[:, across], b[cut], 0.5, pitch=(cols, 1))
                cuda.prepare([part], device)(False, 0)
                assert_same_bits(piece, out[cut, across], "cut")
        turned = torch.full_like(source.t(), 7).contiguous()
        cuda.prepare([Segment("w", source.t(), turned, b.t(), a.t(), 0.5, pitch=(1, cols))], device)(False, 0)
        assert_same_bits(turned.t(), out, "by columns")
        after = torch.full_like(source, 7)
        cuda.prepare([Segment("w", source, after, a2, b2, -3.0)], device)(False, 0)
        weight = source.clone()
        first = Segment("w", weight, weight, a, b, 0.5)
        plan = cuda.prepare_tracked([first], device)
        other = cuda.prepare_tracked([dataclasses.replace(first, lora_A=a2, lora_B=b2, scaling=-3.0)], device)
        for _ in range(2):
            plan.merge()
            assert_same_bits(weight, out, "tracked")
            assert other.remerge(plan, idle) == set()
            assert_same_bits(weight, after, "the next update")
            assert plan.remerge(other, idle) == set()
            assert_same_bits(weight, out, "and the first one again")
            assert plan.unmerge() == set()
            assert_same_bits(weight, source, "restored")
    assert_same_bits(bits[0], bits[1], "both kernels")
    a, b = a.clone(), b.clone()
    a[0, 5], b[7, 0] = math.inf, math.nan
    cuda.prepare([Segment("w", source, out, a, b, 0.5)], device)(False, 0)
    assert not out[7].isfinite().any()
    assert not out[b[:, 0] != 0, 5].isfinite().any()


def assert_within(s: Segment) -> None:
    """Where float32 does not overflow, and the format of the result neither."""
    assert s.lora_A is not None
    assert s.lora_B is not None
    product = s.scaling * (s.lora_B.double() @ s.lora_A.double())
    exact = s.source.double() + product
    largest = torch.finfo(s.destination.dtype).max
    allowed = bound(s, s.destination.clamp(-largest, largest))
    there = (product.abs() < 1.5e38) & (exact.abs() < largest)
    wrong = ((s.destination.double() - exact).abs() > allowed) & there
    assert not wrong.any(), (int(wrong.sum()), wrong.nonzero()[:3], s.destination[wrong][:3], exact[wrong][:3])


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [12, 33, 64, 160])
@pytest.mark.parametrize("result", [BF16, FP16, torch.float32])
def test_packed_bases_have_the_same_bits(result: torch.dtype, rank: int, device: torch.device) -> None:
    """Codes of 4 bits, decoded while they are merged, and the weight that they stand for."""
    rows, cols = 333, 520
    g = torch.Generator().manual_seed(rank)
    data = torch.randint(0, 256, (rows * cols // 2,), generator=g, dtype=torch.uint8).to(device)
    absmax = torch.rand(-(-rows * cols // 64), generator=g).to(device) * 0.05
    weight = Codes(data, BF16, absmax, 64, torch.linspace(-1, 1, 16).to(device)).tensor((rows, cols))
    a, b = spread(cols, rank, 1).t().contiguous().to(device), spread(rows, rank, 2).to(device)
    outputs = []
    for source in (weight, weight.decoded()):
        outputs.append(torch.full((rows, cols), 7, dtype=result, device=device))
        cuda.prepare([Segment("w", source, outputs[-1], a, b, 0.5)], device)(False, 0)
    assert_same_bits(outputs[0], outputs[1])


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [33, 64, 160])
@pytest.mark.parametrize("group", ["tensor", "channel", "block"])
def test_results_of_8_bits_are_those_of_a_merge(group: Group, rank: int, device: torch.device) -> None:
    """What is scaled are the numbers of a merge in bf16, whatever the adapters are."""
    rows, cols = 333, 520
    groups = {"tensor": 1, "channel": rows, "block": -(-rows // 128) * -(-cols // 128)}[group]
    source = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rank)).to(device, BF16)
    a, b = spread(cols, rank, 1).t().contiguous().to(device), spread(rows, rank, 2).to(device)
    merged, result = torch.full_like(source, 7), torch.zeros_like(source, dtype=torch.float8_e4m3fn)
    target = Scaled(result, torch.zeros(groups, device=device), group, BF16)
    Plan([Segment("w", source, merged, a, b, 0.5)]).run()
    Plan([Segment("w", source, result, a, b, 0.5)], [target]).run()
    wanted, scales = quantise(merged.cpu(), group)
    assert torch.equal(target.scales.cpu(), scales.view(-1))
    assert torch.equal(result.cpu().view(torch.uint8), wanted.view(torch.uint8))
