"""Segment: one rectangle of merging; and the packed table of them that every kernel reads.

    destination[i, j] = round(row_scale[i] * (source[i, j] + scaling * sum_k lora_B[i, k] * lora_A[k, j]))

A whole weight is one segment, a shard is one or a few, a fused tensor is one per part. Without an adapter (rank 0) a
segment copies. `layout.py` describes a row of the table, for C++ as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import mul

import numpy as np
import torch
from torch import Tensor

from .bindings import layout
from .packed import Codes, Packed

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""dtypes of bases, outputs and adapters; a word's dtype code is the index in this tuple."""
FP8 = torch.float8_e4m3fn
"""dtype of results that share scales, see scaled/weights.py."""
BF16, FP16, FP32 = (layout.DTYPES[name] for name in ("BFloat16", "Float16", "Float32"))
FORMATS = layout.FORMATS
RAW = {size: layout.DTYPES[f"Raw{size}"] for size in (1, 2, 4, 8)}
"""dtype codes of copies that move bits: bytes an element -> code."""
WORDS = layout.WORDS
"""64-bit words a segment."""

# Columns of the packed table.
SOURCE, DESTINATION = layout.OFFSET["source"], layout.OFFSET["destination"]
LORA_A, LORA_B, ROW_SCALE = layout.OFFSET["lora_A"], layout.OFFSET["lora_B"], layout.OFFSET["row_scale"]
ROWS, COLS, RANK = layout.OFFSET["rows"], layout.OFFSET["cols"], layout.OFFSET["rank"]
SOURCE_STRIDE, DESTINATION_STRIDE = layout.OFFSET["source_stride"], layout.OFFSET["destination_stride"]
LORA_A_STRIDE, LORA_B_STRIDE = layout.OFFSET["lora_A_stride"], layout.OFFSET["lora_B_stride"]
SCALING, DTYPES, KEY = layout.OFFSET["scaling"], layout.OFFSET["dtypes"], layout.OFFSET["key"]
FIRST, PITCH = layout.OFFSET["first"], layout.OFFSET["pitch"]
PLACE, CODE, ABSMAX, BLOCK = (layout.OFFSET[name] for name in ("place", "code", "absmax", "block"))
ABSMAX_CODE, ABSMAX_SCALE = layout.OFFSET["absmax_code"], layout.OFFSET["absmax_scale"]
ABSMAX_BLOCK, ABSMAX_OFFSET = layout.OFFSET["absmax_block"], layout.OFFSET["absmax_offset"]
UNIT_BEGIN, UNITS_ACROSS = layout.OFFSET["unit_begin"], layout.OFFSET["units_across"]
PARTS_A, PARTS_B = layout.OFFSET["parts_A"], layout.OFFSET["parts_B"]
SCALE, LARGEST, SCALES_ACROSS = (layout.OFFSET[name] for name in ("scale", "largest", "scales_across"))


@dataclass(frozen=True, slots=True)
class Segment:
    """One rectangle of work: `destination = round(row_scale * (source + scaling * lora_B @ lora_A))`.

        segment = lora_merge.Segment("q_proj.weight", weight, slot, lora_A, lora_B, 2.0)

    It only describes the work; `Plan` checks it (`InvalidInput`).

    Args:
        name: name of the whole weight, for error messages and for the random bits of stochastic rounding.
        source: `[rows, cols]` view of the base, any strides; bf16, fp16 or fp32 (any dtype where rank is 0 and the
            destination has the same one); or a `Packed` one, which is decoded.
        destination: `[rows, cols]` view that is written; `source` itself merges in place.
        lora_A: `[r, cols]` view, or None for a copy.
        lora_B: `[rows, r]` view, or None for a copy.
        scaling: factor of the product; finite.
        row_scale: float32 `[rows]`: factor of each row after the addition (DoRA).
        first: index of element (0, 0) in the whole weight.
        pitch: how far apart in the whole weight two rows and two columns are, in elements; default `(cols, 1)`.
        peer: the source lies in the memory of another GPU, mapped here. It is then read by plain loads, at the speed of
            the link; tensor maps read such memory at 6 GB/s (H200). The bits are the same.
    """

    name: str
    source: Tensor
    destination: Tensor
    lora_A: Tensor | None = None
    lora_B: Tensor | None = None
    scaling: float = 1.0
    row_scale: Tensor | None = None
    first: int = 0
    pitch: tuple[int, int] | None = None
    peer: bool = False

    @property
    def rank(self) -> int:
        return 0 if self.lora_A is None else self.lora_A.shape[0]

    def tensors(self) -> list[Tensor]:
        """Return all that it reads or writes."""
        found = (self.source, self.destination, self.lora_A, self.lora_B, self.row_scale)
        return [t for t in found if t is not None]

    def part(self, begin: int, end: int) -> Segment:
        """Return some of its rows; stochastic rounding draws for an element what it draws in the whole."""
        pitch = self.pitch or (self.source.shape[1], 1)
        return replace(
            self,
            source=self.source[begin:end],
            destination=self.destination[begin:end],
            lora_B=None if self.lora_B is None else self.lora_B[begin:end],
            row_scale=None if self.row_scale is None else self.row_scale[begin:end],
            first=self.first + begin * pitch[0],
            pitch=pitch,
        )


