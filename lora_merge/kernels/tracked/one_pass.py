"""Tracked merges in one pass for backends with kernels for it: the memory that they keep, and how it grows.

Each unit of work merges, finds what its way back takes, and writes its result only if the arena has room for the
escaped elements; else it stays as it was. So one launch tells how much room all of them need, and at most a second one,
into an arena of that size, merges the rest. Peak memory is what is held, and a copy of the arena while it grows.

A unit's way back begins with a checksum of what was written: bits that others have written meanwhile are no basis for
it, and such a unit stays as it is.

One plan follows another in one pass, too: each unit goes back to the base and from there to the new merge, with codes
and record in the place of the old ones and a second arena for what escapes now, as the first is being read. Places tell
which of the two arenas they are in, so at every moment each unit is known to be merged by the one plan, by the other or
by none; without room it stays the base, and the second launch is that of any merge.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..backend import Moves, Tracked, idle, in_two_passes
from ..bindings.layout import SECOND_ARENA
from ..segments import Segment

FIRST_ROOM = 64
"""The first arena is this part of the bases' bytes: enough for updates up to a tenth of the weights."""
SPARE = 16
"""Later ones hold what escaped the last time, and this part of it."""
LEFT_OVER = 512
"""All chunks together are less than this part of the weights, so smaller for small models: most of one may be left."""


