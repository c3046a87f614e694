"""Weights that workers of other processes read where the trainer has them, and merge into their own tensors.

Direct writes (transport/peer_memory.py) need an engine whose memory can be exported, which the memory of sleep mode and
of expandable segments cannot. The trainer then exports the memory of its parameters, and of the adapters that the
kernels can read as they lie; all else comes in buckets, as for an engine that merges by itself (update.py). Each worker
reads what it needs of every rank's boxes, adds the products with the trainer's kernels, and writes its own slices: the
bits are those of a merge in the trainer.

On GPUs over CUDA IPC. A worker on another GPU than a rank reads its weights by plain loads, over NVLink.

Memory that another process has mapped stays in use when its owner frees it. So only weights that lie where they lay at
the push before are exported, never those of a trainer that offloads them between pushes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.packed import Packed
from ...shards import Box
from ...stream.bucket_writer import BucketWriter
from ...stream.buckets import Table
from ...stream.direct_targets import DirectTargets, Sent
from ...stream.weights import MergedWeights
from ..transport.peer_memory import ExportedMemory, Memory, exportable
from ..transport.routing import Route
from .base import Terms, WireSpecs, WorkerOp
from .update import SidePayload

MOVED = (
    "the trainer's weights do not lie where they lay at the push before, and are mapped once they stay (what workers "
    "have mapped, an offload would not free)"
)


class PullSource(SidePayload):
    """A stream as workers pull it.

    Args:
        stream: as it fits the engines.
        whole: the stream of the tensors that go whole; None where there are none.
        names: of the tensors that are read here.
        bucket_bytes: of adapters.

    Attributes:
        exports: the memory that this rank's part lies in; it is not held.
        factors: the memory of the adapters that workers read, each whole on every rank.
        offered: under which workers know it, with what all ranks export.
    """

    announced = False  # nobody waits for an engine that does not read
    transport = "pull"
    offered = ""

    def __init__(
        self, stream: BucketWriter, whole: BucketWriter | None, names: Container[str], bucket_bytes: int
    ) -> None:
        straight = {name: entry for name, entry in stream.entries.items() if name in names}
        super().__init__(stream, whole, "", straight, bucket_bytes, read=lambda factors: _readable(factors, stream))
        self.stream = stream
        self.exports = ExportedMemory(_boxes(stream, straight), (), "the trainer's")
        self.exports.release()
        there = {name: self._gathered().tensors[name] for name in self.spec["there"]}
        boxes = {name: [(((0,) * t.dim(), tuple(t.shape)), t)] for name, t in there.items()}
        self.factors = ExportedMemory(DirectTargets(boxes), (), "the trainer's")

    def stays(self) -> bool:
        """Return True if the weights that this rank exports still lie in the same memory. (Adapters do: they are
        held.)"""
        return self.exports.hold({storage.data_ptr(): storage for storage in self.stream.source.held})

    @property
    def compared(self) -> Sent:
        return self.stream

    @property
    def contents(self) -> Table:
        return self.stream.table

    def transfer_op(self, terms: Terms, route: Route, comes: WireSpecs | None) -> WorkerOp | None:
        how = {"digest": self.offered, "scalings": self.scalings, "run": terms.run}
        return WorkerOp("pull", {**how, **terms.begin})

    def settle(self) -> None:
        """Read the adapters and wait for the device: from here on workers may read the weights. Collective over the
        ranks of the model; an error of this rank is raised after the collectives."""
        self._gathered().refresh()
        if self.stream.device.type == "cuda":
            torch.cuda.synchronize(self.stream.device)

    def _refresh(self) -> None:
        """Do nothing: `settle` has refreshed the factors."""

    def exported(self) -> dict[str, Any]:
        """Return what this rank exports, as JSON values."""
        why = self.exports.description["why"] or self.factors.description["why"]
        factors = {"memory": [], "views": {}, **self.factors.description}
        return {**self.exports.description, "why": why, "factors": factors}

    def offer(self, trainer: str, sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what a worker has to know besides `spec`, as JSON values.

        Args:
            trainer: its name: a worker keeps what one of them offers, also of two that push the same model.
            sources: what each rank has `exported`, and as it introduces itself (`Trainer.introduced`).
        """
        offer: dict[str, Any] = {"update": self.digest, "table": self.stream.digest, "sources": [*sources]}
        key = json.dumps([trainer, offer])
        return {"digest": hashlib.blake2b(key.encode(), digest_size=16).hexdigest(), **offer}


def _boxes(stream: BucketWriter, names: Container[str]) -> DirectTargets:
    """Return the boxes of parameters that this rank sends of these tensors, in coordinates of the whole parameter."""
    views: dict[str, list[tuple[Box, Tensor]]] = {}
    for index in range(len(stream.table)):
        for slot in stream.mine(index):
            if slot.name in names:
                found = [((start, tuple(view.shape)), view) for start, view in stream.held(slot.name, slot.box)]
                views.setdefault(slot.name, []).extend(found)
    return DirectTargets(views)


