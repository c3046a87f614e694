"""Places: where engines keep the tensors of a stream, in memory that a trainer can write to."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from ..kernels.ranges import NARROW
from ..kernels.scaled.weights import Scaled
from ..shards import Box
from .buckets import Table


@dataclass(frozen=True, eq=False)
class DirectTargets:
    """Where engines keep the stream's tensors, in memory that this process can write to: they are merged straight to
    there.

    Args:
        views: by name, the boxes of the tensor that lie there, each seen with the tensor's dimensions.
        scaled: by name, the weights of 8 bits that some of these are rectangles of.
        together: names of tensors that share scales, or a layer that is written as a whole or not at all.
    """

    views: Mapping[str, Sequence[tuple[Box, Tensor]]]
    scaled: Mapping[str, Sequence[Scaled]] = field(default_factory=dict)
    together: Sequence[frozenset[str]] = ()

    def on(self, device: torch.device) -> frozenset[str]:
        """Return the names of the tensors of which all lies on a device."""
        if device not in self._on:
            here = (name for name, found in self.views.items() if all(view.device == device for _, view in found))
            self._on[device] = frozenset(here)
        return self._on[device]

    @cached_property
    def narrow(self) -> frozenset[str]:
        """Names of the tensors that are rounded to float16 before they are scaled."""
        return frozenset(name for name, found in self.scaled.items() if any(some.dtype == NARROW for some in found))

    _on: dict[torch.device, frozenset[str]] = field(default_factory=dict, init=False)


class Sent(Protocol):
    """What is sent: a table, and something that fills its buckets."""

    table: Table
    device: torch.device
    capacity: int
    collective: bool
    """Whether filling takes several ranks, each of which fills every bucket, in order."""
    shared: bool
    """Whether several ranks hold what is sent, so that one of them alone cannot place it."""
    joins: bool
    """Whether tensors of several buckets can be placed at once."""

    @property
    def recipients(self) -> Mapping[int, frozenset[tuple[int, int]]]:
        """Of the buckets that not all workers take: which ones do, by replica, and by position in it."""

    def alone(self, index: int) -> bool:
        """Return True if a rank can fill this bucket without the others, those before being filled."""

    def fill(self, index: int, buffer: Tensor, run: Mapping[str, Any]) -> None:
        """Write bucket `index` into `buffer`, on the current stream. `run` are arguments of `Plan.run`."""

    def direct_buckets(self, names: Container[str]) -> frozenset[int]:
        """Return the buckets that `write_direct` can serve where an engine has places for these tensors."""

    def write_direct(self, index: int, targets: DirectTargets, run: Mapping[str, Any]) -> None:
        """Write bucket `index` straight to `targets`, on the current stream; where several ranks fill, each writes what
        it owns."""


def joined(source: Sent, names: frozenset[str], targets: DirectTargets) -> frozenset[str]:
    """Return those tensors that can be written to their places: tensors that share scales only together."""
    if not targets.together:
        return names
    if not source.joins:
        return names.difference(*targets.together)
    while True:
        straight = source.direct_buckets(names)
        there, elsewhere = set[str](), set[str]()  # a large tensor is in several buckets, and has to come with all
        for index, slots in enumerate(source.table):
            (there if index in straight else elsewhere).update(slot.name for slot in slots)
        torn = [some for some in targets.together if not some.isdisjoint(names) and not some <= there - elsewhere]
        if not torn:
            return names
        names = names.difference(*torn)
