"""Part: one tensor of what a live model streams."""

from __future__ import annotations

from dataclasses import dataclass

from ..shards import Shard
from .delta import Delta


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A parameter or persistent buffer: what this rank holds of it, and what the active adapters add to it.

    Args:
        name: HF module name.
        shard: live.
        delta: None where adapters add nothing.
        trained: a parameter, not a buffer.
        tied: name of the part that is the same tensor with the same adapters, and that checkpoints hold instead of this
            one; "" where there is none.
    """

    name: str
    shard: Shard
    delta: Delta | None
    trained: bool
    tied: str = ""
