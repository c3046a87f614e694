"""Launches of the CUDA kernel whose results have 8 bits and share scales (`csrc/cuda/scaled.cuh`,
`csrc/cuda/hopper_scaled.cu`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import Launch, next_after, operators
from . import cuda_hopper as hopper
from .cuda_launch import variants
from .cuda_repack import VECTOR, repack
from .cuda_table import BLOCKS, MAX_UNIT_ROWS, Memory, cut, memory, no_room, products, shape_as_wide
from .layout import (
    CHUNK,
    MAX_RANK,
    SCALED_BESIDE,
    SCALED_BLOCK,
    SCALED_COL_WARPS,
    SCALED_CONVERT,
    SCALED_MEASURE,
    SCALED_ROWS,
    SCALED_WHOLE,
    SCALED_WORDS,
)
from .packed import Packed
from .scaled import Placed, by_weight
from .segments import CODE, DESTINATION_STRIDE, DTYPES, FP32, RANK, Segment, pack
from .streams import Streams


class ScaledVariant(NamedTuple):
    """One launch of the kernel for any GPU: the arguments of `launch_scaled` that stay the same from run to run."""

    table: Tensor
    unit_segment: Tensor
    counter: Tensor
    device: int
    source_dtype: int
    dtype: int
    adapters: int
    part: int
    n_units: int
    n_raw_units: int
    rows_per_unit: int
    col_warps: int
    stages: int
    staged_B: bool
    pad: int
    max_rank: int

    def __call__(self, stochastic: bool, seed: int) -> None:
        operators.launch_scaled(*self, stochastic, seed)


class HopperScaledVariant(NamedTuple):
    """One launch of the kernel for compute capability 9, likewise."""

    table: Tensor
    unit_segment: Tensor
    maps: Tensor
    counter: Tensor
    device: int
    dtype: int
    adapters: int
    part: int
    n_units: int
    n_raw_units: int
    rows_per_unit: int
    strip_cols: int
    held: int
    stages: int
    max_rank: int

    def __call__(self, stochastic: bool, seed: int) -> None:
        operators.launch_hopper_scaled(*self, stochastic, seed)


class CudaScaled:
    """See `Launch`: one launch for blocks that are whole; for others one that finds scales and one that uses them.

    Args:
        placed: what is written; whole groups.
    """

    def __init__(self, placed: Sequence[Placed], device: torch.device) -> None:
        weights = [scaled for scaled, some in by_weight(placed) if not all(p.whole for p in some)]
        sizes = [0, *(s.grid[0] * s.grid[1] for s in weights)]
        self._largest = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        begins = dict(zip((s.weight.data_ptr() for s in weights), np.cumsum(sizes[:-1]).tolist(), strict=True))
        words = np.array([_words(p, self._largest, begins) for p in placed], dtype=np.int64)
        scaled = torch.from_numpy(words).to(device)
        table = pack([p.segment for p in placed])
        table[:, CODE] = scaled.data_ptr() + np.arange(len(placed)) * SCALED_WORDS * 8
        made = repack(table, device, SCALED_BESIDE)
        whole = np.array([p.whole for p in placed])
        parts = [(SCALED_MEASURE, ~whole), (SCALED_CONVERT, ~whole), (SCALED_WHOLE, whole)]
        self._adapters = variants(made.copies, device) if len(made.copies) else []
        self.variants = [v for part, some in parts for v in _variants(made.table[some], part, device)]
        tensors = [t for v in [*self._adapters, *self.variants] for t in v if isinstance(t, Tensor)]
        self._streams = Streams(device, [self._largest, scaled, made.memory, *tensors])

    def __call__(self, stochastic: bool, seed: int) -> None:
        self._streams.join()
        for copies in self._adapters:
            copies(False, 0)
        if self._largest.numel():
            self._largest.zero_()
        for variant in self.variants:
            variant(stochastic, seed)

    def row_norms(self, out: Tensor) -> None:
        raise NotImplementedError("norms are taken of what is merged in place")


class _Both:
    """Two launches, one after the other."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._launches = launches

    def __call__(self, stochastic: bool, seed: int) -> None:
        for launch in self._launches:
            launch(stochastic, seed)

    def row_norms(self, out: Tensor) -> None:
        raise NotImplementedError("norms are taken of what is merged in place")


