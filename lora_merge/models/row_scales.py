"""Row scales: DoRA's factor of each row, from the norms of whole rows of base and adapter together."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..inference import outside_inference_mode
from ..kernels.packed import in_reach
from ..kernels.plan import Plan
from ..kernels.segments import Segment
from ..shards import Box, Shard
from ..shards.owners import divide
from ..shards.ranks import Ranks
from .delta import Delta, Job, in_place, rectangles
from .staging import Copies, Staging, Storages, needed

# So that the root of DoRA's norms has the same bits on every rank: oneMKL's first call of a function, where several
# threads make it together, now and then is less exact (pytorch/pytorch#188792). One element is one thread's.
torch.ones(1, dtype=torch.float64, device="cpu").sqrt()

_BROUGHT = 1 << 26
"""Bytes of weights that are brought and whose norms are taken at a time."""


class Adapters(Protocol):
    """Adapters as the kernels read them: `Operands`, of which this is all that norms need."""

    def whole(self, shard: Shard, turn: int) -> Tensor:
        """Return a magnitude that was gathered for a turn, or lies here whole."""

    def scaled_segments(self, job: Job, turn: int, row_scale: Tensor | None) -> list[Segment]:
        """Return the segments of a job of a turn, with these row factors."""


class _Round:
    """Jobs of which norms are taken in one launch, on one device: a plan has each place once (a weight that is tied
    comes once for each of its names), and not too much is brought from elsewhere.

    Attributes:
        nbytes: of what is brought.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._places = device, set[int]()
        self.jobs: list[Job] = []
        self.nbytes = 0

    def is_away(self, job: Job) -> bool:
        return not in_reach(job.source, self._device)

    def take(self, job: Job) -> bool:
        """Take the job and return True if there is room for it."""
        place, more = job.source.data_ptr(), needed(job.source) if self.is_away(job) else 0
        if place in self._places or (more and self.nbytes and self.nbytes + more > _BROUGHT):
            return False
        self._places.add(place)
        self.jobs.append(job)
        self.nbytes += more
        return True


