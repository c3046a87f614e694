"""What the tests of the kernels share: the exact result, the tolerances with their reasons, views, and cuts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from lora_merge import Plan, Segment
from lora_merge.kernels import reference
from lora_merge.kernels.segments import FLOATS

# ---- tolerances ------------------------------------------------------------------------------------------------------
# They follow from the arithmetic that every backend keeps to: products at float32 accuracy or better, summed in
# float32 (but see CUT), added to the base in float32, rounded once.

SUM_ERROR = 2.0**-23
"""of |W| + |out|: the float32 addition, and the rounding of the update before it, round to 2^-24 each."""
PRODUCT_ERROR = 2.0**-20
"""of |scaling| sum |B| |A|: products better than 2^-22, and a float32 sum over up to 512 of them in blocks."""
CUT = 2.0**-24
"""of the same for each rank, where a GPU's matrix unit sums all of them: a step of it adds 16 products to the sum, and
keeps two bits or more beyond those of float32 meanwhile, so it cuts off less than 16 * 2^-25 + 2^-23 of the largest."""
CORRECTLY_ROUNDED = {torch.bfloat16: 0.9999, torch.float16: 0.999, torch.float32: 0.0}
"""share of elements equal to the correctly rounded result while the update stays below a tenth of the weights.

A float32 error of half a float32 ulp misrounds where the exact value lies that close to the middle between two
outputs: 2^-16 of all bf16 and 2^-13 of all fp16 elements; the shares leave room for 6 and 8 times that. A float32
output is rounded twice, as torch's own; its error is compared with torch's instead.
"""
FLOAT32_ERROR_OF_TORCH = 2.0
"""float32 results: largest and RMS error at most this multiple of what torch's own float32 addmm makes."""

_MANTISSA = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}
_MIN_EXPONENT = {torch.bfloat16: -126, torch.float16: -14, torch.float32: -126}


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance (float64) between neighbours in `dtype` at each |x|; below the normal range it stays the same."""
    exponent = torch.frexp(x.double()).exponent.double() - 1
    exponent = torch.where(x == 0, exponent.new_tensor(-1000.0), exponent)
    return torch.exp2(exponent.clamp(min=_MIN_EXPONENT[dtype]) - _MANTISSA[dtype])


# ---- what is right ---------------------------------------------------------------------------------------------------


def exact(s: Segment) -> Tensor:
    """float64 `row_scale * (source + scaling * lora_B @ lora_A)`, unrounded; independent of every backend."""
    total = s.source.double()
    if s.lora_A is not None and s.lora_B is not None:
        total = total + s.scaling * (s.lora_B.double() @ s.lora_A.double())
    return total if s.row_scale is None else total * s.row_scale.double()[:, None]


def bound(s: Segment, out: Tensor, *, stochastic: bool = False) -> Tensor:
    """The largest error allowed of each element of `out`."""
    scale = 1.0 if s.row_scale is None else s.row_scale.double().abs()[:, None]
    allowed = ulp(out, out.dtype) * (1.0 if stochastic else 0.5)
    allowed = allowed + SUM_ERROR * (s.source.double().abs() * scale + out.double().abs())
    if s.lora_A is not None and s.lora_B is not None:
        products = s.lora_B.double().abs() @ s.lora_A.double().abs()
        halves = {s.lora_A.dtype, s.lora_B.dtype}
        whole = halves == {torch.bfloat16} or halves == {torch.float16} == {s.source.dtype, out.dtype}
        sixteen_bits = s.source.itemsize == out.itemsize == 2
        truncated = CUT * s.lora_A.shape[0] if s.source.is_cuda and sixteen_bits and whole else 0.0
        allowed = allowed + max(PRODUCT_ERROR, truncated) * abs(s.scaling) * products * scale
    return allowed


def assert_accurate(s: Segment, out: Tensor, *, stochastic: bool = False) -> None:
    """Every element within the bound. `s.source` must hold what it held before the merge."""
    error = (out.double() - exact(s)).abs()
    bad = ~(error <= bound(s, out, stochastic=stochastic))
    if bad.any():
        at = tuple(map(int, bad.nonzero()[0]))
        raise AssertionError(
            f"{s.name}: {int(bad.sum())} of {bad.numel()} elements are off; the first at {at}: got {out[at].item()!r}, "
            f"exact {exact(s)[at].item()!r}, weight {s.source[at].item()!r}, error {error[at].item():.3g}, "
            f"allowed {bound(s, out, stochastic=stochastic)[at].item():.3g}"
        )


def most_misrounded(dtype: torch.dtype, elements: int) -> float:
    """How many of some elements may differ from the rounded exact result.

    Misses at the allowed rate are a Poisson count: mean m, standard deviation sqrt(m), and four of those on top. The
    benchmark holds the share itself, over billions of elements (`misrounded`).
    """
    mean = (1 - CORRECTLY_ROUNDED[dtype]) * elements
    return mean + 4 * mean**0.5


def assert_correctly_rounded(s: Segment, out: Tensor) -> None:
    """The share of elements equal to the rounded exact result; what a small sample may miss by chance is allowed."""
    missed = int((reference.round_once(exact(s), out.dtype) != out).sum())
    most = most_misrounded(out.dtype, out.numel())
    assert missed <= most, f"{s.name}: {missed} of {out.numel()} elements are not correctly rounded, at most {most:.1f}"


def bits(t: Tensor) -> Tensor:
    """The raw bits of a tensor, so that NaN equals NaN and -0.0 differs from 0.0."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.detach().contiguous().view(words[t.element_size()])


