"""Where weights that kernels cannot read are brought to be read: those that lie on another device than these run on
(offloaded ones), and quantised ones that only their library decodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..kernels.packed import bring, made_of, memory
from ..shards.exchange import aligned

Storages: TypeAlias = Callable[[], Mapping[int, torch.UntypedStorage]]
"""Asks for the memory of live weights, by address."""


class _View(NamedTuple):
    """A view without its memory: of the storage that begins at an address, or of the staging memory (`storage` 0)."""

    storage: int
    dtype: torch.dtype
    device: torch.device
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


def _view(tensor: Tensor) -> _View:
    memory = tensor.untyped_storage().data_ptr()
    shape, stride = tuple(tensor.shape), tensor.stride()
    return _View(memory, tensor.dtype, tensor.device, int(tensor.storage_offset()), shape, stride)


class Copies:
    """Copies from live weights to staging memory. Between passes it holds neither.

    Args:
        pairs: each copy and what it is of.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._pairs = list(pairs)
        self._views = [(_view(here), [_view(t) for t in memory(there)], made_of(there)) for here, there in pairs]

    def release(self) -> None:
        self._pairs = []

    def hold(self, staged: Tensor | None, storages: Storages) -> bool:
        """Take hold of source and staging memory again; returns False if a weight is in none of the storages.

        Args:
            staged: the staging memory, where it was.
            storages: those of the live weights.
        """
        if self._pairs or not self._views:
            return True
        held = storages()
        if staged is None or any(view.storage not in held for _, there, _ in self._views for view in there):
            return False
        staging = staged.untyped_storage()
        self._pairs = [
            (here.of(staging), made([view.of(held[view.storage]) for view in there]))
            for here, there, made in self._views
        ]
        return True

    def run(self) -> None:
        """Enqueue all copies on the current stream."""
        assert len(self._pairs) == len(self._views), "released, and not held again"
        for here, there in self._pairs:
            bring(here, there)


class Staging:
    """Memory that groups of weights (a bucket's, say) share, one after another on one stream.

    Args:
        device: where weights are read.
        nbytes: what the largest group is known to need; 0 where all weights are on the device.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device, self._nbytes = device, nbytes
        self._memory: Tensor | None = None
        self._last: Any = None

    @property
    def memory(self) -> Tensor | None:
        """None where nothing is brought."""
        if self._memory is None and self._nbytes:
            self._memory = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        return self._memory

    @property
    def address(self) -> int:
        """Where it lies now: a plan that was made for another address reads what is no longer there."""
        return 0 if self.memory is None else self.memory.data_ptr()

    def lay_out(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Return contiguous room for a copy of each of these at the same time, side by side."""
        starts, end = [], 0
        for view in views:
            starts.append(end)
            end += needed(view)
        if end > self._nbytes:
            self._nbytes, self._memory = end, None
        memory = self.memory
        if memory is None:
            return []
        rooms = (memory[start : start + view.nbytes] for start, view in zip(starts, views, strict=True))
        return [room.view(view.dtype).view(view.shape) for room, view in zip(rooms, views, strict=True)]

    def bring(self, copies: Copies) -> None:
        """Run copies of a group on the current stream."""
        copies.run()
        if self._device.type == "cuda" and self._memory is not None:
            self._last = torch.cuda.current_stream(self._device).record_event()

    def wait(self) -> None:
        """Wait until everything was read: an optimizer on the CPU writes weights without waiting for any stream."""
        last, self._last = self._last, None
        if last is not None:
            last.synchronize()

    def release(self) -> None:
        """Free it, once everything was read."""
        self._memory = None
        self.wait()


def needed(view: Tensor) -> int:
    """Return the bytes of staging memory that a copy takes, up to where the next one may begin."""
    return aligned(view.nbytes)
