"""Operands: what the kernels read of the adapters on this rank; and the plan that merges with them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.plan import Plan
from ..kernels.scaled.weights import Scaled
from ..kernels.segments import Segment, copies
from ..shards import Piece, Shard, whole
from ..shards.exchange import Exchange
from ..shards.ranks import Ranks, uninterrupted
from .delta import Delta, Job, Rectangle, in_place, rectangles
from .row_scales import RowScales
from .staging import Storages


class Turn(NamedTuple):
    """What is merged at a time: all of a model, or one bucket of its stream.

    Args:
        deltas: that any rank merges then; the same ones in the same order on every rank.
        jobs: what this rank merges then (or boxes like it).
        everything: names of the deltas whose factors are all gathered whole.
    """

    deltas: Sequence[Delta]
    jobs: Sequence[Job] = ()
    everything: Container[str] = frozenset()


class _Factor:
    """lora_A or lora_B as this rank can read it: the local piece that holds what is asked for, else the whole."""

    def __init__(self, shard: Shard, here: bool, gathered: Tensor | None = None) -> None:
        self.shard, self.here = shard, here
        self.all = shard.pieces[0].tensor if shard.whole and here else gathered

    def window(self, dim: int, first: int, count: int) -> Tensor | None:
        """Return rows (dim 0) or columns (dim 1) of a matrix, the other dimension whole, out of one local piece."""
        if not self.here or len(self.shard.shape) != 2:
            return None
        start, size = [0, 0], list(self.shard.shape)
        start[dim], size[dim] = first, count
        return self.shard.window((tuple(start), tuple(size)))

    def lora_A(self, delta: Delta, r: Rectangle) -> Tensor | None:
        """Return `[r, cols]` for a rectangle; None where it is not at hand."""
        experts, cols = delta.experts or 1, r.source.shape[1]
        if self.all is not None:
            return self.all.view(experts, -1, delta.shape[1])[r.expert, :, r.col : r.col + cols]
        return self.window(1, r.col, cols) if experts == 1 else None

    def lora_B(self, delta: Delta, r: Rectangle) -> Tensor | None:
        """Return `[rows, r]` for a rectangle; None where it is not at hand."""
        experts, rows = delta.experts or 1, r.source.shape[0]
        if self.all is not None:
            return self.all.view(delta.shape[0], -1, experts)[r.row : r.row + rows, :, r.expert]
        found = self.window(0, r.row, rows)
        return found if found is None else found.unflatten(1, (-1, experts))[:, :, r.expert]


class Operands:
    """What the kernels read of a model's adapters on this rank, in turns that follow each other.

    An adapter is read where it lies if its pieces line up with the weight's; what does not line up is gathered, and
    only that. Several adapters lie side by side in float32 buffers of adapter size, their scaling folded into lora_B,
    so that their sum is rounded once. DoRA's row factors come from the norms of whole rows, taken in the first turn
    that a weight comes in; weights that kernels do not reach are brought for that, some at a time. All turns share the
    memory of what is gathered, of what lies side by side and of what is brought.

    Args:
        turns: what will be merged. Deltas whose weights lie on none of `ranks` are left out.
        ranks: making `Operands` and `refresh` are collective over them.
        private: adapters are read from copies that `refresh` makes, so that they may change while weights are merged;
            every rank has DoRA's factors of all rows, which gradients take.
    """

    def __init__(self, turns: Sequence[Turn], ranks: Ranks, device: torch.device, *, private: bool = False) -> None:
        self._device, self._uninterrupted = device, uninterrupted(not ranks.alone)
        self._read: Tensor | None = None  # the copies of what lies here, if they are private
        turns = _held(turns, ranks)
        deltas = list({delta.name: delta for turn in turns for delta in turn.deltas}.values())
        named = {id(shard): (d.name, shard) for d in deltas for shard in d.shards()}
        named |= {id(d.magnitude): (d.name, d.magnitude) for d in deltas if d.magnitude is not None}
        self._factors = {key: _Factor(shard, shard.device == device) for key, (_, shard) in named.items()}
        scaled = _scaled(turns)
        lacking = [self._lacking(turn, some) for turn, some in zip(turns, scaled, strict=True)]
        self._exchange, self._gathered = self._gather(named, lacking, ranks)
        names = {key: name for key, (name, _) in named.items()}
        with ranks.vote("adapters"):
            self._copies = Plan(self._made_private(names)) if private else None
            self._beside = _Beside(turns, device)
            self._pairs = [
                {delta.name: self._pair(delta, number) for delta in turn.deltas if delta.factors}
                for number, turn in enumerate(turns)
            ]
            self._rows = [
                {d.name: [self.whole(rows.values, number) for rows in d.rows] for d in turn.deltas if d.rows}
                for number, turn in enumerate(turns)
            ]
        everywhere = {d.name for turn in turns for d in turn.deltas if private or d.name in turn.everything}
        self._dora = RowScales(scaled, self, ranks, device, everywhere) if any(scaled) else None

    def _gather(
        self, named: dict[int, tuple[str, Shard]], lacking: Sequence[set[int]], ranks: Ranks
    ) -> tuple[Exchange, list[dict[int, Tensor]]]:
        """Return what gathers in each turn the factors that any rank lacks then, and where these come to lie, by id of
        the shard."""
        numbers, keys = {key: number for number, key in enumerate(named)}, list(named)
        by_rank = ranks.gather([sorted(numbers[key] for key in some) for some in lacking])
        needed = [sorted(set().union(*some)) for some in zip(*by_rank, strict=True)]
        wanted = {number: at for at, number in enumerate(sorted(set().union(*needed)))}
        tensors = [named[keys[number]] for number in wanted]
        in_turns = [[wanted[number] for number in some] for some in needed]
        exchange = Exchange([n for n, _ in tensors], [s for _, s in tensors], ranks, self._device, in_turns)
        return exchange, [
            {keys[number]: tensor for number, tensor in zip(some, wholes, strict=True)}
            for some, wholes in zip(needed, exchange.wholes, strict=True)
        ]

    def _made_private(self, names: dict[int, str]) -> list[Segment]:
        """Make every factor that lies here a copy of its pieces, all in one buffer; return the work of filling it."""
        pieces = [(key, p) for key, f in self._factors.items() if f.here for p in f.shard.pieces]
        sizes = [-(-p.tensor.nbytes // 16) * 16 for _, p in pieces]
        flat = self._read = torch.zeros(sum(sizes), dtype=torch.uint8, device=self._device)  # gaps have the same bits
        work: list[Segment] = []
        copied: dict[int, list[Piece]] = {key: [] for key, _ in pieces}
        for (key, piece), room in zip(pieces, flat.split(sizes), strict=True):
            live = piece.tensor
            copy = room[: live.nbytes].view(live.dtype).view(live.shape)
            work += copies(names[key], live, copy)
            copied[key].append(Piece(piece.start, copy))
        for key, found in copied.items():
            self._factors[key] = _Factor(replace(self._factors[key].shard, pieces=tuple(found)), True)
        return work

    def _lacking(self, turn: Turn, scaled: Sequence[Delta]) -> set[int]:
        """Return ids of the shards that have to be gathered for this rank in a turn, in which these rows are scaled
        first."""
        lacking = {id(d.magnitude) for d in scaled}
        lacking |= {id(rows.values) for delta in turn.deltas for rows in delta.rows}
        for delta in turn.deltas:
            if delta.name in turn.everything or len(delta.factors) > 1:
                lacking |= {id(shard) for shard in delta.shards()}
        for job in (*turn.jobs, *(job for delta in scaled for job in in_place(delta))):
            unsure = [f for f in job.delta.shards() if self._factors[id(f)].all is None and id(f) not in lacking]
            for r in rectangles(job) if unsure else ():
                for f in job.delta.factors:
                    if self._factors[id(f.lora_A)].lora_A(job.delta, r) is None:
                        lacking.add(id(f.lora_A))
                    if self._factors[id(f.lora_B)].lora_B(job.delta, r) is None:
                        lacking.add(id(f.lora_B))
        return {key for key in lacking if self._factors[key].all is None}

    def _factor(self, shard: Shard, turn: int) -> _Factor:
        factor, gathered = self._factors[id(shard)], self._gathered[turn].get(id(shard))
        return factor if gathered is None else _Factor(factor.shard, factor.here, gathered)

    def _pair(self, delta: Delta, turn: int) -> tuple[_Factor, _Factor, float]:
        """Return lora_A, lora_B and scaling, of several adapters side by side."""
        if len(delta.factors) > 1:
            halves = [(self.whole(f.lora_A, turn), self.whole(f.lora_B, turn)) for f in delta.factors]
            return self._beside.pair(delta, turn, halves)
        (f,) = delta.factors
        return self._factor(f.lora_A, turn), self._factor(f.lora_B, turn), f.scaling

    def whole(self, shard: Shard, turn: int = 0) -> Tensor:
        """Return a factor or magnitude that was gathered for a turn, or lies here whole."""
        found = self._factor(shard, turn).all
        assert found is not None
        return found

    def factors(self, delta: Delta, turn: int = 0) -> tuple[Tensor, Tensor, float]:
        """Return lora_A `[E, R, in]`, lora_B `[out, R, E]` (E = 1 where there are no experts) and scaling, whole, all
        adapters side by side; for a delta in `everything`."""
        a, b, scaling = self._pairs[turn][delta.name]
        assert a.all is not None
        assert b.all is not None
        (out, cols), experts = delta.shape, delta.experts or 1
        return a.all.view(experts, -1, cols), b.all.view(out, -1, experts), scaling

    def row_scale(self, delta: Delta) -> Tensor | None:
        """Return float32 `[out]`: DoRA's factor of each row, as of the last `refresh`; None where there is none."""
        return None if self._dora is None else self._dora.of(delta)

    def segments(self, job: Job, turn: int = 0) -> list[Segment]:
        return self.scaled_segments(job, turn, self.row_scale(job.delta))

    def scaled_segments(self, job: Job, turn: int, row_scale: Tensor | None) -> list[Segment]:
        """Return `segments` with row factors that come from elsewhere."""
        if job.delta.rows:
            return [s for r in rectangles(job) for s in self._replaced(job.delta, r, turn)]
        (a, b, scaling), delta = self._pairs[turn][job.delta.name], job.delta
        segments = []
        for r in rectangles(job):
            lora_A, lora_B = a.lora_A(delta, r), b.lora_B(delta, r)
            assert lora_A is not None, f"{delta.name}: lora_A was not gathered for this"
            assert lora_B is not None, f"{delta.name}: lora_B was not gathered for this"
            scale = None if row_scale is None else row_scale[r.row : r.row + r.source.shape[0]]
            segments.append(
                Segment(delta.name, r.source, r.destination, lora_A, lora_B, scaling, scale, r.first, r.pitch)
            )
        return segments

    def _replaced(self, delta: Delta, r: Rectangle, turn: int) -> Iterator[Segment]:
        """Yield the copies of a rectangle of which an adapter replaces rows: these, and the base's others, which stay
        where they are if it is merged in place."""
        stays = r.source.data_ptr() == r.destination.data_ptr() and r.source.stride() == r.destination.stride()
        values = self._rows[turn][delta.name]
        for first, many, which, at in delta.runs(r.row, r.source.shape[0]):
            begin, cols = first - r.row, r.source.shape[1]
            if which is None and stays:
                continue
            mine = r.source[begin : begin + many]
            source = mine if which is None else values[which][at : at + many, r.col : r.col + cols]
            destination = r.destination[begin : begin + many]
            yield Segment(delta.name, source, destination, first=r.first + begin * r.pitch[0], pitch=r.pitch)

    @property
    def nbytes(self) -> int:
        """Bytes that refreshing every turn receives from other ranks."""
        return self._exchange.nbytes

    @property
    def held(self) -> int:
        """Bytes of the memory that turns share."""
        return self._exchange.held + self._beside.held + (0 if self._dora is None else self._dora.held)

    def release(self) -> None:
        """Release what is read of the weights, like `Plan.release`, when no turn follows. The adapters, which are
        small, stay at hand."""
        self._exchange.wait()
        self._exchange.release()
        if self._copies is not None:
            self._copies.release()
        if self._dora is not None:
            self._dora.release()

    def read_as(self, other: Operands) -> bool:
        """Return True if the last `refresh` of both has read the same bits of the same adapters; False where some lie
        elsewhere, or are not private. Waits for the device."""
        here = all(factor.here for factor in (*self._factors.values(), *other._factors.values()))
        mine, others = self._read, other._read
        return here and mine is not None and others is not None and torch.equal(mine, others)

    def refresh(self, turn: int = 0, storages: Storages | None = None) -> None:
        """Read the live adapters of a turn again, on the current stream; those of the turn before may be gone.

        An error of this rank, and an interrupt, is raised after the collectives.

        Args:
            storages: of the live weights; needed after `release`, where some are brought.
        """
        with self._uninterrupted():
            try:
                if self._exchange.held:
                    self._exchange.run(turn)
                if self._copies is not None:
                    self._copies.run()
                if self._beside.held:
                    self._beside.run(turn)
            finally:
                if self._dora is not None:
                    self._dora.run(turn, storages)