def assert_same_bits(got: Tensor, wanted: Tensor, what: str = "result") -> None:
    assert got.dtype == wanted.dtype, f"{what}: {got.dtype} and {wanted.dtype}"
    assert got.shape == wanted.shape, f"{what}: {tuple(got.shape)} and {tuple(wanted.shape)}"
    differ = bits(got) != bits(wanted)
    if differ.any():
        at = tuple(map(int, differ.nonzero()[0]))
        one, other = (f"{t[at].item()!r} ({bits(t)[at].item():#x})" for t in (got, wanted))
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {differ.numel()} elements differ in their bits; the first at {at}: got "
            f"{one}, wanted {other}"
        )


def assert_rounded_once(got: Mapping[str, Tensor], wanted_of: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Tensors are the exact ones, float64, rounded once to a dtype: as near, and but for ties the very numbers."""
    off = total = 0
    for name, wanted in wanted_of.items():
        assert got[name].dtype == dtype
        rounded = reference.round_once(wanted, dtype)
        off += int((rounded != got[name]).sum())
        total += wanted.numel()
        error = (got[name].double() - wanted).abs()
        assert (error <= (rounded.double() - wanted).abs() + 2.0**-18 * wanted.abs().max()).all(), name
    assert dtype == torch.float32 or off <= 1e-3 * total  # float32 sums are rounded themselves


# ---- tensors ---------------------------------------------------------------------------------------------------------

LAYOUTS = (
    "contiguous", "padded rows", "transposed", "padded columns", "every second column", "odd start", "rows of vectors"
)  # fmt: skip


def empty(layout: str, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[rows, cols]` view laid out as named, in memory that holds a pattern of its own around it."""

    def storage(*shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        values = 2 if dtype == torch.bool else 251
        pattern = torch.arange(size * dtype.itemsize, device=device).mul_(37).remainder_(values).to(torch.uint8)
        return pattern.view(dtype).view(shape)

    match layout:
        case "contiguous":
            return storage(rows, cols)
        case "padded rows":
            return storage(rows, cols + 3)[:, 2 : cols + 2]
        case "rows of vectors":  # 16 bytes each, whatever the columns: what lies behind these is somebody else's
            return storage(rows, (cols + 23) // 16 * 16)[:, :cols]
        case "transposed":
            return storage(cols, rows).t()
        case "padded columns":
            return storage(cols, rows + 5)[:, 1 : rows + 1].t()
        case "every second column":
            return storage(rows, 2 * cols + 1)[:, 1::2]
        case "odd start":
            return storage(rows * cols + 1)[1:].view(rows, cols)
    raise ValueError(layout)


def normal(
    layout: str, rows: int, cols: int, dtype: torch.dtype, device: torch.device, std: float, seed: int
) -> Tensor:
    """Normal values of a standard deviation; the same on every device."""
    view = empty(layout, rows, cols, dtype, device)
    values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * std
    return view.copy_(values.to(dtype))


def make_segment(
    name: str,
    rows: int,
    cols: int,
    rank: int,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    *,
    layouts: Sequence[str] = ("contiguous",) * 4,
    update: float = 0.1,
    scaling: float = 1.5,
    seed: int = 0,
) -> Segment:
    """A segment with normal values: weights of standard deviation 0.02, updates of `update` times that.

    Args:
        dtypes, layouts: of source, destination, lora_A and lora_B.
    """
    b_std = 0.02 * update / (abs(scaling) * 0.5 * max(rank, 1) ** 0.5)
    source = normal(layouts[0], rows, cols, dtypes[0], device, 0.02, seed)
    a = normal(layouts[2], rank, cols, dtypes[2], device, 0.5, seed + 1) if rank else None
    b = normal(layouts[3], rows, rank, dtypes[3], device, b_std, seed + 2) if rank else None
    return Segment(name, source, empty(layouts[1], rows, cols, dtypes[1], device), a, b, scaling)


def run(*segments: Segment, rounding: str = "nearest", seed: int | None = None) -> None:
    """Run segments, and check that nothing but their destinations was written."""
    tensors = [t for s in segments for t in (s.destination, s.source, s.lora_A, s.lora_B, s.row_scale) if t is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    before = {address: storage.clone() for address, storage in storages.items()}
    Plan(segments).run(rounding=rounding, seed=seed)
    after = {address: storage.clone() for address, storage in storages.items()}
    for s in segments:
        address = s.destination.untyped_storage().data_ptr()
        _view(after[address], s.destination).copy_(_view(before[address], s.destination))
    for address, storage in storages.items():
        changed = _bytes(after[address]) != _bytes(before[address])
        assert not changed.any(), f"{int(changed.sum())} of {storage.nbytes()} bytes beside the destinations changed"


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _view(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    whole = torch.empty(0, dtype=like.dtype, device=like.device).set_(storage)
    return whole.as_strided(like.shape, like.stride(), like.storage_offset())


def in_place(s: Segment) -> Segment:
    """The same segment, merging into a copy of its source with the same strides."""
    copy = _view(s.source.untyped_storage().clone(), s.source)
    return dataclasses.replace(s, source=copy, destination=copy)


# ---- cuts ------------------------------------------------------------------------------------------------------------

Rectangle = tuple[int, int, int, int]
"""row begin and end, column begin and end"""


@st.composite
def cuts(draw: Callable[..., int], rows: int, cols: int, most: int = 6) -> list[Rectangle]:
    """Rectangles that tile `[rows, cols]`, some of them possibly empty."""
    parts: list[Rectangle] = [(0, rows, 0, cols)]
    for _ in range(draw(st.integers(0, most - 1))):
        r0, r1, c0, c1 = parts.pop(draw(st.integers(0, len(parts) - 1)))
        if draw(st.booleans()):
            at = draw(st.integers(r0, r1))
            parts += [(r0, at, c0, c1), (at, r1, c0, c1)]
        else:
            at = draw(st.integers(c0, c1))
            parts += [(r0, r1, c0, at), (r0, r1, at, c1)]
    return parts


def cut(s: Segment, parts: Sequence[Rectangle]) -> list[Segment]:
    """One segment for each rectangle of a whole one."""
    pitch = s.pitch or (s.source.shape[1], 1)
    return [
        dataclasses.replace(
            s,
            source=s.source[r0:r1, c0:c1],
            destination=s.destination[r0:r1, c0:c1],
            lora_A=None if s.lora_A is None else s.lora_A[:, c0:c1],
            lora_B=None if s.lora_B is None else s.lora_B[r0:r1],
            row_scale=None if s.row_scale is None else s.row_scale[r0:r1],
            first=s.first + r0 * pitch[0] + c0 * pitch[1],
            pitch=pitch,
        )
        for r0, r1, c0, c1 in parts
    ]


def pairwise(index: int) -> tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype]:
    """One of 9 choices of four dtypes that hold every pair of dtypes at every two places (an orthogonal array)."""
    i, j = divmod(index % 9, 3)
    return FLOATS[i], FLOATS[j], FLOATS[(i + j) % 3], FLOATS[(i + 2 * j) % 3]
