"""Fills one of two buffers ahead of its consumer, who has the other one; orders the work on CUDA streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")


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
            for made, fill_next in handed:
                fill_next()
                yield made

    def handed(
        self, free: Callable[[int], None], fill: Callable[[int], _T], count: int
    ) -> Generator[tuple[_T, Callable[[], None]], None, None]:
        """Yield filled buffers like `__call__`, each with a function `fill_next` that fills the buffer after it. The
        consumer calls it as soon as it has released the buffer before; otherwise that happens when the next one is
        asked for. The consumer has to close this generator, as `fill_next` may raise."""
        filled: deque[tuple[_T, Any]] = deque()
        begun = 0

        def fill_up_to(end: int) -> None:
            nonlocal begun
            while begun < min(end, count):
                index, begun = begun, begun + 1
                free(index)
                self._follow()
                with self.filling():
                    filled.append((fill(index), self.stream and self.stream.record_event()))

        try:
            for index in range(count):
                fill_up_to(index + 1)
                made, event = filled.popleft()
                if event is not None:
                    torch.cuda.current_stream(self._device).wait_event(event)
                yield made, partial(fill_up_to, index + 2)
        finally:
            if self.stream is not None:
                torch.cuda.current_stream(self._device).wait_stream(self.stream)
            self._follow()

    def _follow(self) -> None:
        """Make the stream of fills wait for what is enqueued on the current stream."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self._device))

    def filling(self) -> AbstractContextManager[Any]:
        """Return the context in which fills are enqueued: their stream, and its device, as this may run in a thread of
        its own."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