def _held(turns: Sequence[Turn], ranks: Ranks) -> list[Turn]:
    """Return the turns, each delta once (its tensor may have several names), without deltas of whose weight no rank
    holds anything."""
    here = {delta.name: bool(delta.weight.pieces) for turn in turns for delta in turn.deltas}
    held = ranks.gather(list(here.values()))
    kept = {name for name, *flags in zip(here, *held, strict=True) if any(flags)}
    return [
        turn._replace(deltas=[d for name, d in {d.name: d for d in turn.deltas}.items() if name in kept])
        for turn in turns
    ]


def _scaled(turns: Sequence[Turn]) -> list[list[Delta]]:
    """Return for each turn the deltas with a magnitude that come there first."""
    known: set[str] = set()
    found = []
    for turn in turns:
        found.append([delta for delta in turn.deltas if delta.magnitude is not None and delta.name not in known])
        known.update(delta.name for delta in turn.deltas)
    return found


class _Beside:
    """Where several adapters of one delta lie side by side, in float32: `[E*R, in]` and `[out, R*E]`."""

    def __init__(self, turns: Sequence[Turn], device: torch.device) -> None:
        several = [[delta for delta in turn.deltas if len(delta.factors) > 1] for turn in turns]
        most = max((sum(sum(map(_room, _shapes(delta))) for delta in some) for some in several), default=0)
        self._flat = torch.empty(most, dtype=torch.float32, device=device)
        self.held = self._flat.nbytes
        self._ends = [0] * len(turns)
        self._copied: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in turns]
        self._scaled: list[tuple[list[Tensor], list[float]]] = [([], []) for _ in turns]

    def pair(self, delta: Delta, turn: int, halves: Sequence[tuple[Tensor, Tensor]]) -> tuple[_Factor, _Factor, float]:
        """Return lora_A, lora_B and scaling, as they will be in a turn, out of those of each adapter."""
        (out, cols), experts = delta.shape, delta.experts or 1
        shapes = _shapes(delta)
        begin, self._ends[turn] = self._ends[turn], self._ends[turn] + sum(map(_room, shapes))
        rooms = self._flat[begin:].split([_room(shapes[0]), len(self._flat) - begin - _room(shapes[0])])
        lora_A, lora_B = (room[: prod(shape)].view(shape) for room, shape in zip(rooms, shapes, strict=True))
        ranks = [f.lora_A.shape[0] // experts for f in delta.factors]
        (to, source), (scaled, scaling), slots = self._copied[turn], self._scaled[turn], lora_B.split(ranks, dim=1)
        to += [*lora_A.split(ranks, dim=1), *slots]
        source += [a.view(experts, -1, cols) for a, _ in halves]
        source += [b.view(out, -1, experts) for _, b in halves]
        scaled += slots
        # The largest scaling stays with the product: lora_B times it may be beyond float32 where the product is not.
        largest = max(abs(f.scaling) for f in delta.factors) or 1.0
        scaling += [f.scaling / largest for f in delta.factors]
        return _Factor(whole(lora_A.view(-1, cols)), True), _Factor(whole(lora_B.view(out, -1)), True), largest

    def run(self, turn: int) -> None:
        to, source = self._copied[turn]
        if to:
            torch._foreach_copy_(to, source)
            torch._foreach_mul_(*self._scaled[turn])


def _shapes(delta: Delta) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return lora_A `[E, R, in]` and lora_B `[out, R, E]` of all adapters side by side."""
    (out, cols), experts = delta.shape, delta.experts or 1
    rank = sum(f.lora_A.shape[0] // experts for f in delta.factors)
    return (experts, rank, cols), (out, rank, experts)


def _room(shape: Sequence[int]) -> int:
    """Return how many elements a float32 tensor takes, up to where the next one may begin."""
    return -(-prod(shape) // 64) * 64


def merge_plan(
    jobs: Sequence[Job],
    operands: Operands,
    copies: Sequence[Segment] = (),
    turn: int = 0,
    scaled: Sequence[Scaled] = (),
) -> Plan:
    """Plan jobs of one device in one launch: checked and laid out once, run every step.

    Args:
        operands: made for them; whoever runs the plan refreshes these first.
        copies: further segments of the same launch (what has no adapter).
        turn: of the operands, the one that the jobs belong to.
        scaled: see `Plan`.

    Raises:
        InvalidInput: something does not fit; nothing was written.
    """
    return Plan([*copies, *(segment for job in jobs for segment in operands.segments(job, turn))], scaled)
