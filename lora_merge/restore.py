"""Merging in place with a way back that costs a sixth of the weights: what rounding lost, in two bits an element.

Unmerging computes `estimate = round(W' - D)`, which lies at most a step or so from W for almost every element. A
merge therefore keeps, per element, `bits(W) - bits(estimate)` in two bits: -1, 0, 1, or an escape, whose raw bits lie
in a side array in order of position. W comes back bit for bit whatever the values are, because an unmerge computes the
same estimate from the same W' and adapters by the same kernel; how good the estimate is decides the size alone.
docs/restore.md has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .checks import check_overlaps, check_segment
from .errors import AlreadyMerged, InvalidInput
from .plan import Plan
from .segments import FLOATS, Segment

BLOCK = 1 << 23
"""Elements merged at a time: the working memory is a few times as many, and gone after each block."""
_ESCAPE = 3


@dataclass(frozen=True, slots=True)
class _Journal:
    """What brings a block back: `packed` holds four codes a byte, `raw` the bits of escaped elements in order."""

    packed: Tensor
    raw: Tensor


class TrackedPlan:
    """Segments merged in place, and restored exactly from about 2 bits an element.

    The values merged are those of `Plan(segments).run()`, bit for bit. Between `merge` and `unmerge` the weights,
    adapters and row scales must stay as they are: they are read again to find the way back.

    Args:
        segments: as for a `Plan`, each with its source as its destination (the same view), a float dtype, and any
            strides; segments may be pieces of one tensor.

    Raises:
        InvalidInput: a segment does not fit, two of them meet, or one is not in place; nothing was written.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        for s in segments:
            check_segment(s)
            if (s.source.data_ptr(), s.source.stride()) != (s.destination.data_ptr(), s.destination.stride()):
                raise InvalidInput(f"{s.name}: a tracked merge works in place; pass the weight as its own destination")
            if s.source.dtype != s.destination.dtype or s.source.dtype not in FLOATS:
                raise InvalidInput(f"{s.name}: a tracked merge needs bf16, fp16 or fp32, got {s.source.dtype}")
        if len({s.source.device for s in segments}) > 1:
            raise InvalidInput("a tracked plan runs on one device; build one for each")
        check_overlaps(segments)
        self._blocks = _blocks([s for s in segments if s.source.numel() and (s.rank or s.row_scale is not None)])
        self._journals: list[_Journal] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held for the way back: 0 unless merged."""
        return sum(j.packed.nbytes + j.raw.nbytes for j in self._journals or ())

    @torch.compiler.disable
    @torch.inference_mode()
    def merge(self) -> None:
        """Merge in place, on the current stream. If it raises (no memory), the weights are as before.

        Raises:
            AlreadyMerged: the plan is merged; nothing was written.
        """
        if self._journals is not None:
            raise AlreadyMerged("this plan is merged: unmerge it first")
        self._journals = []
        try:
            for block in self._blocks:
                self._journals.append(_merge(block))
        except BaseException:
            self.unmerge()
            raise

    @torch.compiler.disable
    @torch.inference_mode()
    def unmerge(self) -> None:
        """Put every bit back as it was before `merge`, and let go of what that took. Does nothing where not merged.

        If it raises (no memory for a block), what is left stays merged, and calling again goes on from there.
        """
        while self._journals:
            _unmerge(self._blocks[len(self._journals) - 1], self._journals[-1])
            self._journals.pop()
        self._journals = None


def _blocks(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Pieces of one dtype, at most BLOCK elements together (a single row may be longer)."""
    blocks: list[list[Segment]] = []
    for dtype in FLOATS:
        room = 0
        for s in segments:
            if s.source.dtype != dtype:
                continue
            for piece in _pieces(s):
                if room < piece.source.numel():
                    blocks.append([])
                    room = BLOCK
                blocks[-1].append(piece)
                room -= piece.source.numel()
    return blocks


def _pieces(s: Segment) -> list[Segment]:
    rows, cols = s.source.shape
    step = max(1, BLOCK // cols)
    return [
        replace(
            s,
            source=s.source[i : i + step],
            destination=s.source[i : i + step],
            lora_B=None if s.lora_B is None else s.lora_B[i : i + step],
            row_scale=None if s.row_scale is None else s.row_scale[i : i + step],
        )
        for i in range(0, rows, step)
    ]


def _merge(block: list[Segment]) -> _Journal:
    base, base_parts = _like(block)
    torch._foreach_copy_(base_parts, [s.source for s in block])
    _, merged_parts = _like(block)
    Plan([replace(s, destination=part) for s, part in zip(block, merged_parts, strict=True)]).run()
    estimate = _estimate(block, merged_parts)
    away = _bits(base) - _bits(estimate)  # wraps
    # NaN escapes: the bits of a NaN that is computed are nobody's promise.
    escaped = (away < -1) | (away > 1) | estimate.isnan()
    codes = (away + 1).to(torch.uint8).masked_fill_(escaped, _ESCAPE)
    journal = _Journal(_pack(codes), _bits(base)[escaped])
    torch._foreach_copy_([s.source for s in block], merged_parts)  # the only write, when all else is done
    return journal


def _unmerge(block: list[Segment], journal: _Journal) -> None:
    merged, merged_parts = _like(block)
    torch._foreach_copy_(merged_parts, [s.source for s in block])
    estimate = _estimate(block, merged_parts)
    codes = _unpack(journal.packed, merged.numel())
    bits = _bits(estimate).add_(codes).sub_(1)
    bits[codes == _ESCAPE] = journal.raw
    merged.copy_(estimate)  # bits is a view of it
    torch._foreach_copy_([s.source for s in block], merged_parts)


def _estimate(block: list[Segment], merged_parts: list[Tensor]) -> Tensor:
    """`round(W' / row_scale - D)` of a block, by the kernels of `Plan`: a function of W' and the adapters alone."""
    estimate, parts = _like(block)
    segments = []
    for s, merged, part in zip(block, merged_parts, parts, strict=True):
        source = merged if s.row_scale is None else merged.float() / s.row_scale[:, None]
        segments.append(replace(s, source=source, destination=part, scaling=-s.scaling, row_scale=None))
    Plan(segments).run()
    return estimate


def _like(block: list[Segment]) -> tuple[Tensor, list[Tensor]]:
    """New memory for a block and the views of its pieces, each stored by rows or by columns as its weight is.

    That keeps the roles of lora_A and lora_B in the kernels (`segments.pack` exchanges them for weights stored by
    columns), and with them the order of every sum.
    """
    first = block[0].source
    flat = torch.empty(sum(s.source.numel() for s in block), dtype=first.dtype, device=first.device)
    views = []
    for s, part in zip(block, flat.split([s.source.numel() for s in block]), strict=True):
        rows, cols = s.source.shape
        by_columns = s.source.stride(0) == 1 and s.source.stride(1) != 1
        views.append(part.view(cols, rows).t() if by_columns else part.view(rows, cols))
    return flat, views


def _bits(t: Tensor) -> Tensor:
    return t.view(torch.int32 if t.element_size() == 4 else torch.int16)


def _pack(codes: Tensor) -> Tensor:
    """Four codes a byte, the first one lowest."""
    four = torch.nn.functional.pad(codes, (0, -len(codes) % 4)).view(-1, 4)
    return four[:, 0] | four[:, 1] << 2 | four[:, 2] << 4 | four[:, 3] << 6


def _unpack(packed: Tensor, n: int) -> Tensor:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> shifts & 3).view(-1)[:n]
