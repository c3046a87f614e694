"""Whole tensors of a sharded model, put together from the buckets of boxes that its ranks fill."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..kernels.segments import raw
from ..shards import cut
from ..shards.ranks import noted
from .bucket_writer import BucketWriter
from .buckets import Bucket, Meta, Slot, extent, lay_out


def assembled(writer: BucketWriter, filled: Iterator[tuple[int, Tensor]]) -> Iterator[Bucket]:
    """Yield buckets of whole tensors out of buckets of boxes."""
    groups, table = _completed(writer), writer.table
    where = {slot.name: (index, slot) for index, slots in enumerate(groups) for slot in slots}
    begun: dict[int, Tensor] = {}
    errors: list[Exception] = []
    for index, data in filled:  # to the end, where the other ranks wait for this one
        with noted(errors):
            to, source = [], []
            for slot in table[index]:
                group, place = where[slot.name]
                if group not in begun:
                    begun[group] = torch.empty(extent(groups[group]), dtype=torch.uint8, device=data.device)
                to.append(cut(place.view(begun[group]), slot.box))
                source.append(slot.view(data))
            torch._foreach_copy_([raw(t) for t in to], [raw(t) for t in source])
        if groups[index] and not errors:
            yield Bucket(index, groups[index], begun.pop(index))
    if errors:
        raise errors[0]


def _completed(writer: BucketWriter) -> list[tuple[Slot, ...]]:
    """Return for each bucket the whole tensors that it completes, in the stream's order, laid out in a buffer of their
    own."""
    last = {slot.name: index for index, slots in enumerate(writer.table) for slot in slots}
    groups: list[list[Meta]] = [[] for _ in writer.table]
    at = 0
    for name, entry in writer.entries.items():
        at = last.get(name, at)  # what has no elements is in no bucket
        groups[at].append(entry.meta)
    return [lay_out(group, 1 << 62)[0] if group else () for group in groups]
