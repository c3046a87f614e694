"""Results of 8 bits in two steps: weights are merged to 16 bits in memory of their own, some at a time, and scaled from
there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from . import Launch
from .scaled import MERGED_IN, Placed, Scaled, Scales, by_weight, quantise
from .segments import Segment
from .streams import Streams

ROOM = 64 << 20
"""Bytes of what is merged at a time; of a larger weight as many as it takes."""
_ALIGNED = 256
Prepare = Callable[[Sequence[Segment], torch.device], Launch]
Scale = Callable[[Sequence[Placed], torch.device], Launch]


class MergedFirst(Scales):
    """See `Launch`.

    Args:
        prepare: a backend's, of segments whose results have 16 bits.
        scale: lays out what scales 16 bits of rank 0.
        placed: what is written; whole groups.
        room: as `ROOM`.
    """

    def __init__(
        self, prepare: Prepare, scale: Scale, placed: Sequence[Placed], device: torch.device, room: int = ROOM
    ) -> None:
        turns = list(_turns(by_weight(placed), room))
        nbytes = max((begin + _nbytes(scaled) for turn in turns for scaled, _, begin in turn), default=0)
        self._between = between(device, nbytes)
        self._steps: list[tuple[Launch, Launch]] = []
        for turn in turns:
            segments: list[Segment] = []
            left: list[Placed] = []
            for scaled, some, begin in turn:
                dtype = MERGED_IN[some[0].segment.source.dtype]
                merged = self._between.view(begin, _nbytes(scaled), dtype).view(scaled.weight.shape)
                for p in some:
                    part = merged[p.rows, p.cols]
                    segments.append(replace(p.segment, destination=part))
                    left.append(p._replace(segment=Segment(p.segment.name, part, p.segment.destination)))
            self._steps.append((prepare(segments, device), scale(left, device)))

    def __call__(self, stochastic: bool, seed: int) -> None:
        with self._between.used():
            for merge, scale in self._steps:
                merge(stochastic, seed)
                scale(False, 0)  # of numbers that have these bits already


class ByOperations(Scales):
    """Scales by tensor operations, weight after weight; see `Launch`.

    Args:
        placed: sources of 16 bits without adapters; whole groups.
    """

    def __init__(self, placed: Sequence[Placed], device: torch.device) -> None:
        self._weights, self._device = by_weight(placed), device

    def __call__(self, stochastic: bool, seed: int) -> None:
        for scaled, some in self._weights:
            merged = torch.zeros(scaled.weight.shape, dtype=some[0].segment.source.dtype, device=self._device)
            for p in some:
                merged[p.rows, p.cols] = p.segment.source
            weight, scales = quantise(merged, scaled.group)
            written, (down, across) = torch.zeros(scaled.grid, dtype=torch.bool, device="cpu"), scaled.sizes
            for p in some:
                p.segment.destination.view(torch.uint8).copy_(weight[p.rows, p.cols].view(torch.uint8))
                written[p.row // down : -(-p.rows.stop // down), p.col // across : -(-p.cols.stop // across)] = True
            kept, grid = written.to(self._device), scaled.scales.view(scaled.grid)
            grid.copy_(torch.where(kept, scales.view(scaled.grid), grid))


class Between:
    """Memory of a device that plans use in turn; what it holds is of no use when a run has ended.

    Args:
        nbytes: how much.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._streams = Streams(device, [self._memory])
        self._turn = threading.RLock()

    @property
    def nbytes(self) -> int:
        return self._memory.numel()

    def view(self, begin: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        return self._memory[begin : begin + nbytes].view(dtype)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Of one run: what is enqueued inside follows all that was in runs before it, of whichever plan and stream."""
        with self._turn:
            self._streams.join()
            yield


_between: WeakValueDictionary[torch.device, Between] = WeakValueDictionary()
_lock = threading.Lock()


def between(device: torch.device, nbytes: int) -> Between:
    """So much memory: what other plans of the device have, where it suffices. A CUDA graph gets its own, as its replays
    are no runs."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return Between(device, nbytes)
    with _lock:
        known = _between.get(device)
        if known is None or known.nbytes < nbytes:
            known = _between[device] = Between(device, nbytes)
        return known


def _turns(
    weights: Sequence[tuple[Scaled, list[Placed]]], room: int
) -> Iterator[list[tuple[Scaled, list[Placed], int]]]:
    """Weights that are merged together, each with its segments and where it begins in the memory."""
    turn: list[tuple[Scaled, list[Placed], int]] = []
    begin = 0
    for scaled, some in weights:
        if turn and begin + _nbytes(scaled) > room:
            yield turn
            turn, begin = [], 0
        turn.append((scaled, some, begin))
        begin += -(-_nbytes(scaled) // _ALIGNED) * _ALIGNED
    if turn:
        yield turn


def _nbytes(scaled: Scaled) -> int:
    """Of a weight in 16 bits."""
    return 2 * scaled.weight.numel()
