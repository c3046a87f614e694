"""The truth: float64 sums in one fixed order, rounded once. Slow, on any device, no compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .scaled.two_step import ByOperations, TwoStepScaled
from .segments import Segment, moves_bits, name_key
from .tracked.composed import ComposedTracked

BLOCK = 1 << 18
"""Elements worked on at a time: a few MiB of float64, whatever the size of the weight."""


def unavailable(device: torch.device) -> str | None:
    """Return why a device has no float64; None if it has."""
    return f"{device.type} tensors have no float64" if device.type in ("mps", "meta") else None


class _Launch:
    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments

    def __call__(self, stochastic: bool, seed: int) -> None:
        for s in self.segments:
            for rows in _row_blocks(s):
                _merge_block(s, rows, stochastic, seed)

    def row_norms(self, out: Tensor) -> None:
        begin = 0
        for s in self.segments:
            for rows in _row_blocks(s):
                total = unrounded(s, rows)
                out[begin + rows.start : begin + rows.stop] = (total * total).sum(1)
            begin += s.source.shape[0]


def prepare(segments: Sequence[Segment], device: torch.device) -> _Launch:
    """Keep the segments: there is nothing to lay out."""
    return _Launch(segments)


prepare_scaled = partial(TwoStepScaled, prepare, ByOperations)
"""Merges by launches of `prepare`, then scales by tensor operations."""


def prepare_tracked(segments: Sequence[Segment], device: torch.device) -> ComposedTracked:
    """Merge block by block, by launches of `prepare`."""
    return ComposedTracked(prepare, segments)


def _row_blocks(s: Segment) -> list[slice]:
    rows, cols = s.source.shape
    step = max(1, BLOCK // max(cols, 1))
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


def _merge_block(s: Segment, rows: slice, stochastic: bool, seed: int) -> None:
    if moves_bits(s):
        s.destination[rows].copy_(s.source[rows])
        return
    total = unrounded(s, rows)
    if s.row_scale is not None:
        total = total * s.row_scale[rows].double()[:, None]
    if stochastic:
        rounded = round_stochastic(total.float(), s.destination.dtype, random_bits(s, rows, seed))
    else:
        rounded = round_once(total, s.destination.dtype)
    s.destination[rows].copy_(rounded)


def unrounded(s: Segment, rows: slice) -> Tensor:
    """Return float64 `source + scaling * B A` of some rows, summed over the rank in order, element by element."""
    total = s.source[rows].double()
    if s.lora_A is not None and s.lora_B is not None:
        product = torch.zeros_like(total)
        a, b = s.lora_A.double(), s.lora_B[rows].double()
        for k in range(s.rank):
            product += b[:, k : k + 1] * a[k : k + 1]
        total += s.scaling * product
    return total


def round_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 to `dtype`, to nearest even.

    Through float32 there are two roundings; rounding to odd at the first one makes the second one right
    (Boldo and Melquiond 2008: float32 has more than two bits over bf16 and fp16).
    """
    y = x.float()
    if dtype == torch.float32:
        return y
    back = y.double()
    bits = y.view(torch.int32)
    even = (bits & 1) == 0
    # An inexact result with an even last bit moves one step towards x: away from zero if |x| is larger.
    inexact = (back != x) & torch.isfinite(y)
    step = torch.where(x.abs() > back.abs(), 1, -1).to(torch.int32)
    odd = torch.where(inexact & even, bits + step, bits)
    # float32 overflow of a finite value: the largest float32 is odd and rounds to infinity in both dtypes.
    return odd.view(torch.float32).to(dtype)


def random_bits(s: Segment, rows: slice, seed: int) -> Tensor:
    """Return 32 random bits an element (int64), by seed, name and index in the whole weight: csrc/segments.h."""
    n_cols = s.source.shape[1]
    pitch = s.pitch or (n_cols, 1)
    device = s.source.device
    i = torch.arange(rows.start, rows.stop, device=device)[:, None]
    j = torch.arange(n_cols, device=device)[None, :]
    index = s.first + i * pitch[0] + j * pitch[1]
    key = name_key(s.name) ^ seed
    h = _avalanche((index ^ key) & 0xFFFFFFFF)
    return _avalanche(h ^ ((index >> 32) & 0xFFFFFFFF) ^ ((key >> 32) & 0xFFFFFFFF))


def _avalanche(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def round_stochastic(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round float32 to `dtype`, up in magnitude with the probability of the part cut off, which `bits` decides.

    The dropped low bits of the significand are compared with as many random ones by adding and cutting. A float32
    output drops nothing: it is the float32 sum itself. NaN passes. Infinity comes where rounding to nearest gives it,
    and nowhere else: a value above the largest number that nearest rounding brings back to it comes back to it. The
    mean is the value, but for that, and to within 2^-55 in fp16, where the probability is a multiple of 2^-31.
    """
    if dtype == torch.float32:
        return x
    word = x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    size = word & 0x7FFFFFFF
    if dtype == torch.bfloat16:
        kept = (size + (bits >> 16)) >> 16
    else:
        exponent, fraction = size >> 23, size & 0x7FFFFF
        # fp16: 13 bits fall off a normal number, more below 2^-14, where the step stays 2^-24.
        significand = torch.where(exponent > 0, fraction | 0x800000, fraction)
        falls = 13 + (113 - exponent).clamp(min=0)
        shift = falls.clamp(max=31)
        kept = ((significand >> (falls - shift).clamp(max=31)) + (bits & ((1 << shift) - 1))) >> shift
        kept = torch.where(exponent >= 113, kept + ((exponent - 113) << 10), kept)
    largest = torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(torch.int16).item()
    half = kept.clamp(max=largest) | (word >> 31 << 15)
    signed = torch.where(half >= 1 << 15, half - (1 << 16), half).to(torch.int16).view(dtype)
    to_nearest = x.to(dtype)
    return torch.where(torch.isfinite(to_nearest), signed, to_nearest)