def _readable(factors: Mapping[str, Tensor], stream: BucketWriter) -> set[str]:
    """Return the names of the factors that workers can read on every rank. Collective over the ranks of the model."""
    here = {n: t for n, t in factors.items() if t.device == stream.device and t.is_contiguous() and t.numel()}
    return set[str].intersection(*stream.ranks.gather(exportable(here)))


def unreadable(stream: BucketWriter) -> str:
    """Return why other processes cannot read what this rank holds of a stream; "" where they can, as far as that is
    known without asking CUDA."""
    for part in stream.source.parts.values():
        if any(isinstance(piece.tensor, Packed) for piece in part.shard.pieces):
            return f"{part.name} is quantised"
        if part.shard.pieces and part.shard.device != stream.device:
            return f"{part.name} is offloaded to {part.shard.device}"
    return ""


class Unmoved:
    """Tells whether a model's weights lie where they lay at the last call."""

    def __init__(self) -> None:
        self._memory: Memory | None = None

    def __call__(self, stream: BucketWriter) -> bool:
        pieces = [piece.tensor for part in stream.source.parts.values() for piece in part.shard.pieces]
        # The values of codes lie nowhere in memory (`unreadable` says so).
        found = {s.data_ptr(): s for s in (p.untyped_storage() for p in pieces if not isinstance(p, Packed))}
        before, self._memory = self._memory, Memory(found.values())
        return before is not None and before.same(found) and self._memory.same_as(before)


class PullBuilder:
    """Makes a stream something that workers can pull; kept while the stream and its memory stay what they were."""

    def __init__(self, weights: MergedWeights) -> None:
        self._weights = weights
        self._whole = weights.beside(adapters=weights.adapters)
        self._known: tuple[frozenset[str], PullSource] | None = None

    def __call__(self, stream: BucketWriter, blocked: frozenset[str]) -> PullSource:
        """Return the stream as workers pull it. Collective over the ranks of the model.

        Args:
            blocked: names of the tensors that some engine takes another way, or holds in another dtype.
        """
        known = self._known[1] if self._known is not None and self._known[0] == blocked else None
        if stream.ranks.any(not self.serves(stream, known)):
            self._known = None
            known = self._made(stream, blocked)
            self._known = blocked, known
        assert known is not None
        return known

    def serves(self, stream: BucketWriter, pull: PullSource | None) -> bool:
        """Return True if what was made last serves another transfer of the stream, as far as this rank can tell.
        Collective, as making streams is."""
        if pull is None or pull.stream is not stream:
            return False
        whole = None if pull.whole is None else self._whole.bucket_writer()
        return whole is pull.whole and pull.stays()

    def _made(self, stream: BucketWriter, blocked: frozenset[str]) -> PullSource:
        parts = stream.source.parts
        replaced = {name for name, part in parts.items() if part.delta is not None and part.delta.rows}
        names = frozenset(
            name
            for name in stream.windows()
            if name not in blocked and replaced.isdisjoint(stream.entries[name].sources)
        )
        for setting in ("keep_tied", "dtypes", "rounding", "dtype", "as_it_lies"):
            setattr(self._whole, setting, getattr(self._weights, setting))
        self._whole.left_out = names | self._weights.left_out
        whole = self._whole.bucket_writer() if names != frozenset(stream.entries) else None
        return PullSource(stream, whole, names, self._weights.bucket_bytes)

    def forget(self) -> None:
        """Drop the adapters: nobody pulls any more."""
        self._known = None

    def release(self) -> None:
        self._whole.release()


def readable(workers: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]) -> str:
    """Return why some worker cannot read the memory of all ranks of some group; "" where all can, if CUDA lets them.

    Args:
        workers, ranks: as they introduce themselves; ranks of a `group` hold the model together.
    """
    groups = {rank["group"]: [one for one in ranks if one["group"] == rank["group"]] for rank in ranks}
    for worker in workers:
        if any((worker["pid"], worker["host"]) == (rank["pid"], rank["host"]) for rank in ranks):
            return "an engine runs in the trainer's process"
        apart = [next((rank for rank in group if not _together(worker, rank)), None) for group in groups.values()]
        if (rank := apart[0]) is not None and None not in apart:
            return f"a worker on {worker['device']} shares no memory with a rank on {rank['device']}"
    return ""


def _together(worker: Mapping[str, Any], rank: Mapping[str, Any]) -> bool:
    """Return True if two processes may share memory: on one host, both with GPUs or both on the CPU."""
    devices = worker["device"], rank["device"]
    return worker["host"] == rank["host"] and (devices[0] == devices[1] or "cpu" not in devices)