def same_weights(table: np.ndarray, other: np.ndarray) -> bool:
    """Return True if two packed tables name the same rectangles of the same weights in one order; adapters are free."""
    words = [SOURCE, ROWS, COLS, SOURCE_STRIDE, SOURCE_STRIDE + 1]
    return (
        table.shape == other.shape
        and bool((table[:, words] == other[:, words]).all())
        and bool((table[:, DTYPES] & 0xFF == other[:, DTYPES] & 0xFF).all())
    )


def copies(
    name: str, source: Tensor, destination: Tensor, start: Sequence[int] = (), shape: Sequence[int] = ()
) -> list[Segment]:
    """Return segments that copy one tensor into another of the same shape, any strides; floats are converted.

    Args:
        start, shape: the two are a box of a tensor of this shape, and where it begins there: stochastic rounding draws
            for an element what it draws in a copy of all of it. Default: they are the whole.
    """
    sizes = shape or source.shape
    steps = [prod(sizes[d + 1 :]) for d in range(len(sizes))]
    return _copies(name, source, destination, sum(map(mul, start, steps)), steps)


def _copies(name: str, source: Tensor, destination: Tensor, first: int, steps: Sequence[int]) -> list[Segment]:
    """Do `copies` where element (0, ...) has the number `first` and each dimension adds its step."""
    scaled = destination.dtype == FP8 != source.dtype  # rows stay rows
    if not scaled and source.is_contiguous() and destination.is_contiguous() and _adjacent(source.shape, steps):
        return [Segment(name, source.view(1, -1), destination.view(1, -1), first=first)]
    if source.dim() == 1:
        return [Segment(name, source.unsqueeze(0), destination.unsqueeze(0), first=first)]
    if source.dim() == 2:
        return [Segment(name, source, destination, first=first, pitch=(steps[0], 1))]
    pairs = enumerate(zip(source, destination, strict=True))
    return [part for i, (s, d) in pairs for part in _copies(name, s, d, first + i * steps[0], steps[1:])]


def _adjacent(shape: Sequence[int], steps: Sequence[int]) -> bool:
    """Return True if elements of this shape that follow each other have numbers that do."""
    expected = 1
    for n, step in zip(reversed(shape), reversed(steps), strict=True):
        if n > 1 and step != expected:
            return False
        expected *= n
    return True


