"""Tracked merges by the compiled CUDA kernel (`csrc/cuda/tracked.cu`): a launch for each dtype and kind of adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..segments import BF16, COLS, DTYPES, FLOATS, KEY, RANK, ROWS, UNIT_BEGIN, UNITS_ACROSS, Segment, pack
from .cuda import INLINE_SEGMENTS, MAX_UNIT_ROWS, WARP_COLS, _ceil, _place, _rows_per_unit, _shape, _widest
from .fused import Journal

# The same numbers as in csrc/cuda.
WARPS = 8
UNIT_ELEMENTS = 1024
"""Of a unit of the journal: two steps of a warp. A tile is a unit of each warp of a block."""

CHUNK = 1024
"""Bytes of the arena that a warp takes at a time: an answer from memory for some forty units."""
LEFT_OVER = 512
"""All chunks together are less than this part of the weights, so smaller for small models: most of one may be left."""
BLOCKS = 2
"""That share a multiprocessor."""


class _Group(NamedTuple):
    """One launch: the arguments of `track_cuda` that stay the same from run to run."""

    table: Tensor
    unit_segment: Tensor
    counter: Tensor
    device: int
    dtype: int
    wide: bool
    n_units: int
    rows_per_unit: int
    col_warps: int
    deep: int
    staged_B: bool
    margin: int
    max_rank: int


class CudaTracked:
    """`fused.Kernels` of a table. Tiles of all groups are numbered in a row; a segment's `key` is its first one."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.device = device
        self.base_bytes = sum(s.source.nbytes for s in segments)
        self._tiles = 0
        self._blocks = BLOCKS * torch.cuda.get_device_properties(device).multi_processor_count
        self._groups: list[_Group] = []
        table = pack(segments)
        wide = (table[:, RANK] > 0) & ((table[:, DTYPES] >> 16 & 0xFFFF) != (BF16 | BF16 << 8))
        group = (table[:, DTYPES] & 0xFF) << 1 | wide
        self._first: list[np.ndarray] = []
        self._names: list[str] = []
        for key in np.unique(group):
            self._names += [s.name for s, there in zip(segments, group == key, strict=True) if there]
            self._groups.append(self._group(table[group == key], int(key) >> 1, bool(key & 1)))
        self.units = self._tiles * WARPS
        self.code_bytes = self.units * UNIT_ELEMENTS // 4
        warps = WARPS * sum(min(self._blocks, g.n_units) for g in self._groups)
        self.chunk = min(CHUNK, self.base_bytes // (LEFT_OVER * warps)) & ~3
        self.slack = self.chunk * warps

    def track(self, journal: Journal) -> None:
        self._launch(journal, False)

    def untrack(self, journal: Journal) -> None:
        self._launch(journal, True)

    def names(self, units: Tensor) -> set[str]:
        tiles = units.numpy() // WARPS
        return {self._names[i] for i in np.searchsorted(np.concatenate(self._first), tiles, side="right") - 1}

    def _launch(self, j: Journal, undo: bool) -> None:
        for group in self._groups:
            torch.ops.lora_merge_native.track_cuda(*group, undo, j.codes, j.records, j.arena, j.chunk, j.counter)

    def _group(self, table: np.ndarray, dtype: int, wide: bool) -> _Group:
        max_rank = int(table[:, RANK].max())
        shape = _shape(max_rank, wide, FLOATS[dtype].itemsize, _widest(table), self.device)
        strip = WARP_COLS * shape.col_warps
        tile_rows = UNIT_ELEMENTS // WARP_COLS * (WARPS // shape.col_warps)
        unit_rows = _ceil(_rows_per_unit(table, strip, MAX_UNIT_ROWS, self._blocks), tile_rows) * tile_rows
        across = _ceil(table[:, COLS], strip)
        units, tiles = across * _ceil(table[:, ROWS], unit_rows), across * _ceil(table[:, ROWS], tile_rows)
        table[:, UNIT_BEGIN], table[:, UNITS_ACROSS] = np.cumsum(units) - units, across
        table[:, KEY] = self._tiles + np.cumsum(tiles) - tiles
        self._first.append(table[:, KEY].copy())
        self._tiles += int(tiles.sum())
        on_device = len(table) > INLINE_SEGMENTS
        return _Group(
            *_place(table, units, self.device),
            torch.zeros(2 if on_device else 0, dtype=torch.int32, device=self.device if on_device else "cpu"),
            torch.cuda.current_device() if self.device.index is None else self.device.index,
            dtype=dtype,
            wide=wide,
            n_units=int(units.sum()),
            rows_per_unit=unit_rows,
            **shape._asdict(),
            max_rank=max_rank,
        )
