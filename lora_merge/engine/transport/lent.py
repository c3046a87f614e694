"""What a worker lends to a trainer of its process: places in the engine's memory, which both then hold once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...stream.direct_targets import DirectTargets


class Lent(NamedTuple):
    """What a worker lends.

    Args:
        targets: where it keeps the tensors of a table.
        overwritten: called with a reason before the trainer writes to them: the engine is dirty until the next push.
    """

    targets: DirectTargets
    overwritten: Callable[[str], None]


LENT: dict[str, Lent] = {}
"""Of this process, by the worker's name; whoever takes it takes it out."""
