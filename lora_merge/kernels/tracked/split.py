"""A tracked merge in parts, where no one backend runs all of its segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from ..backend import Moves, Tracked, idle, in_two_passes


class SplitTracked:
    """See `Tracked` in this package."""

    def __init__(self, parts: Sequence[Tracked]) -> None:
        self._parts = parts
        self._changed: set[str] = set()

    @property
    def merged(self) -> bool:
        return any(part.merged for part in self._parts)

    @property
    def keep(self) -> bool:
        return any(part.keep for part in self._parts)

    @keep.setter
    def keep(self, keep: bool) -> None:
        for part in self._parts:
            part.keep = keep

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def merge(self, meanwhile: Callable[[], object] = idle) -> None:
        with ExitStack() as back:
            for part in self._parts:
                part.merge(meanwhile if part is self._parts[-1] else idle)
                back.callback(part.unmerge, idle)  # where a later one fails
            back.pop_all()

    def remerge(self, before: Tracked, meanwhile: Callable[[], object] = idle) -> set[str]:
        return in_two_passes(self, before, meanwhile)

    def unmerge(self, meanwhile: Callable[[], object] = idle) -> set[str]:
        for part in self._parts:
            if part.merged:
                self._changed |= part.unmerge(meanwhile)
                meanwhile = idle
        changed, self._changed = self._changed, set()
        return changed

    def moved(self, moves: Moves) -> bool:
        return all(part.moved(moves) for part in self._parts)
