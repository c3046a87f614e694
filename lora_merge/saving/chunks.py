"""A base's bytes on their way: read ahead by one thread, merged here, written behind by another; in buffers of a fixed
size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

CHUNK = 32 << 20
"""Bytes that are read, merged and written at a time; or a slice along the first dimension, where that is larger."""
_AHEAD = 2

_T = TypeVar("_T")


class Rows(NamedTuple):
    """Slices `begin` to `end` along the first dimension of a tensor; of one without dimensions, all of it."""

    begin: int
    end: int


def rows_of(shape: tuple[int, ...], itemsize: int) -> Iterator[Rows]:
    """Yield the rows of a tensor in chunks; one without elements has none."""
    if prod(shape) == 0:
        return
    if not shape:
        yield Rows(0, 1)
        return
    step = max(CHUNK // (prod(shape[1:]) * itemsize), 1)
    for begin in range(0, shape[0], step):
        yield Rows(begin, min(begin + step, shape[0]))


class Buffers:
    """A number of them: who takes one waits until one is given back. What is larger than a chunk is made anew."""

    def __init__(self, count: int) -> None:
        self._free: SimpleQueue[Tensor | None] = SimpleQueue()
        for _ in range(count):
            self._free.put(torch.empty(CHUNK, dtype=torch.uint8, device="cpu"))

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        """Return memory for a tensor."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes > CHUNK:
            return take_new(shape, dtype)
        memory = self._free.get()
        if memory is None:
            self._free.put(None)
            raise RuntimeError("the pass has ended")
        return Buffer(memory[:nbytes].view(dtype).view(shape), lambda: self._free.put(memory))

    def stop(self) -> None:
        """End all waiting for memory: who waits, or takes some later, gets an error."""
        self._free.put(None)


class Buffer:
    """A tensor in a buffer, which goes back when `release` was called as often as it was `shared`."""

    def __init__(self, tensor: Tensor, free: Callable[[], None]) -> None:
        self.tensor, self._free, self._users = tensor, free, 1

    def share(self) -> Buffer:
        self._users += 1
        return self

    def release(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._free()


Take = Callable[[tuple[int, ...], torch.dtype], Buffer]
"""Gives memory for a tensor of a shape and dtype."""


def take_new(shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
    """Return memory of its own."""
    return Buffer(torch.empty(shape, dtype=dtype, device="cpu"), lambda: None)


class _Thread:
    """One thread that does something in order."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def stop(self) -> None:
        """Begin nothing more; return when nothing is under way."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class Ahead(_Thread, Generic[_T]):
    """Work of one thread, some of it before it is asked for."""

    def __init__(self, work: Callable[[_T], Any]) -> None:
        super().__init__()
        self._work = work

    def over(self, items: Iterable[_T]) -> Iterator[tuple[_T, Any]]:
        """Yield each item with what the work makes of it."""
        coming: deque[tuple[_T, Future[Any]]] = deque()
        for item in items:
            coming.append((item, self._pool.submit(self._work, item)))
            if len(coming) > _AHEAD:
                done, future = coming.popleft()
                yield done, future.result()
        while coming:
            done, future = coming.popleft()
            yield done, future.result()


class Behind(_Thread):
    """Work of one thread, in order; the first error is raised by a later `put`, or by `end`."""

    def __init__(self) -> None:
        super().__init__()
        self._coming: deque[Future[None]] = deque()

    def put(self, work: Callable[[], None], most: int = 8) -> None:
        """Let it be done, when no more than `most` others are still to be done: what they write is in memory."""
        while self._coming and (len(self._coming) > most or self._coming[0].done()):
            self._coming.popleft().result()
        self._coming.append(self._pool.submit(work))

    def end(self) -> None:
        """Wait until all is done."""
        while self._coming:
            self._coming.popleft().result()
        self._pool.shutdown()
