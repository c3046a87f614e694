"""Weights that workers of other processes read where the trainer has them, and merge into their own tensors.

The other way round (mapped.py) takes an engine whose memory can be exported, which the memory of sleep mode and of
expandable segments cannot. The trainer then exports the memory that its parameters lie in; adapters, and tensors that
are no boxes of parameters, come in buckets beside it, as for an engine that merges by itself (update.py). Each worker
reads what it needs of every rank's boxes, adds the products with the trainer's kernels, and writes its own slices: the
bits are those of a merge in the trainer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..kernels.packed import Packed
from ..shards import Box
from ..stream.filler import Filler
from ..stream.places import Places
from ..stream.weights import MergedWeights
from .mapped import Exports
from .update import Beside


class Pull(Beside):
    """A stream as workers pull it.

    Args:
        stream: as it fits the engines.
        whole: the stream of the tensors that go whole; None where there are none.
        names: of the tensors that are read here.
        bucket_bytes: of adapters.

    Attributes:
        exports: the memory that this rank's part lies in; it is not held.
        offered: under which workers know it, with what all ranks export.
    """

    offered = ""

    def __init__(self, stream: Filler, whole: Filler | None, names: Container[str], bucket_bytes: int) -> None:
        straight = {name: entry for name, entry in stream.entries.items() if name in names}
        super().__init__(stream, whole, "", straight, bucket_bytes)
        self.stream, self.straight_names = stream, frozenset(straight)
        self.exports = Exports(_boxes(stream, straight), (), "the trainer's")
        self.exports.release()

    def stays(self) -> bool:
        """Whether what this rank exports lies in the same memory still."""
        return self.exports.hold({storage.data_ptr(): storage for storage in self.stream.source.held})

    def told(self, sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What a worker has to know, beside `said`: JSON values.

        Args:
            sources: what each rank exports, with its `pid`.
        """
        told = {"update": self.digest, "table": self.stream.digest, "sources": list(sources)}
        return {"digest": hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest(), **told}


def _boxes(stream: Filler, names: Container[str]) -> Places:
    """The boxes of parameters that this rank sends of these tensors, in coordinates of the whole parameter."""
    views: dict[str, list[tuple[Box, Tensor]]] = {}
    for index in range(len(stream.table)):
        for slot in stream.mine(index):
            if slot.name in names:
                found = [((start, tuple(view.shape)), view) for start, view in stream.held(slot.name, slot.box)]
                views.setdefault(slot.name, []).extend(found)
    return Places(views)


def unreadable(stream: Filler) -> str:
    """Why other processes cannot read what this rank holds of a stream, in words; "" where they can."""
    if stream.device.type != "cpu":
        return "the trainer's weights lie on another device than the workers'"
    for part in stream.source.parts.values():
        if any(isinstance(piece.tensor, Packed) for piece in part.shard.pieces):
            return f"{part.name} is quantised"
        if part.shard.pieces and part.shard.device != stream.device:
            return f"{part.name} is offloaded to {part.shard.device}"
    return ""


class Pulls:
    """Makes streams something that workers can pull; kept while a stream, and its memory, stay what they were.

    Args:
        weights: the stream.
    """

    def __init__(self, weights: MergedWeights) -> None:
        self._weights = weights
        self._whole = MergedWeights(weights.model, bucket_bytes=weights.bucket_bytes, adapters=weights.adapters)
        self._known: tuple[frozenset[str], Pull] | None = None

    def __call__(self, stream: Filler, blocked: frozenset[str]) -> Pull:
        """The stream. Collective over the ranks of the model.

        Args:
            blocked: names of the tensors that some engine takes another way, or holds in another dtype.
        """
        known = self._known[1] if self._known is not None and self._known[0] == blocked else None
        if not self.stands(stream, known):
            self._known = None
            known = self._made(stream, blocked)
            self._known = blocked, known
        assert known is not None
        return known

    def stands(self, stream: Filler, pull: Pull | None) -> bool:
        """Whether what was made last is what would be made of the stream now: then it serves another pass. Collective,
        and the same on every rank."""
        if stream.ranks.any(pull is None or pull.stream is not stream):
            return False
        assert pull is not None
        whole = None if pull.whole is None else self._whole.filler()
        return not stream.ranks.any(whole is not pull.whole or not pull.stays())

    def _made(self, stream: Filler, blocked: frozenset[str]) -> Pull:
        names = frozenset(name for name in stream.windows() if name not in blocked)
        for setting in ("keep_tied", "dtypes", "rounding", "dtype"):
            setattr(self._whole, setting, getattr(self._weights, setting))
        self._whole.left_out = names | self._weights.left_out
        whole = self._whole.filler() if names != frozenset(stream.entries) else None
        return Pull(stream, whole, names, self._weights.bucket_bytes)

    def release(self) -> None:
        """As `MergedWeights.release`."""
        self._whole.release()


def readable(workers: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]) -> str:
    """Why some worker cannot read the memory of some rank, in words; "" where all can.

    Args:
        workers, ranks: as they introduce themselves.
    """
    for worker in workers:
        for rank in ranks:
            if worker["pid"] == rank["pid"] and worker["host"] == rank["host"]:
                return "an engine runs in the trainer's process"
            if worker["host"] != rank["host"] or worker["device"] != rank["device"]:
                return f"a worker on {worker['device']} shares no memory with a rank on {rank['device']}"
    return ""
