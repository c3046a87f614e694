"""The worker's side of an update: its spec, its received buckets, and its factors as kernels read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.plan import Plan
from ...kernels.segments import Segment, copies, raw
from ...models.delta import Delta, Factors, Job
from ...models.operands import Operands, Turn
from ...shards import Piece, Shard, whole
from ...shards.ranks import Ranks
from ...stream.buckets import Slot, Table, dtype_of, extent, from_json
from ...stream.window import Window


@dataclass(frozen=True, eq=False)
class UpdateSpec:
    """`UpdatePayload.spec`, as a worker reads it.

    Args:
        base: digest of what is in the table of the base (`contents_of`).
        table: of its buckets.
        factors: how many of them hold factors; the others hold whole tensors.
        deltas: for each delta what a `Delta` has beside its tensors.
        shares: for each share the number of its delta, its first expert and how many (0 and 1 for one matrix).
        there: names of the factors that the worker reads where the trainer has them.
        tensors: of each tensor of the stream that a product is added to: which delta's, and its window there.
        copied: the windows of tensors that the worker reads where the trainer has them, with no product.
    """

    base: str
    table: Table
    factors: int
    deltas: Sequence[Mapping[str, Any]]
    shares: Sequence[tuple[int, int, int]]
    there: Sequence[str]
    tensors: Mapping[str, tuple[int, Window]]
    copied: Mapping[str, Window]

    @classmethod
    def read(cls, spec: Mapping[str, Any]) -> UpdateSpec:
        windows = {name: Window(tuple(start), tuple(size), tuple(dims)) for name, start, size, dims in spec["windows"]}
        tensors = {name: (number, windows.pop(name)) for name, number in spec["tensors"]}
        shares = [(number, first, many) for number, first, many in spec["shares"]]
        table = from_json(spec["slots"])
        return cls(spec["base"], table, spec["factors"], spec["deltas"], shares, spec["there"], tensors, windows)

    @property
    def whole(self) -> frozenset[str]:
        """Names of the tensors that come whole."""
        return frozenset(slot.name for slots in self.table[self.factors :] for slot in slots)

    @property
    def changed(self) -> frozenset[str]:
        """Names of all tensors that it changes."""
        return self.whole.union(self.tensors)


@dataclass(eq=False)
class ReceivedUpdate:
    """An update as it arrives; it is merged when all workers of the engine have it.

    Args:
        scalings: of each adapter of each delta.
        data: its buckets, by number: those that this worker takes.
    """

    spec: UpdateSpec
    scalings: list[list[float]]
    data: dict[int, Tensor] = field(default_factory=dict)

    def whole(self) -> Iterator[tuple[Slot, Tensor]]:
        """Yield the slots of tensors that came whole, each with its bucket."""
        for index in range(self.spec.factors, len(self.spec.table)):
            for slot in self.spec.table[index]:
                yield slot, self.data[index]


class DeviceFactors:
    """The adapters of an update, in memory of this worker's own, as kernels read them.

    Args:
        coming: an update like it.
        pieces: of each delta, by number, what lies here of its weight; none where it is left out.
        read: the factors that come in no bucket, by name; read where they are.
        far: those of them that are copied to here each time.
    """

    def __init__(
        self,
        coming: ReceivedUpdate,
        pieces: Mapping[int, Sequence[Piece]],
        device: torch.device,
        read: Mapping[str, Tensor] = {},
        far: Mapping[str, Tensor] = {},
    ) -> None:
        spec = coming.spec
        self._spec, self._scalings, self._came = spec, coming.scalings, frozenset(coming.data)
        self.memory = {
            index: torch.empty(extent(spec.table[index]), dtype=torch.uint8, device=device)
            for index in coming.data
            if index < spec.factors
        }
        self._tensors = {
            slot.name: slot.view(data) for index, data in self.memory.items() for slot in spec.table[index]
        }
        brought = {name: torch.empty_like(there) for name, there in far.items()}
        self._bring = _bring(far, brought) if far else None
        self._tensors |= {**read, **brought}
        self.deltas = [
            _delta(one, one["shape"], [], pieces.get(number, ()), device) for number, one in enumerate(spec.deltas)
        ]
        self._shares: dict[int, list[tuple[int, int, Delta]]] = {}
        for number, first, many in spec.shares:
            if f"{number}.{first}.0.lora_A" in self._tensors:
                self._shares.setdefault(number, []).append((first, many, self._share(number, first, many, device)))
        held = [delta for shares in self._shares.values() for _, _, delta in shares]
        self._operands = Operands([Turn(held)], Ranks(), device)

    def is_like(self, coming: ReceivedUpdate) -> bool:
        """Return True if another update has the same tensors."""
        return coming.spec is self._spec and coming.data.keys() == self._came

    def serves(self, coming: ReceivedUpdate) -> bool:
        """Return True if a plan of these factors serves another update: scalings are the plan's."""
        return self.is_like(coming) and coming.scalings == self._scalings

    def segments(self, number: int, job: Job) -> list[Segment]:
        """Return the segments of a job of a delta.

        Raises:
            RuntimeError: a factor that it takes has not come to this worker.
        """
        spec = self._spec.deltas[number]
        scale = self._tensors.get(f"{number}.row_scale")
        shares = self._shares.get(number, [])
        if spec["experts"] is None:
            found = [self._operands.scaled_segments(job._replace(delta=delta), 0, scale) for _, _, delta in shares]
            there = bool(found)
        else:
            begin, found, missing = job.start[0], [], job.source.shape[0]
            for first, many, delta in shares:
                at, to = max(begin, first), min(begin + job.source.shape[0], first + many)
                if at < to:
                    source, destination = (t[at - begin : to - begin] for t in (job.source, job.destination))
                    part = Job(delta, (at - first, *job.start[1:]), source, destination)
                    found.append(self._operands.scaled_segments(part, 0, scale))
                    missing -= to - at
            there = not missing
        if not there or (scale is None and spec["row_scale"]):
            raise RuntimeError(f"{spec['name']} lies in this worker, and its adapter was not sent here: push again")
        return [segment for some in found for segment in some]

    def take(self, coming: ReceivedUpdate) -> None:
        """Copy the factors of an update to here."""
        for index, to in self.memory.items():
            to.copy_(coming.data[index])
        if self._bring is not None:
            self._bring.run()
        self._operands.refresh()

    def _share(self, number: int, first: int, many: int, device: torch.device) -> Delta:
        spec = self._spec.deltas[number]
        factors = []
        for which, scaling in enumerate(self._scalings[number]):
            lora_A, lora_B = (self._tensors[f"{number}.{first}.{which}.lora_{half}"] for half in "AB")
            factors.append(Factors(whole(lora_A), whole(lora_B), scaling))
        shape = spec["shape"] if spec["experts"] is None else [many, *spec["shape"][1:]]
        # Operands leave out what nobody holds; what has no place here may be part of a layer that is laid out anew.
        delta = _delta(spec, shape, factors, (Piece((), torch.empty(0)),), device)
        if delta.experts is None:
            return delta
        return replace(delta, experts=many, name=f"{delta.name}[{first}:]" if first else delta.name)


def _bring(far: Mapping[str, Tensor], here: Mapping[str, Tensor]) -> Plan:
    """Return a plan that copies tensors of another GPU to this one, bits as they are, in one launch."""
    pairs = ((name, raw(there), raw(here[name])) for name, there in far.items())
    return Plan([replace(segment, peer=True) for pair in pairs for segment in copies(*pair)])


def _delta(
    spec: Mapping[str, Any],
    shape: Sequence[int],
    factors: Sequence[Factors],
    pieces: Sequence[Piece],
    device: torch.device,
) -> Delta:
    held = Shard(tuple(shape), dtype_of(spec["dtype"]), device, tuple(pieces))
    return Delta(spec["name"], held, tuple(factors), spec["experts"], spec["transposed"])
