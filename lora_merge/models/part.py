"""Part: one tensor of what a live model streams."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..shards import Shard, here
from ..shards.ranks import Ranks
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
    """Return the names of the parts that training changes by itself: those in the memory of a parameter that requires a
    gradient, and buffers."""
    local = list(map(here, trained))
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


class Learning:
    """Which parts of a model training changes by itself, as long as the same parameters require a gradient.

    Args:
        modules: all of the model's.
        brought: tensors that have been trained, whether they require a gradient or not.
    """

    def __init__(self, modules: Iterable[nn.Module], brought: Iterable[Tensor] = ()) -> None:
        own = {id(p): p for module in modules for p in module._parameters.values() if p is not None}
        self._parameters = list(own.values())
        self._flags = [p.requires_grad for p in self._parameters]
        self._brought = list(brought)

    @property
    def moved(self) -> bool:
        """Whether other parameters require a gradient by now."""
        return [p.requires_grad for p in self._parameters] != self._flags

    def names(self, parts: Mapping[str, Part], ranks: Ranks, buffers: bool) -> frozenset[str]:
        """Return `learning_of` on any of the ranks. Collective."""
        learning = [p for p, flag in zip(self._parameters, self._flags, strict=True) if flag]
        trained = [*learning, *self._brought]
        return frozenset().union(*ranks.gather(learning_of(parts, trained, buffers)))
