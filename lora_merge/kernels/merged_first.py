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
from .scaled import MERGED_IN, Placed, Rounded, Scaled, Scales, by_weight, quantise, rectangles
from .segments import Segment
from .streams import Streams

ROOM = 64 << 20
"""Bytes of what is merged at a time; of a larger weight as many as it takes."""
_ALIGNED = 256
Prepare = Callable[[Sequence[Segment], torch.device], Launch]
Scale = Callable[[Sequence[Rounded], torch.device], Launch]


class MergedFirst(Scales):
    """See `Launch`. What needs no merge is scaled where it lies.

    Args:
        prepare: a backend's, of segments whose results have 16 bits.
        scale: lays out what scales these.
        placed: what is written; whole groups.
        room: as `ROOM`.
    """

    def __init__(
        self, prepare: Prepare, scale: Scale, placed: Sequence[Placed], device: torch.device, room: int = ROOM
    ) -> None:
        ready = [job for p in placed if (job := p.ready)]
        self._ready = scale(ready, device) if ready else None
        turns = list(_turns(by_weight([p for p in placed if p.ready is None]), room))
        nbytes = max((begin + _nbytes(scaled) for turn in turns for scaled, _, begin in turn), default=0)
        self._between = between(device, nbytes)
        self._steps: list[tuple[Launch, Launch]] = []
        for turn in turns:
            segments: list[Segment] = []
            jobs: list[Rounded] = []
            for scaled, some, begin in turn:
                dtype = MERGED_IN[some[0].segment.source.dtype]
                merged = self._between.view(begin, _nbytes(scaled), dtype).view(scaled.weight.shape)
                segments += [replace(p.segment, destination=merged[p.rows, p.cols]) for p in some]
                jobs += [Rounded(merged[at], scaled, at[0].start, at[1].start) for at in rectangles(scaled, some)]
            self._steps.append((prepare(segments, device), scale(jobs, device)))

    def __call__(self, stochastic: bool, seed: int) -> None:
        if self._ready is not None:
            self._ready(False, 0)  # numbers that have their bits already
        if self._steps:
            with self._between.used():
                for merge, scale in self._steps:
                    merge(stochastic, seed)
                    scale(False, 0)


class ByOperations(Scales):
    """Scales by tensor operations; see `Launch`.

    Args:
        jobs: sources of 16 bits.
    """

    def __init__(self, jobs: Sequence[Rounded], device: torch.device) -> None:
        self._jobs = jobs

    def __call__(self, stochastic: bool, seed: int) -> None:
        for job in self._jobs:
            weight, scales = quantise(job.source, job.scaled.group)
            job.destination.view(torch.uint8).copy_(weight.view(torch.uint8))
            job.scales.copy_(scales.view(job.scales.shape))


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
