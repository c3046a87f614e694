"""Rows of weights replaced where they lie, with a way back: they are kept aside, as they are few."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import NotRestored
from .segments import Segment, raw


class _Place(NamedTuple):
    """Where rows lie: nothing that keeps their memory alive.

    Args:
        address, device, dtype, shape, stride: of the rows.
        values: what they become.
    """

    name: str
    address: int
    device: torch.device
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    values: Tensor


class _Row(NamedTuple):
    """Rows that are replaced now.

    Args:
        there: the rows, live.
        base, written: what they held before, and what was written.
    """

    name: str
    there: Tensor
    base: Tensor
    written: Tensor


class ReplacedRows:
    """Copies of other rows into weights, which `unmerge` undoes bit for bit.

        rows = ReplacedRows([Segment("embed_tokens.weight", trained, weight[60:62])])
        rows.merge([weight])
        rows.unmerge()

    Args:
        segments: of rank 0. Their sources must stay as they are between `merge` and `unmerge`.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._places = [
            _Place(s.name, d.data_ptr(), d.device, d.dtype, d.shape, d.stride(), s.source)
            for s in segments
            if (d := s.destination).numel()
        ]
        self._rows: list[_Row] = []

    @torch.inference_mode()
    def merge(self, weights: Iterable[Tensor]) -> None:
        """Write them, on the current stream.

        Args:
            weights: among which those are that the segments' destinations lie in.
        """
        if not self._places:
            return
        storages = [weight.untyped_storage() for weight in weights]
        there = [_view(place, storages) for place in self._places]
        written = [place.values.to(view.dtype).clone() for place, view in zip(self._places, there, strict=True)]
        kept = [view.clone() for view in there]
        names = [place.name for place in self._places]
        self._rows = list(map(_Row, names, there, kept, written))
        torch._foreach_copy_([raw(view) for view in there], [raw(values) for values in written])

    @torch.inference_mode()
    def unmerge(self) -> None:
        """Put every bit back; waits for the device. Does nothing where nothing is written.

        Raises:
            NotRestored: some rows do not hold what `merge` wrote: these stay as they are; all others are back.
        """
        rows = self._rows
        if not rows:
            return
        # Those that hold the base came back before an interrupt.
        same = [_same(row.there, row.written) | _same(row.there, row.base) for row in rows]
        kept: list[bool] = torch.stack(same).tolist()
        back = [row for row, known in zip(rows, kept, strict=True) if known]
        if back:
            torch._foreach_copy_([raw(row.there) for row in back], [raw(row.base) for row in back])
        self._rows = []
        if changed := sorted({row.name for row, known in zip(rows, kept, strict=True) if not known}):
            raise NotRestored(
                f"{', '.join(changed)}: rows that an adapter replaces (trainable_token_indices) were written while "
                "merged, so that they could not be restored; load these weights again. All others are restored"
            )


def _same(one: Tensor, other: Tensor) -> Tensor:
    return (raw(one) == raw(other)).all()


def _view(place: _Place, storages: Iterable[torch.UntypedStorage]) -> Tensor:
    """Return the rows, in the storage that holds them."""
    for storage in storages:
        begin = place.address - storage.data_ptr()
        if storage.device == place.device and 0 <= begin < storage.nbytes():
            view = torch.empty(0, dtype=place.dtype, device=place.device)
            return view.set_(storage, begin // place.dtype.itemsize, place.shape, place.stride)
    raise AssertionError(f"{place.name}: no weight lies at {place.address}")
