"""Results of 8 bits in two steps: weights are merged to 16 bits in memory of their own, some at a time, and scaled from
there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..backend import Launch
from ..segments import Segment
from ..streams import Streams
from .weights import Placed, Rounded, Scaled, Scales, by_weight, quantise, rectangles

ROOM = 64 << 20
"""Bytes of what a stream merges at a time: some rows of a weight, or all where they share one scale. Less would stay in
a GPU's cache, but launches of few rows take longer than that saves; more is a little faster still (one H100, 7B,
float32 adapters: 3.0 copies with 32 MiB, 2.7 with 64, 2.5 with 128)."""
_ALIGNED = 256
Prepare = Callable[[Sequence[Segment], torch.device], Launch]
Scale = Callable[[Sequence[Rounded], torch.device], Launch]


class TwoStepScaled(Scales):
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
        ready: list[Rounded] = []
        merged_first: list[Placed] = []
        for p in placed:
            if job := p.ready:
                ready.append(job)
            else:
                merged_first.append(p)
        self._ready = scale(ready, device) if ready else None
        turns = list(_turns(_bands(merged_first, room), room))
        nbytes = max((begin + band.nbytes for turn in turns for band, begin in turn), default=0)
        nbytes = -(-nbytes // _ALIGNED) * _ALIGNED
        # What is larger than the room, since it shares one scale, takes its memory once.
        self._lanes = Lanes(device, two=len(turns) > 1 and nbytes <= room)
        self._between = between(device, nbytes * self._lanes.count)
        self._steps: list[tuple[Launch, Launch]] = []
        for number, turn in enumerate(turns):
            own = number % self._lanes.count * nbytes
            segments: list[Segment] = []
            jobs: list[Rounded] = []
            for band, begin in turn:
                merged = self._between.view(own + begin, band.nbytes, band.scaled.dtype).view(
                    -1, band.scaled.weight.shape[1]
                )
                for p in band.placed:
                    here = slice(p.rows.start - band.row, p.rows.stop - band.row)
                    segments.append(replace(p.segment, destination=merged[here, p.cols]))
                for rows, cols in rectangles(band.scaled, band.placed):
                    here = slice(rows.start - band.row, rows.stop - band.row)
                    jobs.append(Rounded(merged[here, cols], band.scaled, rows.start, cols.start))
            self._steps.append((prepare(segments, device), scale(jobs, device)))

    def __call__(self, stochastic: bool, seed: int) -> None:
        if self._ready is not None:
            self._ready(False, 0)  # numbers that have their bits already
        if self._steps:
            with self._between.used():
                self._lanes.run(self._steps, stochastic, seed)


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


class Lanes:
    """Streams that take turns, each in memory of its own: where the launches of one leave processors idle, at their
    begin and end, those of the other have work.

    Args:
        two: whether there is work and memory for two of them; on a CPU there is one.
    """

    def __init__(self, device: torch.device, *, two: bool) -> None:
        self._device = device
        self._second = torch.cuda.Stream(device) if two and device.type == "cuda" else None

    @property
    def count(self) -> int:
        return 1 if self._second is None else 2

    def run(self, steps: Sequence[tuple[Launch, Launch]], stochastic: bool, seed: int) -> None:
        """Run all steps; what follows on the current stream follows them."""
        if self._second is None:
            _run(steps, stochastic, seed)
            return
        current = torch.cuda.current_stream(self._device)
        self._second.wait_stream(current)
        try:
            with torch.cuda.stream(self._second):
                _run(steps[1::2], stochastic, seed)
            _run(steps[::2], stochastic, seed)
        finally:
            current.wait_stream(self._second)


def _run(steps: Sequence[tuple[Launch, Launch]], stochastic: bool, seed: int) -> None:
    for merge, scale in steps:
        merge(stochastic, seed)
        scale(False, 0)


class Between:
    """Memory of a device that plans use in turn; what it holds is of no use when a run has ended."""

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
        """Hold the memory for one run: what is enqueued inside follows all runs before it, of any plan and stream."""
        with self._turn:
            self._streams.join()
            yield


_between: WeakValueDictionary[torch.device, Between] = WeakValueDictionary()
_lock = threading.Lock()


def between(device: torch.device, nbytes: int) -> Between:
    """Return so much memory: what other plans of the device have, where it suffices. A CUDA graph gets its own, as its
    replays are no runs."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return Between(device, nbytes)
    with _lock:
        known = _between.get(device)
        if known is None or known.nbytes < nbytes:
            known = _between[device] = Between(device, nbytes)
        return known


class _Band(NamedTuple):
    """Rows of a weight, from one border of groups to another.

    Attributes:
        placed: what is written in them.
    """

    scaled: Scaled
    row: int
    rows: int
    placed: list[Placed]

    @property
    def nbytes(self) -> int:
        """In 16 bits."""
        return 2 * self.rows * self.scaled.weight.shape[1]


def _bands(placed: Sequence[Placed], room: int) -> Iterator[_Band]:
    """Cut each weight into bands, as few and as even as the room allows."""
    for scaled, some in by_weight(placed):
        (rows, cols), (group, _) = scaled.weight.shape, scaled.sizes
        groups = -(-rows // group)
        most = max(1, room // (2 * cols * group))
        height = -(-groups // -(-groups // most)) * group
        for begin in range(0, rows, height):
            end = min(begin + height, rows)
            here = [part for p in some if (part := _part(p, begin, end))]
            if here:
                yield _Band(scaled, begin, end - begin, here)


def _part(p: Placed, begin: int, end: int) -> Placed | None:
    """Return its rows that lie between two rows of the weight; None if there are none."""
    first, last = max(p.rows.start, begin), min(p.rows.stop, end)
    if first >= last:
        return None
    return p._replace(segment=p.segment.part(first - p.row, last - p.row), row=first)


def _turns(bands: Iterable[_Band], room: int) -> Iterator[list[tuple[_Band, int]]]:
    """Yield bands that are merged together, each with where it begins in the memory."""
    turn: list[tuple[_Band, int]] = []
    begin = 0
    for band in bands:
        if turn and begin + band.nbytes > room:
            yield turn
            turn, begin = [], 0
        turn.append((band, begin))
        begin += -(-band.nbytes // _ALIGNED) * _ALIGNED
    if turn:
        yield turn
