"""Tracked merges by the compiled CUDA kernels: a launch for each dtype, kind of adapter and kernel
(`csrc/cuda/tracked.cu`, and `hopper_tracked.cu` for what `cuda_hopper.serves`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import Moves, operators
from . import cuda_hopper as hopper
from .cuda_hopper import Tiles
from .cuda_launch import before as launches_before
from .cuda_repack import repack
from .cuda_table import BLOCKS, MAX_UNIT_ROWS, BlockShape, block_shape, ceil, cut, products, shape_as_wide
from .fused import Journal, Kernels
from .layout import (
    BOX_COLS,
    CHUNK,
    CODE_BYTES,
    RECORD_BYTES,
    TILE_ROWS,
    TRACK_MERGE,
    TRACK_REMERGE,
    TRACK_UNMERGE,
    UNIT_ELEMENTS,
    WARP_COLS,
    WARPS,
)
from .segments import COLS, DTYPES, FLOATS, KEY, PITCH, RANK, ROW_SCALE, ROWS, Segment, pack, same_weights
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

    def __call__(self, way: int, j: Journal, before: Tensor) -> None:
        operators.track_cuda(*self, way, j.codes, j.records, j.arena, j.mark, j.counter, j.chunk, before)


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

    def __call__(self, way: int, j: Journal, before: Tensor) -> None:
        operators.track_hopper(*self, way, j.codes, j.records, j.arena, j.mark, j.counter, j.chunk, before)


class _Kind(NamedTuple):
    """What segments of one launch have in common: which kernel runs them, dtype codes of their weights and products."""

    hopper: bool
    dtype: int
    adapters: int


class _After(NamedTuple):
    """Launches that take the place of what another table merged."""

    before: Callable[[], CudaTracked | None]
    groups: list[_Group | _HopperGroup] | None
    streams: Streams


class CudaTracked:
    """`fused.Kernels` of a table. Units of all groups are numbered in a row; a segment's `key` is its first tile, or
    box."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.device = device
        self.base_bytes = sum(s.source.nbytes for s in segments)
        self.units = 0
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._kinds: list[_Kind] = []
        self._tables: list[np.ndarray] = []
        self._first: list[np.ndarray] = []
        self._names: list[str] = []
        made = repack(pack(segments), device, BESIDE)
        table = made.table
        self._before = launches_before(made, device, 2 * len(table))
        kinds = np.stack([hopper.serves(table, device, BESIDE), table[:, DTYPES] & 0xFF, products(table)], axis=1)
        self._groups: list[_Group | _HopperGroup] = []
        warps = 0
        for numbers in np.unique(kinds, axis=0).tolist():
            kind, here = _Kind(*numbers), (kinds == numbers).all(axis=1)
            self._kinds.append(kind)
            self._tables.append(table[here])
            self._names += [s.name for s, there in zip(segments, here, strict=True) if there]
            make, blocks, of_block = (self._hopper, 1, HOPPER_WARPS) if kind.hopper else (self._any, BLOCKS, WARPS)
            self._groups.append(make(self._tables[-1], kind))
            warps += of_block * min(blocks * self._processors, self._groups[-1].n_units)
        self.code_bytes = self.units * CODE_BYTES
        self.chunk = min(ARENA_CHUNK, self.base_bytes // (LEFT_OVER * warps)) & ~3
        self.slack = self.chunk * warps
        own = [t for launch in (*self._before, *self._groups) for t in launch if isinstance(t, Tensor)]
        self._streams = Streams(device, [made.memory, *own])
        self._after = _After(lambda: None, None, self._streams)

    def track(self, journal: Journal) -> None:
        self._lay_adapters()
        self._run(self._groups, TRACK_MERGE, journal, journal.arena)

    def untrack(self, journal: Journal) -> None:  # adapters lie where they were laid for what was merged
        self._run(self._groups, TRACK_UNMERGE, journal, journal.arena)

    def follows(self, before: Kernels) -> bool:
        return isinstance(before, CudaTracked) and self._groups_after(before) is not None

    def retrack(self, before: Kernels, old: Journal, journal: Journal) -> None:
        assert isinstance(before, CudaTracked)
        groups = self._groups_after(before)
        assert groups is not None
        before._streams.join()  # its adapters are read
        self._after.streams.join()
        self._lay_adapters()
        self._run(groups, TRACK_REMERGE, journal, old.arena)

    def _lay_adapters(self) -> None:
        self._streams.join()
        for launch in self._before:
            launch(False, 0)

    def _run(self, groups: Sequence[_Group | _HopperGroup], way: int, journal: Journal, before: Tensor) -> None:
        self._streams.join()
        for launch in groups:
            launch(way, journal, before)

    def _groups_after(self, before: CudaTracked) -> list[_Group | _HopperGroup] | None:
        """Launches that take the place of what `before` merged, made once for it; None where they would not fit: other
        weights, ranks or dtypes, another numbering of units, or no room for both adapters in shared memory."""
        if self._after.before() is not before:
            groups = self._made_after(before)
            own = [t for launch in groups or () for t in launch if isinstance(t, Tensor)]
            self._after = _After(weakref.ref(before), groups, Streams(self.device, own))
        return self._after.groups

    def _made_after(self, before: CudaTracked) -> list[_Group | _HopperGroup] | None:
        if self._kinds != before._kinds or len(self._groups) != len(before._groups):
            return None
        groups: list[_Group | _HopperGroup] = []
        for kind, group, table, old in zip(self._kinds, self._groups, self._tables, before._tables, strict=True):
            if not same_weights(table, old) or not _alike(table, old):
                return None
            max_rank = 2 * ceil(int(table[:, RANK].max()), CHUNK) * CHUNK  # one adapter's chunks behind the other's
            if isinstance(group, _HopperGroup):
                tiles = hopper.room_for(max_rank, kind.adapters, self.device, BESIDE)
                if tiles is None:
                    return None
                groups.append(self._hopper_launch(table, kind, max_rank, tiles, old))
            else:
                size = FLOATS[kind.dtype].itemsize
                shape = shape_as_wide(group.col_warps, max_rank, kind.adapters, size, self.device)
                if shape is None:
                    return None
                groups.append(self._any_launch(table, kind, max_rank, shape, old))
        return groups

    def moved(self, moves: Moves) -> bool:
        return False  # memory of a GPU stays where it is

    def names(self, units: Tensor) -> set[str]:
        return {self._names[i] for i in np.searchsorted(np.concatenate(self._first), units.numpy(), side="right") - 1}

    def _number(self, table: np.ndarray, rows: int, cols: int) -> None:
        """Tiles of `rows` x `cols` go along the columns first; groups begin at whole tiles of either kernel."""
        tiles, each = ceil(table[:, COLS], cols) * ceil(table[:, ROWS], rows), rows * cols // UNIT_ELEMENTS
        table[:, KEY] = self.units // each + np.cumsum(tiles) - tiles
        self._first.append(table[:, KEY] * each)
        self.units += ceil(int(tiles.sum()) * each, WARPS) * WARPS

    def _any(self, table: np.ndarray, kind: _Kind) -> _Group:
        max_rank = int(table[:, RANK].max())
        shape = block_shape(max_rank, kind.adapters, FLOATS[kind.dtype].itemsize, table, self.device)
        self._number(table, _tile_rows(shape), WARP_COLS * shape.col_warps)
        return self._any_launch(table, kind, max_rank, shape)

    def _any_launch(
        self, table: np.ndarray, kind: _Kind, max_rank: int, shape: BlockShape, old: np.ndarray | None = None
    ) -> _Group:
        strip, blocks = WARP_COLS * shape.col_warps, BLOCKS * self._processors
        made = cut(table, table[:0], strip, MAX_UNIT_ROWS, blocks, self.device, _tile_rows(shape), old)
        return _Group(
            made.table, made.unit_segment, made.counter, made.device, kind.dtype, kind.adapters, made.n_units,
            made.rows_per_unit, *shape, max_rank,
        )  # fmt: skip

    def _hopper(self, table: np.ndarray, kind: _Kind) -> _HopperGroup:
        max_rank = int(table[:, RANK].max())
        self._number(table, TILE_ROWS, BOX_COLS)
        return self._hopper_launch(table, kind, max_rank, hopper.tiles(max_rank, kind.adapters, self.device, BESIDE))

    def _hopper_launch(
        self, table: np.ndarray, kind: _Kind, max_rank: int, tiles: Tiles, old: np.ndarray | None = None
    ) -> _HopperGroup:
        most = hopper.unit_rows(max_rank, kind.adapters, large=False)
        made = cut(table, table[:0], tiles.strip_cols, most, self._processors, self.device, behind=old)
        maps = hopper.maps(made.host_table, kind.adapters, made.table.device)
        return _HopperGroup(
            made.table, made.unit_segment, maps, made.counter, made.device, kind.dtype, kind.adapters, made.n_units,
            made.rows_per_unit, *tiles, max_rank,
        )  # fmt: skip


def _tile_rows(shape: BlockShape) -> int:
    """Rows of a tile of the kernel for any GPU: a unit of the journal of each warp."""
    return UNIT_ELEMENTS // WARP_COLS * (WARPS // shape.col_warps)


def _alike(table: np.ndarray, old: np.ndarray) -> bool:
    """Whether a launch can have both adapters: of one rank and order of the sums, both with factors of rows or without;
    units have one number."""
    words = [RANK, PITCH, PITCH + 1, KEY]
    scaled = (table[:, ROW_SCALE] != 0) == (old[:, ROW_SCALE] != 0)
    return bool((table[:, words] == old[:, words]).all() and scaled.all())
