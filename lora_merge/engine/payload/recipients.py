"""Which worker takes what of an update: where the workers of an engine hold different parts of a model (experts, stages
of a pipeline), each gets the adapters of what it holds.

What a worker takes is known from its dry run of the base. Adapters are cut accordingly: a delta of one matrix goes to
whoever takes one of its tensors, one of many experts goes in runs of experts that the same workers take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ...models.delta import Delta
from ...stream.window import Window
from ..transport.routing import WorkerId


class Recipients:
    """Tells which workers take which tensors of a base.

    Args:
        found: of each worker, the digest of what its dry run showed.
        ignored: by digest, names of the tensors that such a worker takes nothing of.
    """

    def __init__(self, found: Mapping[WorkerId, str], ignored: Mapping[str, Sequence[str]]) -> None:
        self._found, self._ignored = dict(found), ignored
        self._by_name: dict[str, frozenset[str]] | None = None
        self.key = tuple(sorted(self._found.items()))
        """Equal for two `Recipients` in which the same workers take the same tensors."""

    def of(self, names: Iterable[str]) -> frozenset[WorkerId]:
        """Return the workers that take something of these tensors."""
        if self._by_name is None:
            self._by_name = {}
            for digest in frozenset(self._found.values()):
                for name in self._ignored[digest]:
                    self._by_name[name] = self._by_name.get(name, frozenset()) | {digest}
        by_name = self._by_name
        without = [by_name.get(name, frozenset()) for name in names]
        nobody = frozenset.intersection(*without) if without else frozenset(self._found.values())
        return frozenset(place for place, digest in self._found.items() if digest not in nobody)

    @property
    def all(self) -> frozenset[WorkerId]:
        return frozenset(self._found)


class Share(NamedTuple):
    """A part of a delta that goes to one set of workers.

    Args:
        number: of the delta.
        first, many: its experts; 0 and 1 for one matrix.
        recipients: who takes it; None for everybody.
    """

    number: int
    first: int
    many: int
    recipients: frozenset[WorkerId] | None


def shares_of(
    deltas: Sequence[Delta], tensors: Iterable[tuple[str, int, Window]], recipients: Recipients | None
) -> list[Share]:
    """Cut the deltas into shares, in order.

    Args:
        tensors: that a product is added to: name, number of the delta, and the window in its parameter.
        recipients: None where everybody takes everything.
    """
    if recipients is None:
        return [Share(number, 0, delta.experts or 1, None) for number, delta in enumerate(deltas)]
    names: list[list[list[str]]] = [[[] for _ in range(delta.experts or 1)] for delta in deltas]
    for name, number, window in tensors:
        within = slice(window.start[0], window.start[0] + window.size[0]) if deltas[number].experts else slice(None)
        for some in names[number][within]:
            some.append(name)
    shares: list[Share] = []
    known: dict[tuple[str, ...], frozenset[WorkerId] | None] = {}
    for number, experts in enumerate(names):
        for expert, some in enumerate(experts):
            key = tuple(some)
            if key not in known:
                found = recipients.of(some)
                known[key] = None if found == recipients.all else found
            last = shares[-1] if shares and shares[-1].number == number else None
            if last is not None and last.recipients == known[key]:
                shares[-1] = last._replace(many=last.many + 1)
            else:
                shares.append(Share(number, expert, 1, known[key]))
    return shares