class Kernels(ABC):
    """The kernels that such a backend offers for one table. Units of work of all its launches are numbered in a row.

    Attributes:
        units: how many units of work there are.
        code_bytes: of the codes of all elements.
        base_bytes: of the weights.
        chunk: bytes of the arena that those who share the work take at a time; 0: what a unit needs.
        slack: bytes that are left over in chunks at most.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.device, self.base_bytes = device, sum(s.source.nbytes for s in segments)
        self.units = self.code_bytes = self.chunk = self.slack = 0
        self._names: list[str] = []  # of each rectangle, in the order of their units
        self._first: list[np.ndarray] = []  # the numbers of their first units

    def _share(self, most: int, sharers: int) -> None:
        """Set `chunk`, to so many bytes at most, and `slack`, for so many that take room by themselves."""
        self.chunk = min(most, self.base_bytes // (LEFT_OVER * sharers)) & ~3
        self.slack = self.chunk * sharers

    @abstractmethod
    def track(self, journal: Journal) -> None:
        """Merge every unit with a negative place that finds room in the arena."""

    @abstractmethod
    def untrack(self, journal: Journal) -> None:
        """Bring back every unit that has a place in this arena and holds what was written; its place becomes -1."""

    def follows(self, before: Kernels) -> bool:
        """Return True if `retrack` serves these two tables, whose weights have to be the same."""
        return False

    def retrack(self, before: Kernels, old: Journal, journal: Journal) -> None:
        """Do `before.untrack(old)`, and `track(journal)` of the units that it brought back, in one pass. The two share
        all but the arena."""
        raise NotImplementedError

    def names(self, units: Tensor) -> set[str]:
        """Return the names of the weights that units, by number, belong to."""
        return {self._names[i] for i in np.searchsorted(np.concatenate(self._first), units.numpy(), side="right") - 1}

    def moved(self, moves: Moves) -> bool:
        """Do `Tracked.moved`; memory of a GPU stays where it is."""
        return False


@dataclass(slots=True)
class Journal:
    """What is kept to restore the weights.

    Args:
        codes: uint8, two bits an element.
        records: int64 `[units, 2]`: its place in the arena, -1 if it is not merged, and a checksum of what was written.
        arena: uint8, raw bits of escaped elements.
        counter: int64 `[3]`: bytes of the arena asked for, bytes that units without room lack, units found changed.
        chunk: of the arena, see `Kernels`.
        mark: added to places in this arena, 0 or `SECOND_ARENA`.
        other: an arena for the next plan that follows.
    """

    codes: Tensor
    records: Tensor
    arena: Tensor
    counter: Tensor
    chunk: int
    mark: int = 0
    other: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.records, self.arena, self.other) if t is not None)


class OnePassTracked:
    """See `Tracked` in this package."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.keep = False
        self._journal: Journal | None = None
        self._spare: Journal | None = None
        self._first_room = kernels.base_bytes // FIRST_ROOM

    @property
    def merged(self) -> bool:
        return self._journal is not None

    @property
    def nbytes(self) -> int:
        j = self._journal or self._spare
        return j.nbytes if j else 0

    def merge(self, meanwhile: Callable[[], object] = idle) -> None:
        kernels = self._kernels
        journal, self._spare = self._spare or self._memory(), None
        journal.chunk, journal.mark = kernels.chunk, 0
        journal.records.fill_(-1)
        journal.counter.zero_()
        self._journal = journal
        try:
            kernels.track(journal)
            self._finish(journal, meanwhile)
        except BaseException:
            self.unmerge()
            raise

    def remerge(self, before: Tracked, meanwhile: Callable[[], object] = idle) -> set[str]:
        if not isinstance(before, OnePassTracked):
            return in_two_passes(self, before, meanwhile)
        old = before._journal
        arena = None if old is None else self._second_arena(before, old)
        if old is None or arena is None:
            return self._in_two_passes(before, meanwhile)
        journal = Journal(old.codes, old.records, arena, old.counter, self._kernels.chunk, SECOND_ARENA - old.mark)
        journal.counter.zero_()
        self._journal, self._spare, old.other = journal, None, None
        try:
            self._kernels.retrack(before._kernels, old, journal)
            changed = self._finish(journal, meanwhile)
        except BaseException:
            self._give_up(before)
            raise
        if changed:
            return self._give_up(before)
        before._journal = None
        journal.other = old.arena if self.keep else None
        return set()

    def unmerge(self, meanwhile: Callable[[], object] = idle) -> set[str]:
        journal = self._journal
        if journal is None:
            return set()
        self._kernels.untrack(journal)
        meanwhile()
        changed = int(journal.counter[2])  # waits for the device
        self._journal, self._spare = None, journal if self.keep else None
        return self._kernels.names((journal.records[:, 0] >= 0).nonzero().flatten().cpu()) if changed else set()

    def _finish(self, journal: Journal, meanwhile: Callable[[], object]) -> bool:
        """Wait for a launch, and merge what found no room unless units were changed; return whether some were."""
        meanwhile()
        arena = journal.arena
        asked, lacking, changed = journal.counter.tolist()  # the one wait for the device
        used = min(asked, arena.nbytes)
        self._first_room = (used + lacking) * (SPARE + 1) // SPARE + self._kernels.slack
        if lacking and not changed:
            journal.arena = self._room(used + lacking)
            journal.arena[:used] = arena[:used]
            journal.chunk = 0  # so it is room enough
            journal.counter.copy_(torch.tensor([used, 0, 0], device="cpu"))
            self._kernels.track(journal)
        return bool(changed)

    def moved(self, moves: Moves) -> bool:
        return self._kernels.moved(moves)

    def _give_up(self, before: OnePassTracked) -> set[str]:
        """Bring the base back, whichever of the two a unit is merged by; return the names of what others wrote."""
        changed = self.unmerge() | before.unmerge()
        before._spare = None  # the two share it
        return changed

    def _in_two_passes(self, before: OnePassTracked, meanwhile: Callable[[], object]) -> set[str]:
        """Run the two plans one after the other, in one memory where that fits both."""
        changed = before.unmerge()
        spare, before._spare = before._spare, None
        sizes = self._kernels.code_bytes, self._kernels.units, self._kernels.device
        if spare is not None and (spare.codes.nbytes, len(spare.records), spare.codes.device) == sizes:
            self._spare = spare
        if not changed:
            self.merge(meanwhile)
        return changed

    def _second_arena(self, before: OnePassTracked, old: Journal) -> Tensor | None:
        """Return a second arena while a plan is merged; None where one pass cannot serve both, or memory lacks."""
        size = max(self._first_room, before._first_room) // 4 * 4
        try:
            if not self._kernels.follows(before._kernels):
                return None
            if old.other is None or old.other.nbytes < size:
                old.other = None
                old.other = self._room(size)
        except torch.OutOfMemoryError:
            return None
        return old.other

    def _memory(self) -> Journal:
        kernels = self._kernels
        # Where the arena ends, words of another memory may begin.
        codes, arena = self._room(kernels.code_bytes), self._room(self._first_room // 4 * 4)
        records = torch.empty((kernels.units, 2), dtype=torch.int64, device=kernels.device)
        return Journal(codes, records, arena, torch.empty(3, dtype=torch.int64, device=kernels.device), 0)

    def _room(self, n: int) -> Tensor:
        return torch.empty(n, dtype=torch.uint8, device=self._kernels.device)
