"""Exchange: tensors that are sharded over ranks, brought together whole on every rank in one collective."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from .errors import InvalidInput
from .plan import Plan
from .ranks import Ranks, even
from .segments import Segment, copies
from .shards import Box, Shard, cut
from .shards.owners import divide

_ALIGNMENT = 16
STRATEGIES = (None, "unshard")


def check_strategy(strategy: str | None) -> None:
    """Raise `InvalidInput` unless there is such a way to merge a sharded model."""
    if strategy not in STRATEGIES:
        raise InvalidInput(f"strategy must be None (weights are merged where they lie) or 'unshard', got {strategy!r}")


class Exchange:
    """Whole tensors out of the ranks' shards: packed, gathered in one all-gather of bytes, unpacked.

    Used for adapters, which are small; and for base weights one bucket or one layer at a time, where nothing else
    will do (`strategy="unshard"`).

    Args:
        names: for errors.
        shards: the same tensors in the same order on every rank.
        ranks: making it and `run` are collective over them.
        device: of the whole tensors.
    """

    def __init__(self, names: Sequence[str], shards: Sequence[Shard], ranks: Ranks, device: torch.device) -> None:
        self._ranks, self.device = ranks, device
        talk = ranks.talks_on(device)
        self._gathered = [torch.empty(shard.shape, dtype=shard.dtype, device=talk) for shard in shards]
        self.wholes = self._gathered if talk == device else [torch.empty_like(t, device=device) for t in self._gathered]
        """One for each shard, filled by `run`."""
        owned = divide(names, shards, ranks)
        ends = [0] * ranks.size
        regions: list[list[tuple[int, Box, int]]] = [[] for _ in ends]  # of each rank: tensor, box, offset in its part
        for index, by_rank in enumerate(owned):
            for rank, boxes in enumerate(by_rank):
                for box in boxes:
                    regions[rank].append((index, box, ends[rank]))
                    ends[rank] += -(-prod(box[1]) * shards[index].dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._sizes = even([max(end, _ALIGNMENT) for end in ends])
        starts = [sum(self._sizes[:rank]) for rank in range(ranks.size)]
        self._flat = torch.empty(sum(self._sizes) if shards else 0, dtype=torch.uint8, device=talk)
        self.nbytes = sum(self._sizes) - self._sizes[ranks.rank] if shards else 0
        """Bytes that one run receives from other ranks."""
        self._brought: list[tuple[Tensor, Tensor]] = []
        packed: list[Segment] = []
        unpacked: list[Segment] = []
        for rank, parts in enumerate(regions):
            for index, box, offset in parts:
                at = self._flat[starts[rank] + offset :][: prod(box[1]) * shards[index].dtype.itemsize]
                at = at.view(shards[index].dtype).view(box[1])
                unpacked += copies(names[index], at, cut(self._gathered[index], box))
                if rank == ranks.rank:
                    for _, inner, mine in shards[index].views(box):
                        if mine.device == talk:
                            packed += copies(names[index], mine, cut(at, inner))
                        else:
                            self._brought.append((cut(at, inner), mine))
        self._pack, self._unpack = Plan(packed), Plan(unpacked)

    def release(self) -> None:
        """As `Plan.release`."""
        self._pack.release()

    def run(self) -> None:
        """Bring the tensors as they are now together, on the current stream."""
        if not self.wholes:
            return
        self._pack.run()
        for there, here in self._brought:
            there.copy_(here)
        self._ranks.all_gather_parts(self._flat, self._sizes)
        self._unpack.run()
        if self.wholes is not self._gathered:
            for whole, gathered in zip(self.wholes, self._gathered, strict=True):
                whole.copy_(gathered)
