"""Operands: what the kernels read of the adapters on this rank; and the plan that merges with them."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .delta import Delta, Job, Rectangle, in_place, rectangles
from .exchange import Exchange
from .plan import Plan
from .ranks import Ranks
from .segments import Segment, copies
from .shards import Box, Piece, Shard, whole
from .shards.owners import divide


class _Factor:
    """lora_A or lora_B as this rank can read it: the local piece that holds what is asked for, else the whole."""

    def __init__(self, shard: Shard, here: bool) -> None:
        self.shard, self.here = shard, here
        self.all: Tensor | None = shard.pieces[0].tensor if shard.whole and here else None

    def window(self, dim: int, first: int, count: int) -> Tensor | None:
        """Rows (dim 0) or columns (dim 1) of a matrix, the other dimension whole, out of one local piece."""
        if not self.here or len(self.shard.shape) != 2:
            return None
        start, size = [0, 0], list(self.shard.shape)
        start[dim], size[dim] = first, count
        return self.shard.window((tuple(start), tuple(size)))

    def lora_A(self, delta: Delta, r: Rectangle) -> Tensor | None:
        """`[r, cols]` for a rectangle; None where it is not at hand."""
        experts, cols = delta.experts or 1, r.source.shape[1]
        if self.all is not None:
            return self.all.view(experts, -1, delta.shape[1])[r.expert, :, r.col : r.col + cols]
        return self.window(1, r.col, cols) if experts == 1 else None

    def lora_B(self, delta: Delta, r: Rectangle) -> Tensor | None:
        """`[rows, r]` for a rectangle; None where it is not at hand."""
        experts, rows = delta.experts or 1, r.source.shape[0]
        if self.all is not None:
            return self.all.view(delta.shape[0], -1, experts)[r.row : r.row + rows, :, r.expert]
        found = self.window(0, r.row, rows)
        return found if found is None else found.unflatten(1, (-1, experts))[:, :, r.expert]


class Operands:
    """What the kernels read of a model's adapters on this rank.

    An adapter is read where it lies if its pieces line up with the weight's; what does not line up is gathered, and
    only that. Several adapters lie side by side in float32 buffers of adapter size, their scaling folded into lora_B,
    so that their sum is rounded once. DoRA's row factors come from the norms of whole rows.

    Args:
        deltas: the same ones in the same order on every rank; those whose weights lie on none of `ranks` are left out.
        ranks: making `Operands` and `refresh` are collective over them.
        device: of the kernels.
        jobs: what will be merged with them (or boxes like it).
        everything: names of the deltas whose factors are all gathered whole.
        private: adapters are read from copies that `refresh` makes, so that they may change while weights are merged.
    """

    def __init__(
        self,
        deltas: Sequence[Delta],
        ranks: Ranks,
        device: torch.device,
        jobs: Sequence[Job] = (),
        *,
        everything: Container[str] = (),
        private: bool = False,
    ) -> None:
        self._device = device
        held = ranks.gather([bool(delta.weight.pieces) for delta in deltas])
        deltas = [delta for delta, *flags in zip(deltas, *held, strict=True) if any(flags)]
        named = {id(shard): (d.name, shard) for d in deltas for shard in d.shards()}
        named |= {id(d.magnitude): (d.name, d.magnitude) for d in deltas if d.magnitude is not None}
        self._factors = {key: _Factor(shard, shard.device == device) for key, (_, shard) in named.items()}
        lacking = self._lacking(deltas, jobs, everything)
        places = {key: i for i, key in enumerate(named)}
        needed = {i for some in ranks.gather(sorted(places[key] for key in lacking)) for i in some}
        wanted = [item for i, item in enumerate(named.values()) if i in needed]
        self._exchange = Exchange([n for n, _ in wanted], [s for _, s in wanted], ranks, device)
        for (_, shard), gathered in zip(wanted, self._exchange.wholes, strict=True):
            factor = self._factors[id(shard)]
            factor.all = gathered if factor.all is None else factor.all
        self._copies = Plan(self._made_private({key: n for key, (n, _) in named.items()}) if private else ())
        self._to: list[Tensor] = []
        self._from: list[Tensor] = []
        self._scaled: list[Tensor] = []
        self._scaling: list[float] = []
        self._pairs = {delta.name: self._pair(delta) for delta in deltas}
        scaled = [d for d in deltas if d.magnitude is not None]
        self._dora = _RowScales(scaled, self, ranks, everything) if scaled else None

    def _made_private(self, names: dict[int, str]) -> list[Segment]:
        """Makes every factor that lies here a copy of its pieces, all in one buffer; returns the work of filling it."""
        pieces = [(key, p) for key, f in self._factors.items() if f.here for p in f.shard.pieces]
        sizes = [-(-p.tensor.nbytes // 16) * 16 for _, p in pieces]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        work: list[Segment] = []
        copied: dict[int, list[Piece]] = {key: [] for key, _ in pieces}
        for (key, piece), room in zip(pieces, flat.split(sizes), strict=True):
            live = piece.tensor
            copy = room[: live.nbytes].view(live.dtype).view(live.shape)
            work += copies(names[key], live, copy)
            copied[key].append(Piece(piece.start, copy))
        for key, found in copied.items():
            factor = self._factors[key]
            private = _Factor(replace(factor.shard, pieces=tuple(found)), True)
            private.all = factor.all if private.all is None else private.all
            self._factors[key] = private
        return work

    def _lacking(self, deltas: Sequence[Delta], jobs: Sequence[Job], everything: Container[str]) -> set[int]:
        """ids of the shards that have to be gathered for this rank."""
        lacking = {id(d.magnitude) for d in deltas if d.magnitude is not None}
        for delta in deltas:
            if delta.name in everything or len(delta.factors) > 1:
                lacking |= {id(shard) for shard in delta.shards()}
        for job in jobs:
            unsure = [f for f in job.delta.shards() if self._factors[id(f)].all is None and id(f) not in lacking]
            for r in rectangles(job) if unsure else ():
                for f in job.delta.factors:
                    if self._factors[id(f.lora_A)].lora_A(job.delta, r) is None:
                        lacking.add(id(f.lora_A))
                    if self._factors[id(f.lora_B)].lora_B(job.delta, r) is None:
                        lacking.add(id(f.lora_B))
        return {key for key in lacking if self._factors[key].all is None}

    def _pair(self, delta: Delta) -> tuple[_Factor, _Factor, float]:
        """lora_A, lora_B and scaling; of several adapters, buffers `[E*R, in]` and `[out, R*E]`."""
        if len(delta.factors) == 1:
            (f,) = delta.factors
            return self._factors[id(f.lora_A)], self._factors[id(f.lora_B)], f.scaling
        (out, cols), experts = delta.shape, delta.experts or 1
        ranks = [f.lora_A.shape[0] // experts for f in delta.factors]
        lora_A = torch.empty(experts, sum(ranks), cols, dtype=torch.float32, device=self._device)
        lora_B = torch.empty(out, sum(ranks), experts, dtype=torch.float32, device=self._device)
        b_slots = lora_B.split(ranks, dim=1)
        self._to += [*lora_A.split(ranks, dim=1), *b_slots]
        self._from += [self.whole(f.lora_A).view(experts, -1, cols) for f in delta.factors]
        self._from += [self.whole(f.lora_B).view(out, -1, experts) for f in delta.factors]
        self._scaled += b_slots
        self._scaling += [f.scaling for f in delta.factors]
        return _Factor(whole(lora_A.view(-1, cols)), True), _Factor(whole(lora_B.view(out, -1)), True), 1.0

    def whole(self, shard: Shard) -> Tensor:
        """A factor or magnitude that was gathered, or lies here whole."""
        found = self._factors[id(shard)].all
        assert found is not None
        return found

    def factors(self, delta: Delta) -> tuple[Tensor, Tensor, float]:
        """lora_A `[E, R, in]`, lora_B `[out, R, E]` (E = 1 where there are no experts) and scaling, whole, all
        adapters side by side; for a delta in `everything`."""
        a, b, scaling = self._pairs[delta.name]
        assert a.all is not None
        assert b.all is not None
        (out, cols), experts = delta.shape, delta.experts or 1
        return a.all.view(experts, -1, cols), b.all.view(out, -1, experts), scaling

    def segments(self, job: Job) -> list[Segment]:
        """The segments of a job."""
        return self._segments(job, None if self._dora is None else self._dora.of(job.delta))

    def _segments(self, job: Job, row_scale: Tensor | None) -> list[Segment]:
        (a, b, scaling), delta = self._pairs[job.delta.name], job.delta
        return [
            Segment(
                delta.name,
                r.source,
                r.destination,
                a.lora_A(delta, r),
                b.lora_B(delta, r),
                scaling,
                None if row_scale is None else row_scale[r.row : r.row + r.source.shape[0]],
                r.first,
                r.pitch,
            )
            for r in rectangles(job)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes that one `refresh` receives from other ranks."""
        return self._exchange.nbytes

    def release(self) -> None:
        """As `Plan.release`, of what is read of the weights. The adapters, which are small, stay at hand."""
        self._exchange.release()
        self._copies.release()
        if self._dora is not None:
            self._dora.release()

    def refresh(self) -> None:
        """Read the live adapters again, on the current stream."""
        self._exchange.run()
        self._copies.run()
        if self._to:
            torch._foreach_copy_(self._to, self._from)
            torch._foreach_mul_(self._scaled, self._scaling)
        if self._dora is not None:
            self._dora.run()


