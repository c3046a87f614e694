"""Bad input: a documented exception that names the tensor, before anything is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import bits
from torch import Tensor

import lora_merge
from lora_merge import InvalidInput, Plan, Segment, merge, merge_, run_segments
from lora_merge.restore import TrackedPlan

OUT, IN, RANK = 6, 8, 2


class Case:
    """Tensors that fit together, and every byte of them."""

    def __init__(self) -> None:
        self.storage = torch.arange(200.0) / 7
        self.w = self.storage[20:68].view(OUT, IN)
        self.a = torch.arange(16.0).view(RANK, IN)
        self.b = torch.arange(12.0).view(OUT, RANK)
        self.out = torch.full((OUT, IN), 5.0)
        self.integer = torch.ones(OUT, IN, dtype=torch.int32)

    def bytes(self) -> Tensor:
        return torch.cat([bits(t).flatten() for t in (self.storage, self.a, self.b, self.out, self.integer)])


def segment(c: Case, **changes: object) -> Segment:
    fields = {"name": "layer.weight", "source": c.w, "destination": c.out, "lora_A": c.a, "lora_B": c.b} | changes
    return Segment(**fields)  # type: ignore[arg-type]


def plan(c: Case, **changes: object) -> Plan:
    return Plan([segment(c, **changes)])


def freed(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


MERGES: dict[str, tuple[Callable[[Case], object], str]] = {
    "weight of one dimension": (lambda c: merge_(c.w[0], c.a, c.b, 1.0), r"weight.*2 dimensions.*\(8,\)"),
    "weight of three dimensions": (lambda c: merge(c.w[None], c.a, c.b, 1.0), r"weight.*2 dimensions.*\(1, 6, 8\)"),
    "lora_A of three dimensions": (lambda c: merge_(c.w, c.a[None], c.b, 1.0), r"lora_A.*2 dimensions"),
    "lora_A too wide": (lambda c: merge_(c.w[:, :5], c.a, c.b, 1.0), r"lora_A must be \[r, 5\], got \(2, 8\)"),
    "lora_B too high": (lambda c: merge_(c.w[:4], c.a, c.b, 1.0), r"lora_B must be \[4, 2\], got \(6, 2\)"),
    "ranks differ": (lambda c: merge_(c.w, c.a, c.b[:, :1], 1.0), r"lora_B must be \[6, 2\], got \(6, 1\)"),
    "lora_A and lora_B exchanged": (lambda c: merge_(c.w, c.b, c.a, 1.0), r"lora_A must be \[r, 8\], got \(6, 2\)"),
    "rank 0": (lambda c: merge_(c.w, c.a[:0], c.b[:, :0], 1.0), r"rank must be between 1 and 512, got 0"),
    "rank 513": (
        lambda c: merge_(c.w, torch.zeros(513, IN), torch.zeros(OUT, 513), 1.0),
        r"rank must be between 1 and 512, got 513",
    ),
    "integer weight": (lambda c: merge_(c.integer, c.a, c.b, 1.0), r"weight.*bfloat16, float16 or float32.*int32"),
    "float64 weight": (lambda c: merge(c.w.double(), c.a, c.b, 1.0), r"float64"),
    "fp8 weight": (lambda c: merge(c.w.to(torch.float8_e4m3fn), c.a, c.b, 1.0), r"float8_e4m3fn"),
    "integer lora_A": (lambda c: merge_(c.w, c.a.int(), c.b, 1.0), r"lora_A must be bfloat16.*int32"),
    "complex lora_B": (lambda c: merge_(c.w, c.a, c.b.to(torch.complex64), 1.0), r"lora_B must be .*complex64"),
    "integer out": (lambda c: merge(c.w, c.a, c.b, 1.0, out=c.integer), r"destination must be bfloat16.*int32"),
    "integer result": (lambda c: merge(c.w, c.a, c.b, 1.0, dtype=torch.int8), r"dtype must be bfloat16.*int8"),
    "out and dtype": (
        lambda c: merge(c.w, c.a, c.b, 1.0, out=c.out, dtype=torch.bfloat16),
        r"out has dtype torch.float32, but dtype=torch.bfloat16",
    ),
    "sparse weight": (lambda c: merge_(c.w.to_sparse(), c.a, c.b, 1.0), r"weight.*dense.*sparse_coo"),
    "quantised weight": (
        lambda c: merge_(torch.quantize_per_tensor(c.w, 0.1, 0, torch.qint8), c.a, c.b, 1.0),
        r"weight.*dense.*quantised",
    ),
    "meta weight": (lambda c: merge_(c.w.to("meta"), c.a, c.b, 1.0), r"weight is a meta tensor"),
    "meta weight, out of place": (lambda c: merge(c.w.to("meta"), c.a, c.b, 1.0), r"weight is a meta tensor"),
    "meta lora_A": (lambda c: merge(c.w, c.a.to("meta"), c.b, 1.0), r"lora_A is a meta tensor"),
    "meta lora_B": (lambda c: merge_(c.w, c.a, c.b.to("meta"), 1.0), r"lora_B is a meta tensor"),
    "meta out": (lambda c: merge(c.w, c.a, c.b, 1.0, out=c.w.to("meta")), r"out is a meta tensor"),
    "out of another shape": (lambda c: merge(c.w, c.a, c.b, 1.0, out=c.out[:, :7]), r"destination.*\(6, 8\).*\(6, 7\)"),
    "out expanded": (
        lambda c: merge(c.w, c.a, c.b, 1.0, out=c.out[:1].expand(OUT, IN)),
        r"destination's elements share memory.*strides \(0, 1\)",
    ),
    "weight expanded": (lambda c: merge_(c.w[:, :1].expand(OUT, IN), c.a, c.b, 1.0), r"share memory"),
    "weight as overlapping windows": (
        lambda c: merge_(c.storage.as_strided((OUT, IN), (3, 1)), c.a, c.b, 1.0),
        r"share memory.*strides \(3, 1\)",
    ),
    "out a row further": (
        lambda c: merge(c.w, c.a, c.b, 1.0, out=c.storage[28:76].view(OUT, IN)),
        r"weight: the destination overlaps what weight reads",
    ),
    "out an element further": (
        lambda c: merge(c.w, c.a, c.b, 1.0, out=c.storage[21:69].view(OUT, IN)),
        r"destination overlaps",
    ),
    "out the weight transposed": (
        lambda c: merge(c.w[:, :6], c.a[:, :6], c.b, 1.0, out=c.w[:, :6].t()),
        r"destination overlaps",
    ),
    "out the weight in another dtype": (
        lambda c: merge(c.w, c.a, c.b, 1.0, out=c.storage[20:44].view(torch.bfloat16).view(OUT, IN)),
        r"destination overlaps",
    ),
    "out the adapter": (lambda c: merge_(c.a, torch.ones(1, IN), c.a[:, :1], 1.0), r"destination overlaps"),
    "scaling NaN": (lambda c: merge_(c.w, c.a, c.b, math.nan), r"scaling must be finite.*nan"),
    "scaling infinite": (lambda c: merge_(c.w, c.a, c.b, -math.inf), r"scaling must be finite.*-inf"),
    "scaling beyond float32": (lambda c: merge(c.w, c.a, c.b, 1e39), r"scaling must be finite in float32.*1e\+39"),
    "unknown rounding": (
        lambda c: merge(c.w, c.a, c.b, 1.0, rounding="up"),
        r"rounding must be one of nearest, stochastic, got 'up'",
    ),
    "stochastic without a seed": (lambda c: merge(c.w, c.a, c.b, 1.0, rounding="stochastic"), r"seed=None"),
    "a seed for nothing": (lambda c: merge(c.w, c.a, c.b, 1.0, seed=3), r"rounding='nearest' got seed=3"),
    "a seed of 65 bits": (
        lambda c: merge(c.w, c.a, c.b, 1.0, rounding="stochastic", seed=1 << 64),
        r"seed must fit in 64 bits",
    ),
}
PLANS: dict[str, tuple[Callable[[Case], object], str]] = {
    "lora_A alone": (lambda c: plan(c, lora_B=None), r"layer.weight: lora_A and lora_B must come together"),
    "row_scale in another dtype": (
        lambda c: plan(c, row_scale=torch.ones(OUT).double()),
        r"layer.weight: row_scale must be contiguous float32, got torch.float64",
    ),
    "row_scale too short": (lambda c: plan(c, row_scale=torch.ones(3)), r"row_scale must have 6 entries, got 3"),
    "row_scale of two dimensions": (lambda c: plan(c, row_scale=c.b), r"row_scale must have 1 dimension"),
    "row_scale with a stride": (lambda c: plan(c, row_scale=c.storage[:12:2]), r"row_scale must be contiguous"),
    "a conversion of integers": (
        lambda c: plan(c, source=c.integer, lora_A=None, lora_B=None),
        r"layer.weight: cannot convert torch.int32 to torch.float32",
    ),
    "meta source": (lambda c: plan(c, source=c.w.to("meta")), r"layer.weight: source is a meta tensor"),
    "meta destination": (lambda c: plan(c, destination=c.w.to("meta")), r"destination is a meta tensor"),
    "freed source": (lambda c: plan(c, source=freed(c.w)), r"layer.weight: source has no memory.*FSDP"),
    "freed lora_A": (lambda c: plan(c, lora_A=freed(c.a)), r"layer.weight: lora_A has no memory"),
    "a place written twice": (
        lambda c: Plan([segment(c), segment(c, name="other.weight")]),
        r"layer.weight and other.weight: two segments write the same place",
    ),
    "an element written twice": (
        lambda c: Plan(
            [
                Segment("upper", c.w[:3], c.out[:3]),
                Segment("lower", c.w[3:], c.out[3:]),
                Segment("one element", c.b[:1, :1], c.out[3:4, 7:8]),
            ]
        ),
        r"(lower and one element|one element and lower): two segments write the same place",
    ),
    "one writes what another reads": (
        lambda c: Plan([Segment("reader", c.w, c.out), Segment("writer", c.a[:1], c.w[2:3])]),
        r"writer: the destination overlaps what reader reads",
    ),
    "one writes another's adapter": (
        lambda c: Plan([segment(c), Segment("writer", c.w[:2], c.a)]),
        r"writer: the destination overlaps what layer.weight reads",
    ),
    "row norms without row_scale": (lambda c: plan(c).row_norms(), r"layer.weight: row_norms needs .* row_scale"),
    "lists of different lengths": (
        lambda c: run_segments([c.out], [c.w, c.w], [c.a], [c.b], [1.0], ["w"]),
        r"sources must have 1 entries.*got 2",
    ),
    "pitches missing": (
        lambda c: run_segments([c.out], [c.w], [c.a], [c.b], [1.0], ["w"], pitch=[]),
        r"pitch must have two numbers a destination, got 0",
    ),
    "a meta tensor in a list": (
        lambda c: run_segments([c.out], [c.w], [c.a.to("meta")], [c.b], [1.0], ["w"]),
        r"lora_A\[0\] is a meta tensor",
    ),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(("call", "message"), (MERGES | PLANS).values(), ids=(MERGES | PLANS).keys())
def test_is_refused(call: Callable[[Case], object], message: str) -> None:
    c = Case()
    before = c.bytes()
    with pytest.raises(InvalidInput, match=message):
        call(c)
    assert torch.equal(c.bytes(), before), "something was written before the error"


@pytest.mark.gpu
@pytest.mark.parametrize("stray", ["lora_A", "lora_B", "destination", "row_scale"])
def test_devices_are_not_mixed(stray: str) -> None:
    c = Case()
    fields = {"source": c.w, "destination": c.out, "lora_A": c.a, "lora_B": c.b, "row_scale": torch.ones(OUT)}
    fields = {label: t.clone() if label == stray else t.cuda() for label, t in fields.items()}
    with pytest.raises(InvalidInput, match=rf"w: {stray} is on cpu, the weight on cuda:0"):
        Plan([Segment("w", **fields)])
    if stray in ("lora_A", "lora_B"):
        with pytest.raises(InvalidInput, match=rf"weight: {stray} is on cpu, the weight on cuda:0"):
            merge_(fields["source"], fields["lora_A"], fields["lora_B"], 1.0)
    with pytest.raises(InvalidInput, match="one device, got cpu, cuda:0"):
        Plan([Segment("here", c.w, c.out), Segment("there", c.w.cuda(), c.out.cuda())])


def test_interleaved_rectangles_pass() -> None:
    """Parts of one tensor that touch and surround each other without meeting, as fused QKV and shards by columns do."""
    groups, heads, dim, hidden = 3, 2, 4, 10
    fused = torch.randn(groups * (heads + 2) * dim, hidden)
    q, k, v = torch.zeros(groups * heads * dim, hidden), torch.zeros(groups * dim, hidden), torch.zeros(12, hidden)
    segments = []
    for g in range(groups):
        rows = fused[g * 16 : (g + 1) * 16]
        for name, out, begin, count in (("q", q, 0, 8), ("k", k, 8, 4), ("v", v, 12, 4)):
            for half in (slice(0, 5), slice(5, 10)):
                to = out[g * count : (g + 1) * count, half]
                segments.append(Segment(name, rows[begin : begin + count, half], to))
    Plan(segments).run()
    blocks = fused.view(groups, 16, hidden)
    assert torch.equal(q, blocks[:, :8].reshape(q.shape))
    assert torch.equal(k, blocks[:, 8:12].reshape(k.shape))
    assert torch.equal(v, blocks[:, 12:].reshape(v.shape))
    whole = torch.zeros(8, 12)
    columns = [Segment(f"{i}", torch.full((8, 4), float(i)), whole[:, i::3]) for i in range(3)]
    Plan(columns).run()
    assert torch.equal(whole, torch.tensor([0.0, 1.0, 2.0]).repeat(8, 4))


def test_adapters_may_be_shared() -> None:
    """Reading one tensor often is no clash: fused layers share lora_A, and experts an adapter."""
    c = Case()
    out = torch.zeros(2, OUT, IN)
    Plan([segment(c, destination=out[0]), segment(c, destination=out[1])]).run()
    assert torch.equal(out[0], out[1])


def test_errors_are_documented() -> None:
    """Callers catch one base class, and the matching built-in ones."""
    assert issubclass(InvalidInput, lora_merge.LoraMergeError)
    assert issubclass(InvalidInput, ValueError)


def test_long_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels count the sides of what they compute in 32 bits: of conversions and of strided copies, too. Runs of
    memory, which are copied as bytes or folded, have no limit."""
    monkeypatch.setattr("lora_merge.kernels.checks.MAX_SIDE", 5000)

    def columns(dtype: torch.dtype, n: int = 6000) -> Tensor:
        return torch.zeros(n, 2, dtype=dtype)[:, :1]

    single, half = torch.float32, torch.bfloat16
    for s in (
        Segment("w", columns(single), torch.zeros(6000, 1, dtype=half)),
        Segment("w", columns(single).t(), torch.zeros(1, 6000, dtype=half)),
        Segment("w", columns(single), columns(single)),
        Segment("w", columns(single), torch.zeros(6000, 1), row_scale=torch.ones(6000)),
        Segment("w", columns(single), columns(single), torch.zeros(2, 1), torch.zeros(6000, 2)),
    ):
        before = s.destination.clone()
        with pytest.raises(InvalidInput, match="w: a side of 6000 is above 5000; cut the weight into segments"):
            Plan([s]).run()
        assert torch.equal(s.destination, before)
    run, target = torch.arange(20000.0)[None], torch.zeros(1, 20000, dtype=half)
    Plan([Segment("w", run, target), Segment("x", run, torch.zeros_like(run))]).run()
    assert torch.equal(target, run.to(half))


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ("x", "must be Segments, got a str at 0"),
        (3, "must be Segments, got a int at 0"),
        ([None], "must be Segments, got a NoneType at 0"),
        ([Segment("w", "source", "destination")], "w: source must be a tensor, got a str"),
        ([Segment("w", torch.zeros(2, 2), None)], "w: destination must be a tensor, got a NoneType"),
        ([Segment("w", torch.zeros(2, 2), torch.zeros(2, 2), [1.0])], "w: lora_A must be a tensor"),
    ],
)
@pytest.mark.parametrize("plan", [Plan, TrackedPlan])
def test_what_is_no_segment(plan: Any, segments: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        plan(segments)
