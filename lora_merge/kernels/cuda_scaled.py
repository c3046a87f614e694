"""Launches of the CUDA kernel whose results have 8 bits and share scales (`csrc/cuda/scaled.cuh`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import Launch, next_after, operators
from .cuda_launch import before
from .cuda_repack import repack
from .cuda_table import BLOCKS, MAX_UNIT_ROWS, Memory, cut, memory, no_room, products, shape_as_wide
from .layout import CHUNK, MAX_RANK, SCALED_BLOCK, SCALED_COL_WARPS, SCALED_CONVERT, SCALED_MEASURE, SCALED_WHOLE
from .packed import Packed
from .scaled import Placed, by_weight
from .segments import DTYPES, FP32, RANK, Segment, pack
from .streams import Streams


class ScaledVariant(NamedTuple):
    """One launch: the arguments of `launch_scaled` that stay the same from run to run."""

    table: Tensor
    unit_segment: Tensor
    scaled: Tensor
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


class CudaScaled:
    """See `Launch`: one pass for blocks that are whole; for others one that finds scales and one that uses them.

    Args:
        placed: what is written; whole groups.
    """

    def __init__(self, placed: Sequence[Placed], device: torch.device) -> None:
        measured = [p for p in placed if not p.whole]
        sizes = [0, *(s.grid[0] * s.grid[1] for s, _ in by_weight(measured))]
        self._largest = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        begins = dict(
            zip((s.weight.data_ptr() for s, _ in by_weight(measured)), np.cumsum(sizes[:-1]).tolist(), strict=True)
        )
        made = repack(pack([p.segment for p in placed]), device, by_map=False)
        self.before = before(made, device, 2 * len(placed))
        beside = np.array([_words(p, self._largest, begins) for p in placed], dtype=np.int64)
        whole = np.array([p.whole for p in placed])
        self.variants = [
            variant
            for part, some in ((SCALED_MEASURE, ~whole), (SCALED_CONVERT, ~whole), (SCALED_WHOLE, whole))
            for variant in _variants(made.table[some], part, beside[some], device)
        ]
        tensors = [t for v in (*self.before, *self.variants) for t in v if isinstance(t, Tensor)]
        self._streams = Streams(device, [self._largest, made.memory, *tensors])

    def __call__(self, stochastic: bool, seed: int) -> None:
        self._streams.join()
        if self._largest.numel():
            self._largest.zero_()
        for launch in (*self.before, *self.variants):
            launch(stochastic, seed)

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
    adapters = int(products(pack([s]))[0])
    return s.rank <= _most_rank(adapters, max(s.source.element_size(), 2), memory(device), device)


@cache
def _most_rank(adapters: int, element_bytes: int, room: Memory, device: torch.device) -> int:
    ranks = range(CHUNK, MAX_RANK + 1, CHUNK)
    return max((r for r in ranks if shape_as_wide(SCALED_COL_WARPS, r, adapters, element_bytes, device)), default=0)


def _words(p: Placed, largest: Tensor, begins: dict[int, int]) -> list[int]:
    begin = begins.get(p.scaled.weight.data_ptr())
    at = 0 if p.whole or begin is None else largest.data_ptr() + 4 * begin
    return [p.scaled.scales.data_ptr(), at, p.scaled.code, p.row, p.col, p.scaled.grid[1]]


def _variants(table: np.ndarray, part: int, beside: np.ndarray, device: torch.device) -> list[ScaledVariant]:
    """A launch for each combination of dtypes."""
    kinds = np.stack([table[:, DTYPES] & 0xFF, table[:, DTYPES] >> 8 & 0xFF, products(table)], axis=1)
    found, kind_of = np.unique(kinds, axis=0, return_inverse=True)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    made = []
    for number, (source, dtype, adapters) in enumerate(found.tolist()):
        some = kind_of.reshape(-1) == number
        merges, max_rank = table[some], int(table[some, RANK].max())
        shape = shape_as_wide(SCALED_COL_WARPS, max_rank, adapters, 4 if source == FP32 else 2, device)
        assert shape is not None, (max_rank, adapters, source)
        units = cut(merges, table[:0], SCALED_BLOCK, MAX_UNIT_ROWS, BLOCKS * processors, device, SCALED_BLOCK)
        scaled = torch.from_numpy(beside[some].copy()).to(units.table.device)
        made.append(
            ScaledVariant(
                units.table, units.unit_segment, scaled, units.counter, units.device, source, dtype, adapters, part,
                units.n_units, units.n_raw_units, units.rows_per_unit, *shape, max_rank,
            )
        )  # fmt: skip
    return made