class _RowScales:
    """DoRA (Liu et al. 2024, eq. 5): rows of W + D keep their direction and get the magnitude as their norm."""

    def __init__(self, deltas: Sequence[Delta], operands: Operands, ranks: Ranks, everywhere: Container[str]) -> None:
        self._magnitudes = [operands.whole(d.magnitude) for d in deltas if d.magnitude is not None]
        rows = [d.shape[0] for d in deltas]
        self._norms = torch.zeros(sum(rows), dtype=torch.float64, device=operands._device)
        self._scale = torch.ones(sum(rows), dtype=torch.float32, device=operands._device)
        self._scales = {d.name: s for d, s in zip(deltas, self._scale.split(rows), strict=True)}
        owned = divide([d.name for d in deltas], [d.weight for d in deltas], ranks)
        # Where a row is split over ranks, its parts are added up, each once; and where every rank needs all rows.
        shared = any(d.name in everywhere or _splits(d, boxes) for d, boxes in zip(deltas, owned, strict=True))
        self._ranks = ranks if shared else Ranks()
        # A plan has each place once; a weight that is tied comes once for each of its names.
        seen: dict[int, int] = {}
        rounds: list[tuple[list[Segment], list[Tensor]]] = []
        for delta, norms, mine in zip(deltas, self._norms.split(rows), owned, strict=True):
            for job in in_place(delta):
                if self._ranks.alone or (job.start, tuple(job.source.shape)) in mine[ranks.rank]:
                    turn = seen[job.source.data_ptr()] = seen.get(job.source.data_ptr(), -1) + 1
                    if turn == len(rounds):
                        rounds.append(([], []))
                    rounds[turn][0].extend(operands._segments(job, self._scales[delta.name]))
                    rounds[turn][1].extend(norms[r.row : r.row + r.source.shape[0]] for r in rectangles(job))
        self._plans = [(Plan(segments), sums) for segments, sums in rounds]

    def of(self, delta: Delta) -> Tensor | None:
        """float32 `[out]`; None for a delta without magnitude."""
        return self._scales.get(delta.name)

    def release(self) -> None:
        for plan, _ in self._plans:
            plan.release()

    def run(self) -> None:
        self._norms.zero_()
        for plan, sums in self._plans:
            for rows, norms in zip(sums, plan.row_norms(), strict=True):
                rows += norms
        self._ranks.sum_(self._norms)
        magnitudes = torch.cat([magnitude.flatten() for magnitude in self._magnitudes])
        self._scale.copy_(magnitudes.double().div_(self._norms.sqrt()))


def _splits(delta: Delta, owned: Sequence[Sequence[Box]]) -> bool:
    """Whether some row of a delta's matrix lies on several ranks."""
    dims = range(1) if delta.transposed else range(1, len(delta.weight.shape))
    return any(size[d] != delta.weight.shape[d] for boxes in owned for _, size in boxes for d in dims)


class MergePlan:
    """Jobs of one device in one launch: checked and laid out once, run every step.

    Args:
        jobs: what is merged.
        operands: made for them; whoever runs the plan refreshes these first.
        copies: further segments of the same launch (what has no adapter).

    Raises:
        InvalidInput: something does not fit; nothing was written.
    """

    def __init__(self, jobs: Sequence[Job], operands: Operands, copies: Sequence[Segment] = ()) -> None:
        self.plan = Plan([*copies, *(segment for job in jobs for segment in operands.segments(job))])

    def release(self) -> None:
        """As `Plan.release`."""
        self.plan.release()

    def run(self, *, rounding: str = "nearest", seed: int | None = None) -> None:
        """As `Plan.run`."""
        self.plan.run(rounding=rounding, seed=seed)
