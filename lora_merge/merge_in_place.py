"""The merges behind `merged`, one a device: weights merged where they lie, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .choices import Rounding
from .errors import NotRestored
from .kernels import backend as kernels
from .kernels.plan import writes
from .kernels.ranges import NARROW, Made, check_in_place, check_range, run_in_range
from .kernels.replaced import ReplacedRows
from .kernels.segments import raw
from .kernels.tracked.plan import TrackedPlan
from .models.delta import Delta, Job, whole_job
from .models.operands import Operands, Turn, merge_plan
from .shards import cut
from .shards.exchange import Exchange
from .shards.ranks import Ranks, noted
from .stream.buckets import BUCKET_BYTES, batched

ROW_SCALES: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()
"""DoRA's factors of all rows of weights that are merged in place, or were last: float32 `[out]`, by their module."""


class InPlaceMerge:
    """The deltas of one device, merged where they lie.

    A weight that is merged in place is tracked, and rows that are replaced are kept; what a tied one's other users get
    is new: nothing to restore.

    Attributes:
        places: names of weights and addresses of what is merged of them.
        needs_base: whether what is merged depends on values of the base, as DoRA's factors do.
        seed: that the next merge draws with; None: it rounds to nearest.

    Args:
        rounding: as of `Plan.run`.
    """

    def __init__(
        self,
        deltas: Sequence[Delta],
        jobs: Sequence[Job],
        ranks: Ranks,
        device: torch.device,
        rounding: Rounding = "nearest",
    ) -> None:
        self.seed: int | None = None
        self._rounding = rounding
        self._operands = Operands([Turn(deltas, jobs)], ranks, device, private=True)
        self._scales = self._scales_of(deltas)
        here = [job for job in jobs if job.source is job.destination]
        self.places = [(job.delta.name, job.source.data_ptr()) for job in jobs]
        segments = [segment for job in here for segment in self._operands.segments(job)]
        self._tracked = TrackedPlan([segment for segment in segments if segment.rank], rounding=rounding)
        self._replaced = ReplacedRows([segment for segment in segments if not segment.rank])
        self._apart = merge_plan([job for job in jobs if job.source is not job.destination], self._operands)
        self._device, self._narrow = device, any(job.source.dtype == NARROW for job in here)
        self._rows = {job.delta.name for job in here if job.delta.magnitude is not None}
        self.needs_base = bool(self._rows)

    def _scales_of(self, deltas: Sequence[Delta]) -> WeakKeyDictionary[nn.Module, Tensor]:
        """Return where DoRA's factors lie, by owner of the delta."""
        scales = ((delta.owner, self._operands.row_scale(delta)) for delta in deltas)
        return WeakKeyDictionary({o: scale for o, scale in scales if o is not None and scale is not None})

    def release(self) -> None:
        """See `Plan.release`."""
        self._operands.release()
        self._tracked.release()
        self._apart.release()

    def gather(self, first: Callable[[], object]) -> None:
        """Do what is collective over the ranks; `first`: to be called before a weight is written here."""
        self._operands.refresh()
        ROW_SCALES.update(self._scales)

    def read_as(self, other: InPlaceMerge) -> bool:
        """Return True if the last `gather` of both has read the same bits of the same adapters."""
        return self._operands.read_as(other._operands)

    def merge(self, aside: Callable[[], object], weights: Iterable[Tensor]) -> None:
        """Merge.

        Args:
            aside: to be called while the device works; or not.
            weights: what is merged in place, live.

        Raises:
            InvalidInput: merged values are beyond float16.
        """

        self._tracked.seed = self.seed
        self._tracked.merge(aside)
        self._replaced.merge(weights)
        self._check(weights)
        run_in_range(self._apart, {"rounding": self._rounding, "seed": self.seed})

    def remerge(self, before: InPlaceMerge, weights: Iterable[Tensor]) -> None:
        """Merge in the place of another one of the same weights, all of them in place, that is merged.

        Args:
            before: brings back what this has not taken over, where this raises.
            weights: as for `merge`.

        Raises:
            InvalidInput: as `merge`; NotRestored: as `unmerge`.
        """
        before._replaced.unmerge()
        self._tracked.seed = self.seed
        self._tracked.remerge(before._tracked)
        self._replaced.merge(weights)
        self._check(weights)

    def _check(self, weights: Iterable[Tensor]) -> None:
        """Bring the base back and raise `InvalidInput` where merged values are beyond float16."""

        def in_place() -> None:
            self._tracked.merge()
            self._replaced.merge(weights)

        if self._narrow:
            names = {place: name for name, place in self.places}
            mine = ((names.get(w.data_ptr(), "a weight"), w) for w in weights if w.device == self._device)
            results = ((name, w, name in self._rows) for name, w in mine)
            check_in_place(results, lambda: self.unmerge(kernels.idle), in_place)

    def unmerge(self, aside: Callable[[], object]) -> None:
        """Put back what was merged in place, where something was; `aside` as for `merge`."""
        errors: list[Exception] = []
        with noted(errors):
            self._tracked.unmerge(aside)
        with noted(errors):
            self._replaced.unmerge()
        if errors:
            raise errors[0] if len(errors) == 1 else NotRestored("; ".join(map(str, errors)))

    def moved(self, moves: kernels.Moves) -> bool:
        """See `TrackedPlan.moved`."""
        return self._tracked.moved(moves)


