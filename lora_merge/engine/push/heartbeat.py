"""Signs of life to engines that cannot look this process up, so that they do not take it for dead in a long push
(`lease.SILENT_S`)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from ..control.base import Control
from ..control.calls import drive
from ..lease import SILENT_S

BEAT_S = SILENT_S / 4
"""Seconds between two signs of life."""


class Heartbeat:
    """Repeated calls to engines on other hosts, each in a task or a thread of its own: one that hangs keeps none from
    the others.

    Args:
        beat: one of them. Where it fails, the push's own calls say so.
    """

    def __init__(self, beat: Callable[[Control], Coroutine[Any, Any, Any]]) -> None:
        self._beat = beat
        self._tasks: list[asyncio.Task[None]] = []
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()

    def begin(self, controls: Sequence[Control]) -> None:
        """Begin; harmless where it has begun."""
        far = [control for control in controls if control.far and control.beats]
        if self._tasks or self._threads:
            return
        self._over = threading.Event()
        self._tasks = [asyncio.ensure_future(self._awaited(control)) for control in far if control.suspends]
        for control in far:
            if not control.suspends:
                thread = threading.Thread(
                    target=self._called, args=(control, self._over), daemon=True, name="lora_merge"
                )
                self._threads.append(thread)
                thread.start()

    async def end(self) -> None:
        """End; when this returns, no call is under way (but for one that an engine does not answer)."""
        self._over.set()
        tasks, self._tasks = self._tasks, []
        threads, self._threads = self._threads, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        until = time.monotonic() + BEAT_S
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0))

    async def _awaited(self, control: Control) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            with suppress(Exception):
                await self._beat(control)

    def _called(self, control: Control, over: threading.Event) -> None:
        while not over.wait(BEAT_S):
            with suppress(Exception):
                drive(self._beat(control))
