"""What a worker lends to a trainer of its process: places in the engine's memory, which both then hold once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakMethod

from ...stream.direct_targets import DirectTargets


class Loan:
    """A trainer's hold of weights that it shares: until it has ended, or is forgotten. It does not keep the engine
    alive.

    Args:
        owner: name of the trainer.
        overwritten: method of the worker's session that notes that something else wrote to its weights.
        returned: the one that notes that they are those that the engine started with.

    Attributes:
        ended: whether the trainer has weights of its own again.
        written: whether the trainer has written to the weights since its last push.
    """

    def __init__(self, owner: str, overwritten: Callable[[str], None], returned: Callable[[], None]) -> None:
        self.owner, self.ended, self.written = owner, False, False
        self._overwritten, self._returned = WeakMethod(overwritten), WeakMethod(returned)

    def overwritten(self, reason: str) -> None:
        """Note that the engine is dirty until the next push, before the trainer writes to its weights."""
        self.written = True
        note = self._overwritten()
        if note is not None:
            note(reason)

    def end(self, returned: bool = False) -> None:
        """Let others push again.

        Args:
            returned: whether all weights are again those that the engine started with.
        """
        note = self._returned()
        if returned and not self.ended and note is not None:
            note()
        self.ended = True


class Lent(NamedTuple):
    """What a worker lends.

    Args:
        targets: where it keeps the tensors of a table.
        loan: the trainer's, as long as it shares them.
    """

    targets: DirectTargets
    loan: Loan


LENT: dict[str, Lent] = {}
"""What the workers of this process lend, by the worker's name. Whoever takes an entry removes it."""
