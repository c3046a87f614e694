"""A tracked merge in one pass: the arena of a compiled backend, and its growth.

Each unit of work merges, finds what its way back takes, and writes its result only if the arena has room for the
escaped elements; else it stays as it was. So one launch tells how much room all of them need, and at most a second one,
into an arena of that size, merges the rest. Peak memory is what is held, and a copy of the arena while it grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

FIRST_ROOM = 64
"""The first arena is this part of the bases' bytes: enough for updates up to a tenth of the weights."""


class Kernels(Protocol):
    """What a compiled backend offers for one table.

    Attributes:
        units: how many units of work there are.
        code_bytes: of the codes of all elements.
        base_bytes: of the weights.
    """

    units: int
    code_bytes: int
    base_bytes: int
    device: torch.device

    def track(self, journal: Journal) -> None:
        """Merge every unit with a negative place that finds room in the arena; see `Journal` in csrc/cpu/launch.h."""

    def untrack(self, journal: Journal) -> None:
        """Bring back every unit that has a place, and make its place negative."""


@dataclass(slots=True)
class Journal:
    """What brings the weights back: uint8 `codes` and `arena`, int64 `places` `[units]` and `counter` `[2]`: bytes of
    the arena asked for, and those of them that it had no room for."""

    codes: Tensor
    places: Tensor
    arena: Tensor
    counter: Tensor


class Fused:
    """See `Tracked` in this package."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._journal: Journal | None = None

    @property
    def merged(self) -> bool:
        return self._journal is not None

    @property
    def nbytes(self) -> int:
        j = self._journal
        return j.codes.nbytes + j.places.nbytes + j.arena.nbytes if j else 0

    def merge(self) -> None:
        kernels = self._kernels

        def room(n: int) -> Tensor:
            return torch.empty(n, dtype=torch.uint8, device=kernels.device)

        codes, arena = room(kernels.code_bytes), room(kernels.base_bytes // FIRST_ROOM)
        places = torch.full((kernels.units,), -1, dtype=torch.int64, device=kernels.device)
        journal = Journal(codes, places, arena, torch.zeros(2, dtype=torch.int64, device=kernels.device))
        self._journal = journal
        try:
            kernels.track(journal)
            asked, refused = journal.counter.tolist()  # the one wait for the device
            if refused:
                used = asked - refused  # units with room lie before those without
                journal.arena = room(asked)
                journal.arena[:used] = arena[:used]
                journal.counter.copy_(torch.tensor([used, 0]))
                kernels.track(journal)
        except BaseException:
            self.unmerge()
            raise

    def unmerge(self) -> None:
        if self._journal is not None:
            self._kernels.untrack(self._journal)
            self._journal = None
