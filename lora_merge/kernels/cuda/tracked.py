"""Tracked merges by the compiled CUDA kernels: a launch for each dtype, kind of adapter and kernel
(`csrc/cuda/sm80/tracked.cu`, and `sm90/tracked.cu` for what `TrackedHopper` serves)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..bindings import operators
from ..bindings.layout import (
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
from ..segments import COLS, KEY, PITCH, RANK, ROW_SCALE, ROWS, Segment, same_weights
from ..streams import Streams
from ..tracked.one_pass import Journal, Kernels
from .hopper import Hopper, Tiles
from .kernel import Launch, Units, Work, arguments, assign, tensors
from .merge import Portable
from .merge import before as launches_before
from .repack import repack
from .table import BlockShape, ceil, index_of, planes

ARENA_CHUNK = 1024
"""Bytes of the arena that a warp takes at a time: an answer from memory for some forty units."""


class TrackedPortable(Portable):
    """The kernel for any GPU, tracked."""

    operator = operators.track_cuda
    warps = WARPS
    """Of a block, that take room in the arena."""

    def kinds(self, table: np.ndarray) -> Sequence[np.ndarray]:
        dtype, _, adapters = super().kinds(table)
        return dtype, adapters

    def tile(self, shape: BlockShape) -> tuple[int, int]:
        """Return the rows and columns whose units of the journal follow each other: one of each warp."""
        return UNIT_ELEMENTS // WARP_COLS * (WARPS // shape.col_warps), WARP_COLS * shape.col_warps

    def units(self, work: Work, shape: BlockShape) -> Units:
        return super().units(work, shape)._replace(rows=self.tile(shape)[0])


class TrackedHopper(Hopper):
    """The kernel for compute capability 9, tracked."""

    operator = operators.track_hopper
    warps = 12
    """That multiply at most."""
    extra_box = TILE_ROWS * BOX_COLS // UNIT_ELEMENTS * (RECORD_BYTES + CODE_BYTES)
    """The records and codes of its four units."""
    ahead = True

    def units(self, work: Work, shape: Tiles) -> Units:
        """Cut as for merges, but into more rows where one warp splits lora_A into parts. As measured."""
        units = super().units(work, shape)
        return units._replace(most=512) if planes(work.kind[-1]) == 3 else units

    def tile(self, shape: Tiles) -> tuple[int, int]:
        return TILE_ROWS, BOX_COLS

    def are_large(self, work: Work) -> bool:
        return False


TRACKED: Sequence[TrackedPortable | TrackedHopper] = (TrackedPortable(), TrackedHopper())


class _Part(NamedTuple):
    """A launch, and what it was made of."""

    kernel: Any
    work: Work
    shape: Any
    launch: Launch


class _After(NamedTuple):
    """Launches that take the place of what another table merged."""

    before: Callable[[], CudaTracked | None]
    launches: list[Launch] | None
    streams: Streams


class CudaTracked(Kernels):
    """See `Kernels`. A segment's `key` is its first tile, or box."""

    def __init__(self, segments: Sequence[Segment], table: np.ndarray, device: torch.device) -> None:
        super().__init__(segments, device)
        self._parts: list[_Part] = []
        made = repack(table, device, TRACKED)
        self._before = launches_before(made, device, 2 * len(table))
        warps = 0
        for kernel, work in assign(made.table, TRACKED, device):
            shape: Any = kernel.shape(work)
            rows, cols = kernel.tile(shape)
            self._number(work.merges, rows, cols)
            self._names += [segments[i].name for i in work.numbers.tolist()]
            launch = kernel.launch(work, shape)
            self._parts.append(_Part(kernel, work, shape, launch))
            warps += kernel.warps * min(kernel.blocks * work.processors, arguments(launch)["n_units"])
        self._launches = [part.launch for part in self._parts]
        self.code_bytes = self.units * CODE_BYTES
        self._share(ARENA_CHUNK, warps)
        self._streams = Streams(device, [made.memory, *tensors([*self._before, *self._launches])])
        self._after = _After(lambda: None, None, self._streams)

    def track(self, journal: Journal) -> None:
        self._lay_adapters()
        self._run(self._launches, TRACK_MERGE, journal, journal.arena)

    def untrack(self, journal: Journal) -> None:  # adapters lie where they were laid for what was merged
        self._run(self._launches, TRACK_UNMERGE, journal, journal.arena)

    def follows(self, before: Kernels) -> bool:
        return isinstance(before, CudaTracked) and self._launches_after(before) is not None

    def retrack(self, before: Kernels, old: Journal, journal: Journal) -> None:
        assert isinstance(before, CudaTracked)
        launches = self._launches_after(before)
        assert launches is not None
        before._streams.join()  # its adapters are read
        self._after.streams.join()
        self._lay_adapters()
        self._run(launches, TRACK_REMERGE, journal, old.arena)

    def _lay_adapters(self) -> None:
        self._streams.join()
        for launch in self._before:
            launch(False, 0)

    def _run(self, launches: Sequence[Launch], way: int, j: Journal, before: Tensor) -> None:
        self._streams.join()
        index = index_of(self.device)
        memory = operators.journal_cuda(index, j.codes, j.records, j.arena, j.mark, j.counter, j.chunk, before)
        for launch in launches:
            launch(way, *memory)

    def _launches_after(self, before: CudaTracked) -> list[Launch] | None:
        """Return launches that take the place of what `before` merged, made once for it; None where weights, ranks,
        dtypes or numbers of units differ, or both adapters have no room in shared memory."""
        if self._after.before() is not before:
            launches = self._made_after(before)
            self._after = _After(weakref.ref(before), launches, Streams(self.device, tensors(launches or [])))
        return self._after.launches

    def _made_after(self, before: CudaTracked) -> list[Launch] | None:
        if [(p.kernel, p.work.kind) for p in self._parts] != [(p.kernel, p.work.kind) for p in before._parts]:
            return None
        launches: list[Launch] = []
        for part, old in zip(self._parts, (p.work.merges for p in before._parts), strict=True):
            kernel, work = part.kernel, part.work
            if not same_weights(work.merges, old) or not _alike(work.merges, old):
                return None
            both = 2 * ceil(work.max_rank, CHUNK) * CHUNK  # one adapter's chunks behind the other's
            work = work._replace(max_rank=both, behind=old)
            shape = kernel.shape(work, part.shape)
            if shape is None:
                return None
            launches.append(kernel.launch(work, shape))
        return launches

    def _number(self, table: np.ndarray, rows: int, cols: int) -> None:
        """Number tiles of `rows` x `cols`, along the columns first; groups begin at whole tiles of either kernel."""
        tiles, each = ceil(table[:, COLS], cols) * ceil(table[:, ROWS], rows), rows * cols // UNIT_ELEMENTS
        table[:, KEY] = self.units // each + np.cumsum(tiles) - tiles
        self._first.append(table[:, KEY] * each)
        self.units += ceil(int(tiles.sum()) * each, WARPS) * WARPS


def _alike(table: np.ndarray, old: np.ndarray) -> bool:
    """Return True if a launch can have both adapters: ranks, orders of sums and numbers of units are equal, and both
    have factors of rows or none has."""
    words = [RANK, PITCH, PITCH + 1, KEY]
    scaled = (table[:, ROW_SCALE] != 0) == (old[:, ROW_SCALE] != 0)
    return bool((table[:, words] == old[:, words]).all() and scaled.all())
