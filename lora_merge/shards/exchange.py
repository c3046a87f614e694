"""Exchange: tensors that are sharded over ranks, brought together whole on every rank in large collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from ..choices import Strategy
from ..errors import InvalidInput
from ..kernels.packed import bring, in_reach
from ..kernels.plan import Plan
from ..kernels.segments import Segment, copies
from . import Box, Shard, cut
from .owners import divide
from .ranks import Ranks, even

_ALIGNMENT = 256
"""Every tensor begins at a multiple of this many bytes, packed or whole: any kernel may use wide loads there."""
STRATEGIES = (None, "unshard")


def check_strategy(strategy: Strategy | None) -> None:
    """Raise `InvalidInput` unless there is such a way to merge a sharded model."""
    if strategy not in STRATEGIES:
        raise InvalidInput(f"strategy must be None (weights are merged where they lie) or 'unshard', got {strategy!r}")


class Exchange:
    """Whole tensors out of the ranks' shards: packed, gathered in one all-gather of bytes, unpacked.

    Used for adapters, in turns: the memory is that of the largest turn, however many there are. And for base weights
    one bucket or one layer at a time, where nothing else will do (`strategy="unshard"`).

    Args:
        names: for errors.
        shards: the same tensors in the same order on every rank.
        ranks: making it and `run` are collective over them.
        turns: for each turn the numbers of the shards that it brings together; default: one turn, all of them.
    """

    def __init__(
        self,
        names: Sequence[str],
        shards: Sequence[Shard],
        ranks: Ranks,
        device: torch.device,
        turns: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._ranks, talk = ranks, ranks.talks_on(device)
        tensors = list(zip(names, shards, divide(names, shards, ranks), strict=True))
        turns = [range(len(tensors))] if turns is None else turns
        with ranks.vote("bringing shards together"):
            self._lay_out([_Turn([tensors[i] for i in turn], ranks) for turn in turns], device, talk)
        self._ahead: int | None = None
        self._wait: Callable[[], None] | None = None

    def _lay_out(self, turns: list[_Turn], device: torch.device, talk: torch.device) -> None:
        self._turns = turns
        packed = max((sum(turn.sizes) for turn in self._turns), default=0)
        whole = max((turn.nbytes for turn in self._turns), default=0)
        self._packed = torch.empty(packed, dtype=torch.uint8, device=talk)
        self._gathered = torch.empty(whole, dtype=torch.uint8, device=talk)
        self._whole = self._gathered if talk == device else torch.empty_like(self._gathered, device=device)
        for turn in self._turns:
            turn.lie_in(self._packed, self._gathered)
        self.wholes = [turn.views(self._whole) for turn in self._turns]
        """For each turn its tensors, as `run` leaves them until the next turn."""
        self.nbytes = sum(turn.received for turn in self._turns)
        """Bytes that one run of every turn receives from other ranks."""
        self.held = packed + whole * (1 if talk == device else 2)
        """Bytes of memory that it keeps."""

    def release(self) -> None:
        """See `Plan.release`."""
        for turn in self._turns:
            turn.pack.release()

    def run(self, turn: int = 0) -> list[Tensor]:
        """Bring the tensors of a turn, as they are now, together, on the current stream; then begin to gather those of
        the next one, so that they travel while these are used.

        An error of this rank is raised after it has begun what the others wait for.
        """
        try:
            if self._ahead != turn:
                self._begin(turn)
            self.wait()
            self._turns[turn].unpack.run()
            if self._whole is not self._gathered:
                self._whole.copy_(self._gathered)
        finally:
            if turn + 1 < len(self._turns):
                self._begin(turn + 1)
        return self.wholes[turn]

    def wait(self) -> None:
        """Wait for the gather that was begun; the next `run` begins anew."""
        wait, self._wait, self._ahead = self._wait, None, None
        if wait is not None:
            wait()

    def _begin(self, turn: int) -> None:
        self.wait()
        self._ahead, step = turn, self._turns[turn]
        if not step.sizes:
            return
        try:
            step.pack.run()
        finally:
            self._wait = self._ranks.all_gather_parts(self._packed, step.sizes)


class _Turn:
    """Which bytes of which rank's part are which box of a tensor.

    Args:
        tensors: of each its name, its shard, and the boxes of it that each rank owns.
    """

    def __init__(self, tensors: Sequence[tuple[str, Shard, Sequence[Sequence[Box]]]], ranks: Ranks) -> None:
        self._tensors, self._rank = tensors, ranks.rank
        self._offsets = [0, *accumulate(aligned(shard.nbytes) for _, shard, _ in tensors)]
        self.nbytes = self._offsets[-1]
        """Of the whole tensors."""
        ends = [0] * ranks.size
        self._regions: list[list[tuple[int, Box, int]]] = [[] for _ in ends]  # tensor, box, offset in the rank's part
        for index, (_, shard, owned) in enumerate(tensors):
            for rank, boxes in enumerate(owned):
                for box in boxes:
                    self._regions[rank].append((index, box, ends[rank]))
                    ends[rank] += aligned(prod(box[1]) * shard.dtype.itemsize)
        self.sizes = even([max(end, _ALIGNMENT) for end in ends]) if tensors else []
        """Bytes of the ranks' parts."""
        self.received = sum(self.sizes) - self.sizes[ranks.rank] if tensors else 0

    def views(self, whole: Tensor) -> list[Tensor]:
        """Return the whole tensors, one after another in a buffer."""
        return [
            view_of(whole[begin:], shard, shard.shape)
            for begin, (_, shard, _) in zip(self._offsets, self._tensors, strict=False)
        ]

    def lie_in(self, packed: Tensor, whole: Tensor) -> None:
        """Plan the way through two buffers, which other turns use, too."""
        gathered = self.views(whole)
        self.pack = Packing()
        out: list[Segment] = []
        for rank, (start, parts) in enumerate(zip(accumulate(self.sizes, initial=0), self._regions, strict=False)):
            for index, box, offset in parts:
                name, shard, _ = self._tensors[index]
                at = view_of(packed[start + offset :], shard, box[1])
                out += copies(name, at, cut(gathered[index], box))
                if rank == self._rank:
                    self.pack.add(name, shard, box, at)
        self.pack.plan()
        self.unpack = Plan(out)


class Packing:
    """Lays what is here of boxes of tensors into a buffer, in one launch; what kernels do not reach is brought."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._away: list[tuple[Tensor, Tensor]] = []

    def add(self, name: str, shard: Shard, box: Box, room: Tensor) -> None:
        """Pack what is here of a box of a tensor into `room`, which has the shape of the box; called before `plan`."""
        for _, inner, mine in shard.views(box):
            if in_reach(mine, room.device):
                self._segments += copies(name, mine, cut(room, inner))
            else:
                self._away.append((cut(room, inner), mine))

    def plan(self) -> None:
        """Build the plan, after everything was added."""
        self._plan = Plan(self._segments)

    def run(self) -> None:
        """Run the plan on the current stream."""
        self._plan.run()
        for there, here in self._away:
            bring(there, here)

    def release(self) -> None:
        """See `Plan.release`."""
        self._plan.release()


def aligned(nbytes: int) -> int:
    """Return the bytes up to where the next tensor may begin."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def view_of(room: Tensor, like: Shard, shape: Sequence[int]) -> Tensor:
    """Return a tensor of a shard's dtype at the beginning of a buffer."""
    return room[: prod(shape) * like.dtype.itemsize].view(like.dtype).view(tuple(shape))
