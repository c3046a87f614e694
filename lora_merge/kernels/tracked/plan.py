"""Merging in place with a way back that costs a sixth of the weights: what rounding lost, in two bits an element.

Unmerging computes `estimate = round(W' - D)`, which lies at most a step or so from W for almost every element. A
merge therefore keeps, per element, `bits(W) - bits(estimate)` in two bits: -1, 0, 1, or an escape, whose raw bits lie
in a side array in order of position. W comes back bit for bit whatever the values are, because an unmerge computes the
same estimate from the same W' and adapters by the same kernel; how good the estimate is decides the size alone.
docs/restore.md has the figures. A checksum of what was written is kept with it: a weight that others have written in
between is found, and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...choices import Rounding
from ...errors import AlreadyMerged, InvalidInput, NotRestored
from ..backend import Moves, Tracked, idle, pick
from ..checks import check_overlaps, check_segment, check_segments
from ..packed import Packed
from ..plan import check_rounding, untraced, writes
from ..segments import FLOATS, Segment, seed_key
from .composed import ComposedTracked


class TrackedPlan:
    """Merges segments in place and restores them bit for bit, from about 2 bits an element.

        plan = TrackedPlan([lora_merge.Segment("q_proj.weight", weight, weight, lora_A, lora_B, 2.0)])
        plan.merge()
        plan.unmerge()

    The merged values are those of `Plan(segments).run()`, bit for bit. Between `merge` and `unmerge` weights, adapters
    and row scales must stay as and where they are, as they are read again on the way back. A write to a weight is found
    and raised; a change of an adapter or row scale is not. How it works: docs/restore.md.

    Args:
        segments: as for a `Plan`, each with its source as its destination (the same view), bf16, fp16 or fp32, any
            strides; several may be pieces of one tensor.
        keep: keep the memory for the way back from one merge to the next, where the backend can.
        rounding: as of `Plan.run`. "stochastic" is merged and restored block by block, by several passes over each, as
            the kernels that do it in one round to nearest.

    Attributes:
        seed: of stochastic rounding, drawn with by the next merge; needed there, and only there.

    Raises:
        InvalidInput: a segment does not fit, two overlap, or one is not in place; nothing was written. From `merge` and
            `remerge`: `rounding` and `seed` do not fit each other.
    """

    def __init__(self, segments: Sequence[Segment], *, keep: bool = False, rounding: Rounding = "nearest") -> None:
        segments = check_segments(segments)
        for s in segments:
            check_segment(s)
            if isinstance(s.source, Packed):
                raise InvalidInput(
                    f"{s.name}: a quantised weight cannot be merged in place; merge it into another tensor with a Plan"
                )
            if (s.source.data_ptr(), s.source.stride()) != (s.destination.data_ptr(), s.destination.stride()):
                raise InvalidInput(f"{s.name}: a tracked merge works in place; pass the weight as its own destination")
            if s.source.dtype != s.destination.dtype or s.source.dtype not in FLOATS:
                raise InvalidInput(f"{s.name}: a tracked merge needs bf16, fp16 or fp32, got {s.source.dtype}")
        if len({s.source.device for s in segments}) > 1:
            raise InvalidInput("a tracked plan runs on one device; build one for each")
        check_overlaps(segments)
        self.segments = segments
        work = [s for s in segments if s.source.numel() and (s.rank or s.row_scale is not None)]
        device = work[0].source.device if work else torch.device("cpu")
        self.rounding, self.seed = rounding, None if rounding == "nearest" else 0
        check_rounding(rounding, self.seed)
        self._tracked: Tracked | None = None
        if work and rounding == "nearest":
            self._tracked = pick(device).prepare_tracked(work, device)
        elif work:
            self._tracked = ComposedTracked(pick(device).prepare, work)
        if self._tracked is not None:
            self._tracked.keep = keep

    def release(self) -> None:
        """Do `Plan.release`. (The reference backend goes on holding the tensors.)"""
        self.segments = ()

    @property
    def merged(self) -> bool:
        """Whether the weights hold what this plan merges, in part at least."""
        return self._tracked is not None and self._tracked.merged

    @property
    def nbytes(self) -> int:
        """Bytes held for the way back; 0 unless merged or kept."""
        return self._tracked.nbytes if self._tracked else 0

    @untraced
    @writes
    @torch.inference_mode()
    def merge(self, meanwhile: Callable[[], object] = idle) -> None:
        """Merge in place, on the current stream; waits for the device. If it raises, weights are as before.

        Args:
            meanwhile: a function that is called while the device works. If it raises, so does this.

        Raises:
            AlreadyMerged: the plan is merged; nothing was written.
        """
        if self.merged:
            raise AlreadyMerged("this plan is merged: unmerge it first")
        self._draw()
        if self._tracked is None:
            meanwhile()
        else:
            self._tracked.merge(meanwhile)

    def _draw(self) -> None:
        """Give the seed to what merges; raise `InvalidInput` where it is none."""
        check_rounding(self.rounding, self.seed)
        if isinstance(self._tracked, ComposedTracked):
            self._tracked.seed = None if self.seed is None else seed_key(self.seed)

    @untraced
    @writes
    @torch.inference_mode()
    def unmerge(self, meanwhile: Callable[[], object] = idle) -> None:
        """Put every bit back as it was before `merge`, and free what that took; waits for the device.

        Does nothing if the plan is not merged. After any error but `NotRestored` (no memory, say) what is left stays
        merged, and calling again goes on from there.

        Args:
            meanwhile: as for `merge`; called only if there is something to put back.

        Raises:
            NotRestored: some weights do not hold what `merge` wrote. There, units of work (some ten thousand elements)
                stay as they are; all else is back.
        """
        if self._tracked and self._tracked.merged:
            _check_restored(self._tracked.unmerge(meanwhile))

    def moved(self, moves: Moves) -> bool:
        """Tell a merged plan that weights lie elsewhere now, with all their bits. Return True if `unmerge` finds them
        there; else it must not be called."""
        return self._tracked is None or self._tracked.moved(moves)

    @untraced
    @writes
    @torch.inference_mode()
    def remerge(self, before: TrackedPlan, meanwhile: Callable[[], object] = idle) -> None:
        """Take the place of a plan that is merged: `before.unmerge()` and `self.merge()`, bit for bit.

        In one pass over the weights where both plans have the same weights in the same order, with adapters of the same
        ranks and dtypes (scalings and row scales are free) and the backend is `cuda` or `cpu`; else in those two.
        Memory for the way back goes from one to the other; two such plans may take turns. Until this returns, the
        adapters and row scales of both must stay.

        Args:
            before: the plan that is merged. Where it is not, this is `merge`.
            meanwhile: as for `merge`; not called where `NotRestored` is found before.

        Raises:
            AlreadyMerged: this plan is merged; nothing was written.
            NotRestored: as `unmerge` raises it, for what `before` merged. Neither plan is merged then.
            After any other error (no memory) this plan is not merged; `before.unmerge()` brings back what of the base
            is not back already.
        """
        if self.merged:
            raise AlreadyMerged("this plan is merged: unmerge it first")
        if self._tracked is None or before._tracked is None or not before.merged:
            before.unmerge()
            self.merge(meanwhile)
        else:
            self._draw()
            _check_restored(self._tracked.remerge(before._tracked, meanwhile))


def _check_restored(changed: set[str]) -> None:
    """Raise NotRestored with the names of weights that others wrote."""
    names = sorted(changed)
    if names:
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        raise NotRestored(
            f"{', '.join(names[:10])}{more}: written while merged, so that the base could not be restored; "
            "load these weights again. All others are restored"
        )
