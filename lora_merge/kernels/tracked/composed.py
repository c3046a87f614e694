"""A tracked merge by a backend's launches and tensor operations around them: right on any device, not fast.

The reference backend needs it, all that a CPU without the compiled module has: `one_pass.py` needs kernels that write
codes and records as they merge. Block by block, several passes over each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..backend import Launch, Moves, Tracked, idle, in_two_passes
from ..segments import FLOATS, Segment, raw

BLOCK = 1 << 23
"""Elements merged at a time: the working memory is a few times as many, and gone after each block."""
_ESCAPE = 3
_STEP = 2 * 0x1E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class _Journal:
    """What brings a block back: `packed` holds four codes a byte, `raw` the bits of escaped elements in order, `sums`
    a checksum of what was written of each piece."""

    packed: Tensor
    raw: Tensor
    sums: Tensor


@contextmanager
def keeping_denormals() -> Iterator[None]:
    """Turn off flushing of denormals in this thread for the time of a block, so that both ways compute alike; torch's
    own threads keep their setting."""
    flushes = bool(torch.full((1,), 1e-39, device="cpu") * 1 == 0)
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushes)


class ComposedTracked:
    """See `Tracked` in this package."""

    def __init__(
        self, prepare: Callable[[Sequence[Segment], torch.device], Launch], segments: Sequence[Segment]
    ) -> None:
        self._prepare = prepare
        self._blocks = _blocks(segments)
        self._journals: list[_Journal] = []
        self._changed: set[str] = set()
        self.merged = False
        self.keep = False

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for j in self._journals for t in (j.packed, j.raw, j.sums))

    @keeping_denormals()
    def merge(self, meanwhile: Callable[[], object] = idle) -> None:
        self.merged = True
        try:
            meanwhile()
            for block in self._blocks:
                self._journals.append(self._merge(block))
        except BaseException:
            self.unmerge()
            raise

    def moved(self, moves: Moves) -> bool:
        return True  # its tensors know where they lie

    def remerge(self, before: Tracked, meanwhile: Callable[[], object] = idle) -> set[str]:
        return in_two_passes(self, before, meanwhile)

    @keeping_denormals()
    def unmerge(self, meanwhile: Callable[[], object] = idle) -> set[str]:
        meanwhile()
        while self._journals:
            self._changed |= self._unmerge(self._blocks[len(self._journals) - 1], self._journals[-1])
            self._journals.pop()
        self.merged = False
        changed, self._changed = self._changed, set()
        return changed

    def _merge(self, block: list[Segment]) -> _Journal:
        base, base_parts = _like(block)
        _copy(base_parts, [s.source for s in block])
        merged, merged_parts = _like(block)
        self._run([replace(s, destination=part) for s, part in zip(block, merged_parts, strict=True)])
        estimate = self._estimate(block, merged_parts)
        away = raw(base) - raw(estimate)  # wraps
        # NaN escapes: the bits of a NaN that is computed are nobody's promise.
        escaped = (away < -1) | (away > 1) | estimate.isnan()
        codes = (away + 1).to(torch.uint8).masked_fill_(escaped, _ESCAPE)
        journal = _Journal(_pack(codes), raw(base)[escaped], _sums(merged, merged_parts))
        _copy([s.source for s in block], merged_parts)  # the only write, when all else is done
        return journal

    def _unmerge(self, block: list[Segment], journal: _Journal) -> set[str]:
        """Restore a block; return the names of those that are not what was written, and stay it."""
        merged, merged_parts = _like(block)
        _copy(merged_parts, [s.source for s in block])
        written = (_sums(merged, merged_parts) == journal.sums).tolist()
        estimate = self._estimate(block, merged_parts)
        codes = _unpack(journal.packed, merged.numel())
        bits = raw(estimate).add_(codes).sub_(1)
        bits[codes == _ESCAPE] = journal.raw
        raw(merged).copy_(bits)
        back = [(s.source, part) for s, part, whole in zip(block, merged_parts, written, strict=True) if whole]
        _copy([to for to, _ in back], [part for _, part in back])
        return {s.name for s, whole in zip(block, written, strict=True) if not whole}

    def _estimate(self, block: list[Segment], merged_parts: list[Tensor]) -> Tensor:
        """Return `round(W' / row_scale - D)` of a block: a function of W' and the adapters alone."""
        estimate, parts = _like(block)
        segments = []
        for s, merged, part in zip(block, merged_parts, parts, strict=True):
            source = merged if s.row_scale is None else merged.float() / s.row_scale[:, None]
            segments.append(replace(s, source=source, destination=part, scaling=-s.scaling, row_scale=None))
        self._run(segments)
        return estimate

    def _run(self, segments: list[Segment]) -> None:
        self._prepare(segments, segments[0].source.device)(False, 0)


def _blocks(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Cut segments into blocks of one dtype, at most BLOCK elements each (a single row may be longer)."""
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
    """Cut a segment into parts, in place."""
    rows, cols = s.source.shape
    step, in_place = max(1, BLOCK // cols), replace(s, destination=s.source)
    return [in_place.part(i, i + step) for i in range(0, rows, step)]


def _like(block: list[Segment]) -> tuple[Tensor, list[Tensor]]:
    """Return new memory for a block and the views of its pieces, each stored by rows or by columns as its weight is.

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


def _copy(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    if to:
        torch._foreach_copy_([raw(t) for t in to], [raw(t) for t in source])


def _sums(flat: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return a checksum of each part's bits, int64: every element times an odd number that depends on its place."""
    place = torch.arange(len(flat), device=flat.device).mul_(_STEP).add_(1)
    products = raw(flat).long().mul_(place)
    return torch.stack([part.sum() for part in products.split([part.numel() for part in parts])])


def _pack(codes: Tensor) -> Tensor:
    """Pack four codes a byte, the first one lowest."""
    four = torch.nn.functional.pad(codes, (0, -len(codes) % 4)).view(-1, 4)
    return four[:, 0] | four[:, 1] << 2 | four[:, 2] << 4 | four[:, 3] << 6


def _unpack(packed: Tensor, n: int) -> Tensor:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> shifts & 3).view(-1)[:n]
