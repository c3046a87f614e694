"""Fills one of two buffers ahead of its consumer, who has the other one; orders the work on CUDA streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


class Reads:
    """The streams on which a buffer is read. What fills the buffer again waits for all of them.

    A consumer may ask for the tensors of one buffer on several streams: vLLM packs what it broadcasts on two in turns.

    Args:
        event: when the buffer is filled; None on a CPU, where it is filled already.
    """

    def __init__(self, device: torch.device, event: Any) -> None:
        self._device, self._event = device, event
        self.streams: list[Any] = []
        self._recorded: list[Any] = []

    @classmethod
    def begun(cls, device: torch.device) -> Reads:
        """Return those of what was enqueued on the current stream."""
        reads = cls(device, torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None)
        reads()
        return reads

    def __call__(self, memory: Tensor | None = None) -> None:
        """Make the current stream wait for the buffer, and note that it reads it.

        Args:
            memory: the buffer, where it may be freed while it is read.
        """
        if self._event is None:
            return
        stream = torch.cuda.current_stream(self._device)
        if stream not in self.streams:
            stream.wait_event(self._event)
            self.streams.append(stream)
        if memory is not None and stream not in self._recorded:
            memory.record_stream(stream)
            self._recorded.append(stream)


class DoubleBuffer:
    """Fills two buffers in turns, one ahead of the consumer, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        """None on a CPU, where work is done when a call returns."""

    def __call__(self, free: Callable[[int], None], fill: Callable[[int], _T], count: int) -> Iterator[_T]:
        """Yield what `fill` returns for 0 to `count` - 1, with the next buffer filled by then. Before each fill, `free`
        makes sure that nobody but this consumer has the buffer.

        What a fill wrote may be read on the current stream until the next one is asked for. Everything enqueued there
        by then, optimizer steps and reads of buffers included, comes before the fill after it. So it is at the end, and
        for a consumer that stops early or raises: a fill that is under way comes before whatever is enqueued next, and
        the reads before the fills of the next run.
        """
        with closing(self.handed(free, fill, count)) as handed:
            for made, fill_next, _ in handed:
                fill_next()
                yield made

    def handed(
        self, free: Callable[[int], None], fill: Callable[[int], _T], count: int
    ) -> Generator[tuple[_T, Callable[[], None], Reads], None, None]:
        """Yield filled buffers like `__call__`, each with a function `fill_next` that fills the buffer after it, and
        its `Reads`. The consumer calls `fill_next` as soon as it has released the buffer before; otherwise that happens
        when the next one is asked for. It calls the `Reads` wherever it may read on another stream than before. The
        consumer has to close this generator, as `fill_next` may raise."""
        filled: deque[tuple[_T, Any]] = deque()
        begun = 0
        reads: dict[int, Reads] = {}

        def fill_up_to(end: int) -> None:
            nonlocal begun
            while begun < min(end, count):
                index, begun = begun, begun + 1
                free(index)
                self._follow(reads.pop(index - 2, None))
                with self.filling():
                    filled.append((fill(index), self.stream and self.stream.record_event()))

        try:
            for index in range(count):
                fill_up_to(index + 1)
                made, event = filled.popleft()
                reads[index] = Reads(self._device, event)
                reads[index]()
                yield made, partial(fill_up_to, index + 2), reads[index]
        finally:
            if self.stream is not None:
                torch.cuda.current_stream(self._device).wait_stream(self.stream)
            self._follow(*reads.values())

    def _follow(self, *reads: Reads | None) -> None:
        """Make the stream of fills wait for what is enqueued on the current stream, and on those of `reads`."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self._device))
            for stream in (stream for some in reads if some is not None for stream in some.streams):
                self.stream.wait_stream(stream)

    def filling(self) -> AbstractContextManager[Any]:
        """Return the context in which fills are enqueued: their stream, and its device, as this may run in a thread of
        its own."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
