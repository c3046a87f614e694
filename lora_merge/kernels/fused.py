"""A tracked merge in one pass: the arena of a backend with kernels for it, and its growth.

Each unit of work merges, finds what its way back takes, and writes its result only if the arena has room for the
escaped elements; else it stays as it was. So one launch tells how much room all of them need, and at most a second one,
into an arena of that size, merges the rest. Peak memory is what is held, and a copy of the arena while it grows.

A unit's way back begins with a checksum of what was written: bits that others have written meanwhile are no basis for
it, and such a unit stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from . import idle

FIRST_ROOM = 64
"""The first arena is this part of the bases' bytes: enough for updates up to a tenth of the weights."""
SPARE = 16
"""Later ones hold what escaped the last time, and this part of it."""


class Kernels(Protocol):
    """What such a backend offers for one table.

    Attributes:
        units: how many units of work there are.
        code_bytes: of the codes of all elements.
        base_bytes: of the weights.
        chunk: bytes of the arena that those who share the work take at a time; 0: what a unit needs.
        slack: bytes that are left over in chunks at most.
    """

    units: int
    code_bytes: int
    base_bytes: int
    chunk: int
    slack: int
    device: torch.device

    def track(self, journal: Journal) -> None:
        """Merge every unit with a negative place that finds room in the arena."""

    def untrack(self, journal: Journal) -> None:
        """Bring back every unit that has a place and holds what was written, and make its place negative."""

    def names(self, units: Tensor) -> set[str]:
        """The weights that units, by number, belong to."""


@dataclass(slots=True)
class Journal:
    """What brings the weights back.

    Args:
        codes: uint8, two bits an element.
        records: int64 `[units, 2]`: its place in the arena, -1 if it is not merged, and a checksum of what was written.
        arena: uint8, raw bits of escaped elements.
        counter: int64 `[3]`: bytes of the arena asked for, bytes that units without room lack, units found changed.
        chunk: of the arena, see `Kernels`.
    """

    codes: Tensor
    records: Tensor
    arena: Tensor
    counter: Tensor
    chunk: int


class Fused:
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
        return j.codes.nbytes + j.records.nbytes + j.arena.nbytes if j else 0

    def merge(self, meanwhile: Callable[[], object] = idle) -> None:
        kernels = self._kernels

        def room(n: int) -> Tensor:
            return torch.empty(n, dtype=torch.uint8, device=kernels.device)

        journal, self._spare = self._spare, None
        if journal is None:
            codes, arena = room(kernels.code_bytes), room(self._first_room // 4 * 4)  # where it ends, words go on
            records = torch.empty((kernels.units, 2), dtype=torch.int64, device=kernels.device)
            journal = Journal(codes, records, arena, torch.empty(3, dtype=torch.int64, device=kernels.device), 0)
        arena, counter, journal.chunk = journal.arena, journal.counter, kernels.chunk
        journal.records.fill_(-1)
        counter.zero_()
        self._journal = journal
        try:
            kernels.track(journal)
            meanwhile()
            asked, lacking, _ = counter.tolist()  # the one wait for the device
            used = min(asked, arena.nbytes)
            self._first_room = (used + lacking) * (SPARE + 1) // SPARE + kernels.slack
            if lacking:
                journal.arena = room(used + lacking)
                journal.arena[:used] = arena[:used]
                journal.chunk = 0  # so it is room enough
                counter.copy_(torch.tensor([used, 0, 0]))
                kernels.track(journal)
        except BaseException:
            self.unmerge()
            raise

    def unmerge(self, meanwhile: Callable[[], object] = idle) -> set[str]:
        journal = self._journal
        if journal is None:
            return set()
        self._kernels.untrack(journal)
        meanwhile()
        changed = int(journal.counter[2])  # waits for the device
        self._journal, self._spare = None, journal if self.keep else None
        return self._kernels.names((journal.records[:, 0] >= 0).nonzero().flatten().cpu()) if changed else set()