def prepare_scaled(placed: Sequence[Placed], device: torch.device) -> Launch:
    """Lay out the work of checked segments; weights with a segment that the kernel does not serve go elsewhere."""
    here: list[Placed] = []
    rest: list[Placed] = []
    for _, some in by_weight(placed):
        (here if all(_serves(p.segment, device) for p in some) else rest).extend(some)
    launches: list[Launch] = [CudaScaled(here, device)] if here else []
    if rest:
        segments = [p.segment for p in rest]
        launches.append(next_after("cuda", device, no_room(segments, device)).prepare_scaled(rest, device))
    return launches[0] if len(launches) == 1 else _Both(launches)


def _serves(s: Segment, device: torch.device) -> bool:
    if isinstance(s.source, Packed):
        return False
    wide = s.lora_A is not None and s.lora_B is not None and bool(products(pack([s]))[0] == FP32)
    return s.rank <= _most_rank(wide, max(s.source.element_size(), 2), memory(device), device)


@cache
def _most_rank(wide: bool, element_bytes: int, room: Memory, device: torch.device) -> int:
    ranks = range(CHUNK, MAX_RANK + 1, CHUNK)
    return max((r for r in ranks if shape_as_wide(SCALED_COL_WARPS, r, wide, element_bytes, device)), default=0)


def _words(p: Placed, largest: Tensor, begins: dict[int, int]) -> list[int]:
    begin = begins.get(p.scaled.weight.data_ptr())
    at = 0 if begin is None else largest.data_ptr() + 4 * begin
    return [p.scaled.scales.data_ptr(), at, p.scaled.code, p.row, p.col, p.scaled.grid[1]]


def _variants(table: np.ndarray, part: int, device: torch.device) -> list[ScaledVariant | HopperScaledVariant]:
    """A launch for each combination of dtypes, and for each of the two kernels."""
    if not len(table):
        return []
    fits = hopper.serves(table, device, SCALED_BESIDE) & (table[:, DESTINATION_STRIDE] % VECTOR == 0)
    dtypes = [table[:, DTYPES] & 0xFF, table[:, DTYPES] >> 8 & 0xFF, products(table)]
    found, kind_of = np.unique(np.stack([fits, *dtypes], axis=1), axis=0, return_inverse=True)
    made = []
    for number, (hopper_serves, source, dtype, adapters) in enumerate(found.tolist()):
        some = table[kind_of.reshape(-1) == number]
        made.append(_variant(some, part, bool(hopper_serves), source, dtype, adapters, device))
    return made


def _variant(
    merges: np.ndarray, part: int, fits: bool, source: int, dtype: int, adapters: int, device: torch.device
) -> ScaledVariant | HopperScaledVariant:
    max_rank, wide = int(merges[:, RANK].max()), adapters == FP32
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if fits:
        tiles = hopper.tiles(max_rank, wide, device, SCALED_BESIDE)
        rows = hopper.unit_rows(max_rank, wide, hopper.are_large(merges, processors))
        rows, least = (min(rows, SCALED_ROWS), SCALED_BLOCK) if part == SCALED_WHOLE else (rows, 64)
        made = cut(merges, merges[:0], tiles.strip_cols, rows, processors, device, least)
        maps = hopper.maps(made.host_table, wide, made.table.device)
        return HopperScaledVariant(
            made.table, made.unit_segment, maps, made.counter, made.device, dtype, adapters, part, made.n_units,
            made.n_raw_units, made.rows_per_unit, *tiles, max_rank,
        )  # fmt: skip
    shape = shape_as_wide(SCALED_COL_WARPS, max_rank, wide, 4 if source == FP32 else 2, device)
    assert shape is not None, (max_rank, wide, source)
    made = cut(merges, merges[:0], SCALED_BLOCK, MAX_UNIT_ROWS, BLOCKS * processors, device, SCALED_BLOCK)
    return ScaledVariant(
        made.table, made.unit_segment, made.counter, made.device, source, dtype, adapters, part, made.n_units,
        made.n_raw_units, made.rows_per_unit, *shape, max_rank,
    )  # fmt: skip
