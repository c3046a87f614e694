"""Merged tensors of a sharded model, layer by layer, each whole on a rank that holds it and on no other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..inference import outside_inference_mode
from ..kernels.segments import raw
from ..shards import Box, cut
from .bucket_writer import BucketWriter, room
from .buckets import Meta, Slot, Table, extent, lay_out, side_by_side
from .by_layer import by_layer
from .source import Source
from .unwritten import Unwritten


class HeldWriter(BucketWriter):
    """Writes a stream whose buckets are its layers. Each rank merges the boxes that it owns, for one receiver after
    another; one all-to-all a layer brings them to the ranks that hold their tensors.

    Arguments as of `BucketWriter`; `bucket_bytes` and `whole` mean nothing here. A buffer is what this rank sends.

    Attributes:
        layers: names of the tensors of each bucket.
        holds: names of the tensors that are whole on this rank, in the order of the stream.
    """

    layers: list[list[str]]
    holds: list[str]

    def _lay_out(self, source: Source, bucket_bytes: int, whole: bool) -> tuple[Table, tuple[tuple[int, ...], ...]]:
        rank, everybody = self.ranks.rank, range(self.ranks.size)
        boxes: dict[str, dict[int, list[Box]]] = {name: {} for name in self.entries}
        for sender, own in enumerate(self._boxes(source)):
            for meta, box in own:
                boxes[meta.name].setdefault(sender, []).append(box)
        self.layers = by_layer(self.entries)
        metas = [[self.entries[name].meta for name in names] for names in self.layers]
        holders = _holders(metas, boxes, everybody)
        self.holds = [name for name in self.entries if rank in holders[name]]
        self._sends: list[list[int]] = []
        """Bytes that go to each rank, layer by layer."""
        self._comes: list[list[tuple[Slot, ...]]] = []
        """What comes from each rank, by its place in all that comes from that one."""
        self._mine: list[list[Slot]] = []
        for layer in metas:
            here = [meta for meta in layer if rank in holders[meta.name]]
            out: list[list[tuple[Meta, Box]]] = [[] for _ in everybody]
            for meta in layer:
                for receiver in holders[meta.name]:
                    out[receiver] += [(meta, box) for box in boxes[meta.name].get(rank, ())]
            sent = [_packed(wanted) for wanted in out]
            self._sends.append([extent(slots) for slots in sent])
            self._mine.append(side_by_side(sent, self._sends[-1]))
            self._comes.append([_packed([(m, b) for m in here for b in boxes[m.name].get(s, ())]) for s in everybody])
        self._wholes = [lay_out([m for m in layer if rank in holders[m.name]], 1 << 62) for layer in metas]
        table = tuple(slots for layer in metas for slots in lay_out(layer, 1 << 62))
        return table, tuple((sum(sends),) for sends in self._sends)

    def mine(self, index: int) -> list[Slot]:
        return self._mine[index]

    def _together(self, index: int, buffer: Tensor) -> None:
        sends, receives = self._sends[index], [extent(slots) for slots in self._comes[index]]
        self.ranks.all_to_all(self._came, receives, buffer[: sum(sends)], sends)

    @outside_inference_mode
    def _unpack(self, index: int) -> dict[str, Tensor]:
        """Return the whole tensors of a layer that this rank holds, in memory of their own."""
        (places,) = self._wholes[index] or ((),)
        data = torch.empty(extent(places), dtype=torch.uint8, device=self.device)
        wholes = {place.name: place.view(data) for place in places}
        to, source = [], []
        for slots, came in zip(self._comes[index], self._came.split([*map(extent, self._comes[index])]), strict=True):
            to += [raw(cut(wholes[slot.name], slot.box)) for slot in slots]
            source += [raw(slot.view(came)) for slot in slots]
        if to:
            torch._foreach_copy_(to, source)
        del self._came
        return wholes

    def groups(self, run: Mapping[str, Any], source: Source) -> Iterator[tuple[list[str], list[Tensor | None]]]:
        """Yield names and tensors of each layer of which this rank holds something, None for what it does not hold.
        Every rank holds something of the last one, so that all of them come to its end.

        An error of one rank is raised on all, before anything of that layer is handed on; that weights were written
        meanwhile, before anything of the last one is.
        """
        with self.passing(source):
            read = Unwritten(source, self._layers)
            for index, names in enumerate(self.layers):
                with self.ranks.vote("a pass over the weights"):
                    if not self._idle:
                        self._idle = [room(self.capacity, self.device)]
                    self._came = room(sum(map(extent, self._comes[index])), self.device)
                with self.ranks.vote("a pass over the weights"):
                    self.fill(index, self._idle[0], run, source)
                    wholes = self._unpack(index)
                    if index + 1 == len(self.layers):
                        read.check()
                if wholes:
                    settle(self.device)
                    yield list(names), [wholes.pop(name, None) for name in names]


def settle(device: torch.device) -> None:
    """Wait for the current stream: who gets a layer may let another process read it, which waits for no stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _holders(
    layers: Sequence[Sequence[Meta]], boxes: Mapping[str, Mapping[int, Sequence[Box]]], everybody: Sequence[int]
) -> dict[str, Sequence[int]]:
    """Return which ranks hold each tensor: one that owns much of it, such that all of them hold about as many bytes;
    of the last layer the smallest tensor is held by all."""
    held = dict.fromkeys(everybody, 0)
    holders: dict[str, Sequence[int]] = {}
    for meta in (meta for layer in layers for meta in layer):
        owned = {rank: sum(prod(shape) for _, shape in own) for rank, own in boxes[meta.name].items()}
        most = max(owned.values(), default=0)
        rank = min([rank for rank in owned if 2 * owned[rank] >= most] or everybody, key=held.__getitem__)
        held[rank] += meta.nbytes
        holders[meta.name] = (rank,)
    if layers:
        holders[min(layers[-1], key=lambda meta: meta.nbytes).name] = everybody
    return holders


def _packed(wanted: Sequence[tuple[Meta, Box]]) -> tuple[Slot, ...]:
    """Return where the boxes that one rank sends to another lie in what goes from the one to the other."""
    table = lay_out([Meta(meta.name, meta.dtype, box[1]) for meta, box in wanted], 1 << 62)
    return tuple(
        replace(slot, start=box[0], whole=meta.shape)
        for slot, (meta, box) in zip(table[0] if table else (), wanted, strict=True)
    )
