"""Signals that wait until a cleanup step, or a block with collectives, has run to its end."""

from __future__ import annotations

# What `signal` wraps: its conversions to enums and back were most of what a cleanup step cost.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

_NAMES = ("INT", "TERM", "HUP", "ALRM", "VTALRM", "PROF", "USR1", "USR2", "QUIT", "CHLD")
_NUMBERS = [getattr(signal, f"SIG{name}") for name in _NAMES if hasattr(signal, f"SIG{name}")]
"""Signals whose handlers in Python are known to raise: Ctrl-C, time limits, preemption, a DataLoader's dead worker."""
_deferring: list[Deferred] = []
"""The one that holds signals back now; only the main thread has one."""


class Deferred:
    """Holds back what the handlers of signals do, which could raise anywhere in the main thread.

    Any number of signals may come between `defer` and `deliver`. Both may be called repeatedly. As a context it holds
    them back for a block.
    """

    def __init__(self) -> None:
        self._handlers: list[tuple[int, _Handler]] = []
        self._came: dict[int, FrameType | None] = {}

    def __enter__(self) -> None:
        self.defer()

    def __exit__(self, *exception: object) -> None:
        self.deliver()

    def defer(self) -> None:
        """Begin, unless this is another thread's, or somebody holds signals back already."""
        if _deferring or threading.current_thread() is not threading.main_thread():
            return
        for number in _NUMBERS:
            before = _signal.getsignal(number)
            while isinstance(before, _Handler) and not before.waits:  # that an interrupt has left there
                before = before.before
            if callable(before) and getattr(before, "__name__", "") != "_sighandler_noop":  # asyncio's raises nothing
                handler = _Handler(before, self._came)
                self._handlers.append((number, handler))
                with suppress(ValueError):  # in a subinterpreter nothing is delivered
                    _signal.signal(number, handler)
        _deferring.append(self)

    def deliver(self) -> None:
        """Let signals through again, and do what those that came ask for; the last error of these is raised."""
        if self in _deferring:
            _deferring.remove(self)
        for number, handler in reversed(self._handlers):
            handler.waits = False  # where an interrupt ends this loop, a handler that stays passes everything on
            before, there = handler.before, _signal.getsignal(number)
            if there is handler:
                _signal.signal(number, before)
        late: BaseException | None = None
        handlers = {number: handler.before for number, handler in self._handlers}
        self._handlers = []
        while self._came:
            number, frame = self._came.popitem()
            try:
                handlers[number](number, frame)
            except BaseException as error:
                late = error
        if late is not None:
            raise late


class _Handler:
    """Stands for a handler, and keeps what came while it waits."""

    def __init__(self, before: Callable[[int, FrameType | None], Any], came: dict[int, FrameType | None]) -> None:
        self.before, self._came, self.waits = before, came, True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.waits:
            self._came[number] = frame
        else:
            self.before(number, frame)
