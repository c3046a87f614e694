"""An update in a worker: what was told of it, what has come of it, and its adapters as kernels read them there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.segments import Segment
from ..models.delta import Delta, Factors, Job
from ..models.operands import Operands, Turn
from ..shards import Piece, Shard, whole
from ..shards.ranks import Ranks
from ..stream.buckets import Slot, Table, dtype_of, extent, from_json
from ..stream.window import Window


@dataclass(frozen=True, eq=False)
class Described:
    """An update as `Update.said` tells it.

    Args:
        base: digest of what is in the table of the base (`contents_of`).
        table: of its buckets.
        factors: how many of them hold factors; the others hold whole tensors.
        deltas: of each what a `Delta` has beside its tensors.
        there: names of the factors that the worker reads where the trainer has them.
        tensors: of each tensor of the stream that a product is added to: which delta's, and its window there.
        copied: of tensors that the worker reads where the trainer has them, with no product: the window.
    """

    base: str
    table: Table
    factors: int
    deltas: Sequence[Mapping[str, Any]]
    there: Sequence[str]
    tensors: Mapping[str, tuple[int, Window]]
    copied: Mapping[str, Window]

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Described:
        """Off the wire."""
        windows = {name: Window(tuple(start), tuple(size), tuple(dims)) for name, start, size, dims in said["windows"]}
        tensors = {name: (number, windows.pop(name)) for name, number in said["tensors"]}
        table = from_json(said["slots"])
        return cls(said["base"], table, said["factors"], said["deltas"], said["there"], tensors, windows)

    @property
    def whole(self) -> frozenset[str]:
        """Names of the tensors that come whole."""
        return frozenset(slot.name for slots in self.table[self.factors :] for slot in slots)

    @property
    def changed(self) -> frozenset[str]:
        """Names of all tensors that it changes."""
        return self.whole.union(self.tensors)


@dataclass(eq=False)
class Update:
    """An update that comes, and is merged when all workers of the engine have it.

    Args:
        scalings: of each adapter of each delta.
        data: its buckets.
    """

    said: Described
    scalings: list[list[float]]
    data: list[Tensor] = field(default_factory=list)

    def whole(self) -> Iterator[tuple[Slot, Tensor]]:
        """The slots of tensors that came whole, each with its bucket."""
        first = self.said.factors
        for slots, data in zip(self.said.table[first:], self.data[first:], strict=True):
            for slot in slots:
                yield slot, data


class Factored:
    """The adapters of an update, in memory of this worker's own, as kernels read them.

    Args:
        coming: an update like it.
        pieces: of each delta, by number, what lies here of its weight; none where it is left out.
        device: of the worker.
        read: the factors that come in no bucket, by name; read where they are.
        far: of such factors, each time copied to here.
    """

    def __init__(
        self,
        coming: Update,
        pieces: Mapping[int, Sequence[Piece]],
        device: torch.device,
        read: Mapping[str, Tensor] = {},
        far: Mapping[str, Tensor] = {},
    ) -> None:
        said = coming.said
        self._said, self._scalings = said, coming.scalings
        self.memory = [
            torch.empty(extent(slots), dtype=torch.uint8, device=device) for slots in said.table[: said.factors]
        ]
        self._tensors = {
            slot.name: slot.view(data)
            for slots, data in zip(said.table[: said.factors], self.memory, strict=True)
            for slot in slots
        }
        self._far = [(torch.empty_like(there), there) for there in far.values()]
        self._tensors |= read
        self._tensors |= {name: here for name, (here, _) in zip(far, self._far, strict=True)}
        self.deltas = [self._delta(number, pieces.get(number, ()), device) for number in range(len(said.deltas))]
        # Operands leave out what nobody holds; what has no place here may be part of a layer that is laid out anew.
        here = (Piece((), torch.empty(0)),)
        held = [replace(delta, weight=replace(delta.weight, pieces=here)) for delta in self.deltas]
        self._operands = Operands([Turn(held)], Ranks(), device)

    def is_like(self, coming: Update) -> bool:
        """Whether another update has the same tensors."""
        return coming.said is self._said

    def serves(self, coming: Update) -> bool:
        """Whether it goes the same way: scalings are the plan's."""
        return self.is_like(coming) and coming.scalings == self._scalings

    def segments(self, number: int, job: Job) -> list[Segment]:
        """Of a job of a delta."""
        scale = self._tensors[f"{number}.row_scale"] if self._said.deltas[number]["row_scale"] else None
        return self._operands.scaled_segments(job, 0, scale)

    def take(self, coming: Update) -> None:
        """The factors of an update come to lie here."""
        for to, data in zip(self.memory, coming.data, strict=False):
            to.copy_(data)
        for here, there in self._far:
            here.copy_(there)
        self._operands.refresh()

    def _delta(self, number: int, pieces: Sequence[Piece], device: torch.device) -> Delta:
        said = self._said.deltas[number]
        shape, dtype = tuple(said["shape"]), dtype_of(said["dtype"])
        factors = tuple(
            Factors(
                whole(self._tensors[f"{number}.{which}.lora_A"]), whole(self._tensors[f"{number}.{which}.lora_B"]), by
            )
            for which, by in enumerate(self._scalings[number])
        )
        held = Shard(shape, dtype, device, tuple(pieces))
        return Delta(said["name"], held, factors, said["experts"], said["transposed"])
