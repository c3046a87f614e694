"""Parts: boxes of tensors that are sharded over ranks, each brought to the ranks that want it, and to no others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from ..kernels.plan import Plan
from ..kernels.segments import Segment, copies
from . import Box, Shard, cut, overlap
from .exchange import Packing, aligned, view_of
from .owners import divide
from .ranks import Ranks

Wanted: TypeAlias = tuple[int, Box]
"""A box of a tensor, by its number."""


class Parts:
    """What each rank wants of sharded tensors: packed for each of the others, sent in one all-to-all, unpacked.

    Where every rank wants everything, `Exchange` does: a gather sends what many want over a network once.

    Args:
        names: for errors.
        shards: the same tensors in the same order on every rank.
        wanted: of this rank.
        ranks: making it and `run` are collective over them.

    Attributes:
        tensors: what is wanted, in that order, as of the last `run`.
        nbytes: that one run receives from other ranks.
    """

    def __init__(
        self,
        names: Sequence[str],
        shards: Sequence[Shard],
        wanted: Sequence[Wanted],
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self._ranks, talk = ranks, ranks.talks_on(device)
        owned = divide(names, shards, ranks)
        asked = ranks.gather(list(wanted))
        with ranks.vote("bringing parts of tensors to the ranks that want them"):
            self._into(names, shards, asked, owned, talk)
            self._out(names, shards, asked[ranks.rank], owned, talk, device)

    def _into(
        self,
        names: Sequence[str],
        shards: Sequence[Shard],
        asked: Sequence[Sequence[Wanted]],
        owned: Sequence[Sequence[Sequence[Box]]],
        talk: torch.device,
    ) -> None:
        """Lay out what goes from here, and plan how it is packed."""
        rank = self._ranks.rank
        going = [[(number, box) for number, box, _ in _met(some, owned, rank)] for some in asked]
        self._sends = [sum(_room(shards[number], box) for number, box in boxes) for boxes in going]
        self._packed = torch.empty(sum(self._sends), dtype=torch.uint8, device=talk)
        self._pack, at = Packing(), 0
        for number, box in (one for boxes in going for one in boxes):
            shard = shards[number]
            self._pack.add(names[number], shard, box, view_of(self._packed[at:], shard, box[1]))
            at += _room(shard, box)
        self._pack.plan()

    def _out(
        self,
        names: Sequence[str],
        shards: Sequence[Shard],
        wanted: Sequence[Wanted],
        owned: Sequence[Sequence[Sequence[Box]]],
        talk: torch.device,
        device: torch.device,
    ) -> None:
        """Lay out what comes here, and plan how it is unpacked."""
        rooms = [_room(shards[number], box) for number, box in wanted]
        self._landed = torch.empty(sum(rooms), dtype=torch.uint8, device=talk)
        self._here = self._landed if talk == device else torch.empty_like(self._landed, device=device)
        begins = list(accumulate(rooms, initial=0))

        def views(room: Tensor) -> list[Tensor]:
            return [view_of(room[b:], shards[n], box[1]) for b, (n, box) in zip(begins, wanted, strict=False)]

        self.tensors, landed = views(self._here), views(self._landed)
        coming = [list(_met(wanted, owned, rank)) for rank in range(self._ranks.size)]
        self._receives = [sum(_room(shards[number], box) for number, box, _ in boxes) for boxes in coming]
        self._came = torch.empty(sum(self._receives), dtype=torch.uint8, device=talk)
        self.nbytes = sum(self._receives) - self._receives[self._ranks.rank]
        work: list[Segment] = []
        at = 0
        for number, (start, size), index in (one for boxes in coming for one in boxes):
            inner = tuple(s - b for s, b in zip(start, wanted[index][1][0], strict=True))
            here = view_of(self._came[at:], shards[number], size)
            work += copies(names[number], here, cut(landed[index], (inner, size)))
            at += _room(shards[number], (start, size))
        self._unpack = Plan(work)

    def release(self) -> None:
        """See `Plan.release`."""
        self._pack.release()

    def run(self) -> None:
        """Bring the parts, as they are now, on the current stream.

        An error of this rank is raised after the collective.
        """
        try:
            self._pack.run()
        finally:
            self._ranks.all_to_all(self._came, self._receives, self._packed, self._sends)
        self._unpack.run()
        if self._here is not self._landed:
            self._here.copy_(self._landed)


def _met(wanted: Sequence[Wanted], owned: Sequence[Sequence[Sequence[Box]]], rank: int) -> list[tuple[int, Box, int]]:
    """Return what a rank owns of the boxes that somebody wants, in an order that both know: the tensor's number, a box
    of it, and of which of the wanted ones that is a part."""
    found = []
    for index, (number, box) in enumerate(wanted):
        for mine in owned[number][rank]:
            if (both := overlap(mine, box)) is not None:
                found.append((number, both, index))
    return found


def _room(shard: Shard, box: Box) -> int:
    """Return the bytes that a box takes, up to where the next one may begin."""
    return aligned(prod(box[1]) * shard.dtype.itemsize)
