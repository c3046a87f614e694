"""Tracked merges by the compiled CUDA kernels: a launch for each dtype, kind of adapter and kernel
(`csrc/cuda/tracked.cu`, and `hopper_tracked.cu` for what `cuda_hopper.serves`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import cuda_hopper as hopper
from . import operators
from .cuda_launch import variants
from .cuda_repack import repack
from .cuda_table import BLOCKS, MAX_UNIT_ROWS, block_shape, ceil, cut, products
from .fused import Journal
from .layout import BOX_COLS, CODE_BYTES, RECORD_BYTES, TILE_ROWS, UNIT_ELEMENTS, WARP_COLS, WARPS
from .segments import COLS, DTYPES, FLOATS, FP32, KEY, RANK, ROWS, Segment, pack
from .streams import Streams

HOPPER_WARPS = 12
"""That multiply at most, of a block of the kernel for compute capability 9."""
BESIDE = TILE_ROWS * BOX_COLS // UNIT_ELEMENTS * (RECORD_BYTES + CODE_BYTES)
"""Of a box of that kernel: bytes of the records and codes of its four units."""

ARENA_CHUNK = 1024
"""Bytes of the arena that a warp takes at a time: an answer from memory for some forty units."""
LEFT_OVER = 512
"""All chunks together are less than this part of the weights, so smaller for small models: most of one may be left."""


class _Group(NamedTuple):
    """One launch of the kernel for any GPU: the arguments of `track_cuda` that stay the same from run to run."""

    table: Tensor
    unit_segment: Tensor
    counter: Tensor
    device: int
    dtype: int
    adapters: int
    n_units: int
    rows_per_unit: int
    col_warps: int
    stages: int
    staged_B: bool
    pad: int
    max_rank: int

    def __call__(self, undo: bool, j: Journal) -> None:
        operators.track_cuda(*self, undo, j.codes, j.records, j.arena, j.chunk, j.counter)


class _HopperGroup(NamedTuple):
    """The same of `track_hopper`."""

    table: Tensor
    unit_segment: Tensor
    maps: Tensor
    counter: Tensor
    device: int
    dtype: int
    adapters: int
    n_units: int
    rows_per_unit: int
    strip_cols: int
    held: int
    stages: int
    max_rank: int

    def __call__(self, undo: bool, j: Journal) -> None:
        operators.track_hopper(*self, undo, j.codes, j.records, j.arena, j.chunk, j.counter)


class CudaTracked:
    """`fused.Kernels` of a table. Units of all groups are numbered in a row; a segment's `key` is its first tile, or
    box."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.device = device
        self.base_bytes = sum(s.source.nbytes for s in segments)
        self.units = 0
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._first: list[np.ndarray] = []
        self._names: list[str] = []
        made = repack(pack(segments), device, BESIDE)
        self._before = variants(made.copies, device)
        table = made.table
        kinds = np.stack([hopper.serves(table, device, BESIDE), table[:, DTYPES] & 0xFF, products(table)], axis=1)
        self._groups: list[_Group | _HopperGroup] = []
        warps = 0
        for served, dtype, adapters in np.unique(kinds, axis=0).tolist():
            here = (kinds == (served, dtype, adapters)).all(axis=1)
            self._names += [s.name for s, there in zip(segments, here, strict=True) if there]
            make, blocks, of_block = (self._hopper, 1, HOPPER_WARPS) if served else (self._any, BLOCKS, WARPS)
            self._groups.append(make(table[here], dtype, adapters))
            warps += of_block * min(blocks * self._processors, self._groups[-1].n_units)
        self.code_bytes = self.units * CODE_BYTES
        self.chunk = min(ARENA_CHUNK, self.base_bytes // (LEFT_OVER * warps)) & ~3
        self.slack = self.chunk * warps
        own = [t for launch in (*self._before, *self._groups) for t in launch if isinstance(t, Tensor)]
        self._streams = Streams(device, [made.memory, *own])

    def track(self, journal: Journal) -> None:
        self._run(False, journal)

    def untrack(self, journal: Journal) -> None:
        self._run(True, journal)

    def _run(self, undo: bool, journal: Journal) -> None:
        self._streams.join()
        for copy in self._before:
            copy(False, 0)
        for launch in self._groups:
            launch(undo, journal)

    def names(self, units: Tensor) -> set[str]:
        return {self._names[i] for i in np.searchsorted(np.concatenate(self._first), units.numpy(), side="right") - 1}

    def _number(self, table: np.ndarray, rows: int, cols: int) -> None:
        """Tiles of `rows` x `cols` go along the columns first; groups begin at whole tiles of either kernel."""
        tiles, each = ceil(table[:, COLS], cols) * ceil(table[:, ROWS], rows), rows * cols // UNIT_ELEMENTS
        table[:, KEY] = self.units // each + np.cumsum(tiles) - tiles
        self._first.append(table[:, KEY] * each)
        self.units += ceil(int(tiles.sum()) * each, WARPS) * WARPS

    def _any(self, table: np.ndarray, dtype: int, adapters: int) -> _Group:
        max_rank, wide = int(table[:, RANK].max()), adapters == FP32
        shape = block_shape(max_rank, wide, FLOATS[dtype].itemsize, table, self.device)
        strip, rows = WARP_COLS * shape.col_warps, UNIT_ELEMENTS // WARP_COLS * (WARPS // shape.col_warps)
        self._number(table, rows, strip)
        made = cut(table, table[:0], strip, MAX_UNIT_ROWS, BLOCKS * self._processors, self.device, rows)
        return _Group(
            made.table, made.unit_segment, made.counter, made.device, dtype, adapters, made.n_units,
            made.rows_per_unit, *shape, max_rank,
        )  # fmt: skip

    def _hopper(self, table: np.ndarray, dtype: int, adapters: int) -> _HopperGroup:
        max_rank, wide = int(table[:, RANK].max()), adapters == FP32
        tiles = hopper.tiles(max_rank, wide, self.device, BESIDE)
        self._number(table, TILE_ROWS, BOX_COLS)
        most = hopper.unit_rows(max_rank, wide, large=False)
        made = cut(table, table[:0], tiles.strip_cols, most, self._processors, self.device)
        maps = hopper.maps(made.host_table, wide, made.table.device)
        return _HopperGroup(
            made.table, made.unit_segment, maps, made.counter, made.device, dtype, adapters, made.n_units,
            made.rows_per_unit, *tiles, max_rank,
        )  # fmt: skip
