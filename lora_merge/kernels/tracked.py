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

from .. import kernels
from ..errors import AlreadyMerged, InvalidInput, NotRestored
from .checks import check_overlaps, check_segment, check_segments
from .plan import untraced
from .segments import FLOATS, Segment


class TrackedPlan:
    """Segments merged in place, and restored exactly from about 2 bits an element.

    The values merged are those of `Plan(segments).run()`, bit for bit. Between `merge` and `unmerge` the weights,
    adapters and row scales must stay as they are and where they are: they are read again to find the way back. What was
    written to a weight is found and refused; a change of adapters or row scales is not.

    The plan holds the tensors, as `Plan` does, or until `release`.

    Args:
        segments: as for a `Plan`, each with its source as its destination (the same view), a float dtype, and any
            strides; segments may be pieces of one tensor.
        keep: keep the memory for the way back from one merge to the next, where the backend can.

    Raises:
        InvalidInput: a segment does not fit, two of them meet, or one is not in place; nothing was written.
    """

    def __init__(self, segments: Sequence[Segment], *, keep: bool = False) -> None:
        segments = check_segments(segments)
        for s in segments:
            check_segment(s)
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
        self._tracked = kernels.pick(device).prepare_tracked(work, device) if work else None
        if self._tracked is not None:
            self._tracked.keep = keep

    def release(self) -> None:
        """As `Plan.release`. The reference has no kernel of its own for this and goes on holding them."""
        self.segments = ()

    @property
    def nbytes(self) -> int:
        """Bytes held for the way back: 0 unless merged, or kept."""
        return self._tracked.nbytes if self._tracked else 0

    @untraced
    @torch.inference_mode()
    def merge(self, meanwhile: Callable[[], object] = kernels.idle) -> None:
        """Merge in place, on the current stream; waits for the device. If it raises (no memory), the weights are as
        before.

        Args:
            meanwhile: work of the host that need not wait for the device. If it raises, so does this.

        Raises:
            AlreadyMerged: the plan is merged; nothing was written.
        """
        if self._tracked is None:
            meanwhile()
            return
        if self._tracked.merged:
            raise AlreadyMerged("this plan is merged: unmerge it first")
        self._tracked.merge(meanwhile)

    @untraced
    @torch.inference_mode()
    def unmerge(self, meanwhile: Callable[[], object] = kernels.idle) -> None:
        """Put every bit back as it was before `merge`, and let go of what that took. Does nothing where not merged.

        Waits for the device. After any other error (no memory for a block) what is left stays merged, and calling again
        goes on from there.

        Args:
            meanwhile: as for `merge`; called where there is something to put back.

        Raises:
            NotRestored: weights do not hold what `merge` wrote. Where that is so, units of work (some ten thousand
                elements) stay as they are; all else is back.
        """
        if self._tracked and self._tracked.merged:
            changed = sorted(self._tracked.unmerge(meanwhile))
            if changed:
                more = f" and {len(changed) - 10} more" if len(changed) > 10 else ""
                raise NotRestored(
                    f"{', '.join(changed[:10])}{more}: written while merged, so that the base could not be restored; "
                    "load these weights again. All others are restored"
                )
