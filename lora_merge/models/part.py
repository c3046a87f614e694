"""Part: one tensor of what a live model streams."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
        dtype: in which it goes out unless somebody says otherwise; None: that of the shard.
    """

    name: str
    shard: Shard
    delta: Delta | None
    trained: bool
    tied: str = ""
    dtype: torch.dtype | None = None


def learning_of(parts: Mapping[str, Part], trained: Sequence[Tensor], buffers: bool) -> frozenset[str]:
    """Names of the parts that training changes by itself: those in the memory of a parameter that requires a gradient,
    and buffers."""
    local = [getattr(parameter, "_local_tensor", parameter) for parameter in trained]
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in local if t.numel())
    begins = [begin for begin, _ in ranges]

    def inside(tensor: Tensor) -> bool:
        at = bisect_right(begins, tensor.data_ptr()) - 1
        return at >= 0 and tensor.data_ptr() < ranges[at][1]

    return frozenset(
        name
        for name, part in parts.items()
        if (buffers and not part.trained) or any(inside(p.tensor) for p in part.shard.pieces if p.tensor.numel())
    )
