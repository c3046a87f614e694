"""Tracked merges by the compiled CUDA kernel (`csrc/cuda/tracked.cu`): a launch for each dtype and kind of adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import BackendUnavailable
from ..segments import COLS, DTYPES, KEY, RANK, ROWS, UNIT_BEGIN, UNITS_ACROSS, Segment, pack
from .cuda import BF16, CHUNK, INLINE_SEGMENTS, MAX_UNIT_ROWS, RESERVED, WARP_COLS, _ceil, _place
from .fused import Journal

TILE_ELEMENTS = 4096
"""Of a tile, which has one place in the journal: the same number as in csrc/cuda/tracked.h."""
MARGIN = 8
"""Elements added to a row of A in shared memory: no bank conflicts."""


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
    margin: int
    max_rank: int


class CudaTracked:
    """`fused.Kernels` of a table. Tiles of all groups are numbered in a row; a segment's `key` is its first one."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.device = device
        self.base_bytes = sum(s.source.nbytes for s in segments)
        self.units = 0
        self._groups: list[_Group] = []
        table = pack(segments)
        wide = (table[:, RANK] > 0) & ((table[:, DTYPES] >> 16 & 0xFFFF) != (BF16 | BF16 << 8))
        group = (table[:, DTYPES] & 0xFF) << 1 | wide
        self._first: list[np.ndarray] = []
        self._names: list[str] = []
        for key in np.unique(group):
            self._names += [s.name for s, there in zip(segments, group == key, strict=True) if there]
            self._groups.append(self._group(table[group == key], int(key) >> 1, bool(key & 1)))
        self.code_bytes = self.units * TILE_ELEMENTS // 4

    def track(self, journal: Journal) -> None:
        self._launch(journal, False)

    def untrack(self, journal: Journal) -> None:
        self._launch(journal, True)

    def names(self, units: Tensor) -> set[str]:
        return {self._names[i] for i in np.searchsorted(np.concatenate(self._first), units.numpy(), side="right") - 1}

    def _launch(self, j: Journal, undo: bool) -> None:
        for group in self._groups:
            torch.ops.lora_merge_native.track_cuda(*group, undo, j.codes, j.places, j.sums, j.arena, j.counter)

    def _group(self, table: np.ndarray, dtype: int, wide: bool) -> _Group:
        max_rank = int(table[:, RANK].max())
        col_warps = _col_warps(table, max_rank, wide, self.device)
        unit_rows = _rows_per_unit(table, col_warps, self.device)
        across = _ceil(table[:, COLS], WARP_COLS * col_warps)
        units = across * _ceil(table[:, ROWS], unit_rows)
        tiles = across * _ceil(table[:, ROWS], TILE_ELEMENTS // (WARP_COLS * col_warps))
        table[:, UNIT_BEGIN], table[:, UNITS_ACROSS] = np.cumsum(units) - units, across
        table[:, KEY] = self.units + np.cumsum(tiles) - tiles
        self._first.append(table[:, KEY].copy())
        self.units += int(tiles.sum())
        on_device = len(table) > INLINE_SEGMENTS
        return _Group(
            *_place(table, units, self.device),
            torch.zeros(2 if on_device else 0, dtype=torch.int32, device=self.device if on_device else "cpu"),
            torch.cuda.current_device() if self.device.index is None else self.device.index,
            dtype,
            wide,
            int(units.sum()),
            unit_rows,
            col_warps,
            MARGIN,
            max_rank,
        )


def _col_warps(table: np.ndarray, max_rank: int, wide: bool, device: torch.device) -> int:
    """The widest strip whose part of A lets two blocks share a multiprocessor, and of which little lies outside.

    That is less than an eighth beyond the last columns. A narrow strip may take all of a block's shared memory.
    """
    properties = torch.cuda.get_device_properties(device)
    whole: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    elements = int((table[:, ROWS] * table[:, COLS]).sum())

    def fits(n: int, room: int) -> bool:
        return _ceil(max_rank, CHUNK) * CHUNK * (WARP_COLS * n + MARGIN) * 2 * (3 if wide else 1) <= room

    def covered(n: int) -> int:
        return int((table[:, ROWS] * _ceil(table[:, COLS], WARP_COLS * n)).sum()) * WARP_COLS * n

    for n in (4, 2):
        if fits(n, properties.shared_memory_per_multiprocessor // 2 - RESERVED) and covered(n) * 7 <= elements * 8:
            return n
    if fits(1, whole):
        return 1
    raise BackendUnavailable(
        f"adapters of rank {max_rank} need more shared memory than the {whole >> 10} KiB that a block has on this "
        f"{properties.name}; set LORA_MERGE_BACKEND=triton"
    )


def _rows_per_unit(table: np.ndarray, col_warps: int, device: torch.device) -> int:
    """Rows that a block walks down with one strip of A: many, but enough units for an even load."""
    strips = int((_ceil(table[:, COLS], WARP_COLS * col_warps) * _ceil(table[:, ROWS], 64)).sum())
    blocks = 3 * torch.cuda.get_device_properties(device).multi_processor_count
    return 64 * min(MAX_UNIT_ROWS // 64, max(1, strips // (16 * blocks)))