class UnshardedMerge(InPlaceMerge):
    """Whole weights, a bucket of them at a time: gathered, merged, and each rank keeps what is its own."""

    def __init__(
        self,
        deltas: Sequence[Delta],
        jobs: Sequence[Job],
        ranks: Ranks,
        device: torch.device,
        rounding: Rounding = "nearest",
    ) -> None:
        self._operands = Operands([Turn(deltas, everything={delta.name for delta in deltas})], ranks, device)
        self._scales = self._scales_of(deltas)
        self._deltas, self._jobs, self._ranks, self._device = deltas, jobs, ranks, device
        self.places = [(job.delta.name, job.source.data_ptr()) for job in jobs]
        self._bases: list[Tensor] = []

    def gather(self, first: Callable[[], object]) -> None:
        """Gather and merge. An error of this rank is raised after the collectives."""
        errors: list[Exception] = []
        with noted(errors):
            super().gather(first)
        with noted(errors):
            self._bases = [job.destination.clone() for job in self._jobs]
            first()
        for batch in batched(self._deltas, [delta.weight.nbytes for delta in self._deltas], BUCKET_BYTES):
            with noted(errors):
                names = [delta.name for delta in batch]
                exchange = Exchange(names, [delta.weight for delta in batch], self._ranks, self._device)
                wholes = dict(zip(names, exchange.run(), strict=True))
                if not errors:
                    self._merge_wholes(batch, wholes)
        if errors:
            raise errors[0]

    @writes
    def _merge_wholes(self, deltas: Sequence[Delta], wholes: dict[str, Tensor]) -> None:
        merge_plan([whole_job(d, wholes[d.name], wholes[d.name]) for d in deltas], self._operands).run()
        for job in (job for job in self._jobs if job.delta.name in wholes):
            job.destination.copy_(cut(wholes[job.delta.name], (job.start, tuple(job.destination.shape))))

    def merge(self, aside: Callable[[], object], weights: Iterable[Tensor]) -> None:
        """Check the range of what `gather` merged; raises as `InPlaceMerge.merge`."""
        made = [
            Made(job.delta.name, base, job.destination, job.delta.magnitude is not None)
            for job, base in zip(self._jobs, self._bases, strict=True)
        ]
        check_range([(some.name, some.result) for some in made], lambda: made)

    def unmerge(self, aside: Callable[[], object]) -> None:
        for job, base in zip(self._jobs, self._bases, strict=False):  # none before `gather`
            copy_bits(job.destination, base)

    def moved(self, moves: kernels.Moves) -> bool:
        return True  # by tensors, which know where they lie


@writes
def copy_bits(to: Tensor, source: Tensor) -> None:
    """Copy the bits; the values where a parameter was converted."""
    with torch.inference_mode():
        raw(to).copy_(raw(source)) if to.dtype == source.dtype else to.copy_(source)
