"""Tracked merges by Triton (`tracked_kernels.py`): a launch each way for each combination of dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from ..segments import DTYPES, FLOATS, KEY, UNIT_BEGIN, Segment, name_key, pack
from ..tracked.composed import keeping_denormals
from ..tracked.one_pass import Journal, Kernels
from .table import TRACKED, Variant, groups, streams_of, tracked_variant

ARENA_CHUNK = 16384
"""Bytes of the arena that a program takes at a time: an answer from memory for some 160 tiles with updates a tenth of
the weights."""


class _Group(NamedTuple):
    """One launch: the variant, the number of its first tile in the journal, and the integer of a weight's size."""

    variant: Variant
    first: int
    word: torch.dtype

    def __call__(self, kernel: Any, j: Journal) -> None:
        table, unit_segment, options, grid = self.variant
        codes, arena = j.codes.view(torch.int32), j.arena.view(self.word)
        numbers = len(unit_segment), self.first, j.arena.nbytes, j.chunk
        with torch.cuda.device_of(table):
            kernel[grid](table, unit_segment, codes, j.records, arena, j.counter, *numbers, **options)


class TritonTracked(Kernels):
    """See `Kernels`. One follows another in two passes."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        super().__init__(segments, device)
        self._groups: list[_Group] = []
        name_of = {name_key(s.name): s.name for s in segments}
        programs = 0
        for table, constants in groups(pack(segments)):
            self._groups.append(self._group(table, constants))
            self._first.append(self.units + table[:, UNIT_BEGIN])
            self._names += [name_of[key] for key in table[:, KEY].tolist()]
            self.units += len(self._groups[-1].variant.unit_segment)
            programs += self._groups[-1].variant.grid[0]
        self.code_bytes = self.units * TRACKED.rows * TRACKED.cols // 4  # two bits an element
        self._share(ARENA_CHUNK, programs)
        self._streams = streams_of([group.variant for group in self._groups], device)

    def track(self, journal: Journal) -> None:
        from .tracked_kernels import track

        self._run(track, journal)

    def untrack(self, journal: Journal) -> None:
        from .tracked_kernels import untrack

        self._run(untrack, journal)

    def _run(self, kernel: Any, journal: Journal) -> None:
        self._streams.join()
        # In the interpreter this thread computes, and may be set to flush them on one way and not on the other.
        with keeping_denormals() if self.device.type == "cpu" else nullcontext():
            for group in self._groups:
                group(kernel, journal)

    def _group(self, table: np.ndarray, constants: dict[str, Any]) -> _Group:
        import triton.language as tl

        of_two_bytes = FLOATS[int(table[0, DTYPES]) & 0xFF].itemsize == 2
        constants = {name: value for name, value in constants.items() if name != "DESTINATION_T"}
        constants["WORD_T"] = tl.int16 if of_two_bytes else tl.int32
        word = torch.int16 if of_two_bytes else torch.int32
        return _Group(tracked_variant(table, constants, self.device), self.units, word)