def _parts(job: Job) -> Iterator[Job]:
    """Cut a job into parts, none of which is much to bring."""
    (first, *start), source = job.start, job.source
    many = max(_BROUGHT // max(source.nbytes // len(source), 1), 1)
    for at in range(0, len(source), many):
        part = source[at : at + many]
        yield job._replace(start=(first + at, *start), source=part, destination=part)


class _Norms(NamedTuple):
    """A round, laid out.

    Args:
        copied: brings what lies elsewhere.
        plan: takes the norms.
        sums: the places to which these are added.
    """

    copied: Copies
    plan: Plan
    sums: list[Tensor]


class _Scaled(NamedTuple):
    """The deltas whose rows are scaled first in one turn.

    Args:
        rounds: that take norms of rows.
        magnitudes: of the deltas.
        norms: float64, squared, all rows of all of them.
        scale: float32, the same rows.
    """

    rounds: list[_Norms]
    magnitudes: list[Tensor]
    norms: Tensor
    scale: Tensor


class RowScales:
    """DoRA (Liu et al. 2024, eq. 5): rows of W + D keep their direction and get the magnitude as their norm.

    Weights that kernels do not reach are brought, some at a time.

    Args:
        turns: the deltas whose rows are scaled first in each turn; all have a magnitude.
        adapters: of these turns.
        ranks: making `RowScales` and `run` are collective over them.
        everywhere: names of the deltas for which every rank needs the factors of all rows.

    Attributes:
        held: bytes of the memory through which weights are brought.
    """

    @outside_inference_mode
    def __init__(
        self,
        turns: Sequence[Sequence[Delta]],
        adapters: Adapters,
        ranks: Ranks,
        device: torch.device,
        everywhere: Container[str],
    ) -> None:
        deltas = [d for turn in turns for d in turn]
        owned = divide([d.name for d in deltas], [d.weight for d in deltas], ranks)
        # Where a row is split over ranks, its parts are added up, each once; and where every rank needs all rows.
        shared = any(d.name in everywhere or _splits(d, boxes) for d, boxes in zip(deltas, owned, strict=True))
        self._ranks = ranks if shared else Ranks()
        self._scales: dict[str, Tensor] = {}
        self._turns: list[_Scaled | None] = []
        mine = {d.name: boxes[ranks.rank] for d, boxes in zip(deltas, owned, strict=True)}
        with ranks.vote("norms of rows"):
            self._lay_out(turns, mine, adapters, device)

    def _lay_out(
        self,
        turns: Sequence[Sequence[Delta]],
        mine: Mapping[str, Sequence[Box]],
        adapters: Adapters,
        device: torch.device,
    ) -> None:
        rounds = [self._rounds(turn, mine, device) for turn in turns]
        self._staging = Staging(device, max((one.nbytes for some in rounds for one in some), default=0))
        self.held = 0 if self._staging.memory is None else self._staging.memory.nbytes
        for number, (turn, some) in enumerate(zip(turns, rounds, strict=True)):
            rows = [d.shape[0] for d in turn]
            norms = torch.zeros(sum(rows), dtype=torch.float64, device=device)
            scale = torch.ones(sum(rows), dtype=torch.float32, device=device)
            self._scales |= {d.name: part for d, part in zip(turn, scale.split(rows), strict=True)}
            parts = {d.name: part for d, part in zip(turn, norms.split(rows), strict=True)}
            laid = [self._norms(one, parts, adapters, number) for one in some]
            magnitudes = [adapters.whole(d.magnitude, number) for d in turn if d.magnitude is not None]
            self._turns.append(_Scaled(laid, magnitudes, norms, scale) if turn else None)

    def _rounds(self, deltas: Sequence[Delta], mine: Mapping[str, Sequence[Box]], device: torch.device) -> list[_Round]:
        rounds: list[_Round] = []
        for job in (job for delta in deltas for job in in_place(delta)):
            owned = self._ranks.alone or (job.start, tuple(job.source.shape)) in mine[job.delta.name]
            for part in (job,) if in_reach(job.source, device) else _parts(job):
                if owned and not any(one.take(part) for one in rounds):
                    rounds.append(_Round(device))
                    rounds[-1].take(part)
        return rounds

    def _norms(self, some: _Round, parts: Mapping[str, Tensor], adapters: Adapters, turn: int) -> _Norms:
        """Lay out a round of a turn; `parts`: by name of the delta, where the norms of all its rows are added up."""
        away = [job.source for job in some.jobs if some.is_away(job)]
        rooms = self._staging.lay_out(away)
        segments: list[Segment] = []
        sums: list[Tensor] = []
        coming = iter(rooms)
        for job in some.jobs:
            name, here = job.delta.name, next(coming) if some.is_away(job) else job.source
            job = job._replace(source=here, destination=here)
            segments += adapters.scaled_segments(job, turn, self._scales[name])
            sums += [parts[name][r.row : r.row + r.source.shape[0]] for r in rectangles(job)]
        return _Norms(Copies(list(zip(rooms, away, strict=True))), Plan(segments), sums)

    def of(self, delta: Delta) -> Tensor | None:
        """Return float32 `[out]`; None for a delta without magnitude."""
        return self._scales.get(delta.name)

    def release(self) -> None:
        """Release all turns, like `Plan.release`."""
        for turn in self._turns:
            for some in turn.rounds if turn is not None else ():
                some.copied.release()
                some.plan.release()
        self._staging.wait()

    def run(self, turn: int, storages: Storages | None) -> None:
        """Take the norms of a turn's rows, and scale with them from here on. An error of this rank is raised after the
        sum over the ranks.

        Args:
            storages: see `Operands.refresh`.
        """
        some = self._turns[turn]
        if some is None:
            return
        some.norms.zero_()
        try:
            for one in some.rounds:
                if storages is not None and not one.copied.hold(self._staging.memory, storages):
                    raise RuntimeError(
                        "weights that are brought are not where they were when their norms were laid out"
                    )
                self._staging.bring(one.copied)
                for rows, norms in zip(one.sums, one.plan.row_norms(), strict=True):
                    rows += norms
        finally:
            self._ranks.sum_(some.norms)
        magnitudes = torch.cat([magnitude.flatten() for magnitude in some.magnitudes])
        some.scale.copy_(magnitudes.double().div_(some.norms.sqrt()))


def _splits(delta: Delta, owned: Sequence[Sequence[Box]]) -> bool:
    """Return True if some row of a delta's matrix lies on several ranks."""
    dims = range(1) if delta.transposed else range(1, len(delta.weight.shape))
    return any(size[d] != delta.weight.shape[d] for boxes in owned for _, size in boxes for d in dims)