def raw(t: Tensor) -> Tensor:
    """Return a tensor's elements as integers: copying these moves bits, those of a NaN too."""
    return t.view(_INTEGERS[t.element_size()]) if t.element_size() in _INTEGERS else t


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def name_key(name: str) -> int:
    """Return a 64-bit hash of a weight's name, as a signed word; it is the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def seed_key(seed: int) -> int:
    """Return splitmix64 of the seed (Steele, Lea, Flood 2014), a signed word; kernels xor it with the name's hash."""
    mask = (1 << 64) - 1
    z = (seed + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z


def pack(segments: Sequence[Segment]) -> np.ndarray:
    """Return the table, int64 `[S, WORDS]`: a row a segment (two where a long conversion is folded); none is empty.

    Where the destination (or, failing that, the source) is stored by columns, the segment is turned over so that
    the kernels see rows of adjacent elements: W' = A' B' with the roles of lora_A and lora_B exchanged. Copies
    that keep the dtype become byte copies, one run where memory is contiguous.
    """
    rows = [_words(part) for segment in segments for part in folded(segment)]
    return np.array(rows, dtype=np.int64).reshape(len(rows), WORDS)


def folded(s: Segment) -> list[Segment]:
    """Fold a conversion of a long contiguous run into rows (and the rest of it), so that it fills tiles."""
    n, width = s.source.numel(), 4096
    flat = s.source.is_contiguous() and s.destination.is_contiguous() and s.pitch in (None, (s.source.shape[1], 1))
    if s.rank or s.row_scale is not None or moves_bits(s) or not flat or n < 2 * width or s.destination.dtype == FP8:
        return [s]
    source, destination, rest = s.source.view(-1), s.destination.view(-1), n % width
    body = replace(s, source=source[: n - rest].view(-1, width), destination=destination[: n - rest].view(-1, width))
    body = replace(body, pitch=(width, 1))
    if not rest:
        return [body]
    tail = replace(s, source=source[n - rest :].view(1, rest), destination=destination[n - rest :].view(1, rest))
    return [body, replace(tail, first=s.first + n - rest, pitch=(rest, 1))]


def _words(s: Segment) -> list[int]:
    source, destination, a, b = s.source, s.destination, s.lora_A, s.lora_B
    pitch = s.pitch or (source.shape[1], 1)
    if s.row_scale is None and _by_columns(destination, source):
        source, destination, pitch = source.t(), destination.t(), (pitch[1], pitch[0])
        if a is not None and b is not None:
            a, b = b.t(), a.t()
    (m, n), source_stride, destination_stride = source.shape, source.stride(), destination.stride()
    if moves_bits(s):
        m, n, source_stride, destination_stride, code = _copy_layout(source, destination)
        dtypes = code | code << 8
    else:
        rounded = source.dtype if destination.dtype == FP8 else destination.dtype  # of 8 bits: before it is scaled
        dtypes = FLOATS.index(source.dtype) | FLOATS.index(rounded) << 8
    lora = [0, 0, 0, 0]
    if a is not None and b is not None:
        dtypes |= FLOATS.index(a.dtype) << 16 | FLOATS.index(b.dtype) << 24
        lora = [*a.stride(), *b.stride()]
    packed = [0] * 8
    if isinstance(source, Packed):
        packed = _packed_words(source)
        dtypes |= FORMATS["Codes4" if packed[1] else "Int8"] << 32
    return [
        source.data_ptr(),
        destination.data_ptr(),
        *(0 if t is None else t.data_ptr() for t in (a, b, s.row_scale)),
        m,
        n,
        s.rank,
        *source_stride,
        *destination_stride,
        *lora,
        int(np.float64(s.scaling).view(np.int64)),
        dtypes,
        name_key(s.name),
        s.first,
        *pitch,
        *[0] * (layout.OFFSET["place"] - UNIT_BEGIN),  # a backend's own
        *packed,
    ]


def _packed_words(source: Packed) -> list[int]:
    codes = source.codes
    assert isinstance(codes, Codes)
    nested = [0, 0, 0, 0]
    if codes.nested is not None:
        n = codes.nested
        nested = [n.code.data_ptr(), n.absmax.data_ptr(), n.block, n.offset.data_ptr()]
    code = 0 if codes.code is None else codes.code.data_ptr()
    return [source.place, code, codes.absmax.data_ptr(), codes.block, *nested]


def moves_bits(s: Segment) -> bool:
    """Return True if a segment copies elements as they are."""
    plain = s.rank == 0 and s.row_scale is None and s.source.dtype == s.destination.dtype
    return plain and not isinstance(s.source, Packed)


def _by_columns(destination: Tensor, source: Tensor) -> bool:
    """Return True if turning the rectangle over gives the kernels adjacent elements along a row."""
    if destination.stride(1) == 1:
        return source.stride(1) != 1 and destination.stride(0) == 1 and source.stride(0) == 1
    return destination.stride(0) == 1


def _copy_layout(source: Tensor, destination: Tensor) -> tuple[int, int, tuple[int, int], tuple[int, int], int]:
    """Return rows, cols, strides and dtype code of a copy that moves bits: the fewest and longest runs of bytes."""
    (m, n), size = source.shape, source.element_size()
    if n > 1 and (source.stride(1) != 1 or destination.stride(1) != 1):
        (sr, sc), (dr, dc) = source.stride(), destination.stride()
        return m, n, (sr, sc), (dr, dc), RAW[size]
    if m == 1 or (source.stride(0) == n and destination.stride(0) == n):
        return 1, m * n * size, (m * n * size, 1), (m * n * size, 1), RAW[1]
    return m, n * size, (source.stride(0) * size, 1), (destination.stride(0) * size, 1), RAW[1]
