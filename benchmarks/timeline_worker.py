"""Extends vLLM's workers: when each of lora_merge's operations begins and ends in one of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, cast

Event = tuple[str, float, float]
"""What, and seconds of the system's monotonic clock at its begin and end, which all processes of a host share."""


def noting(events: list[Event], name: str | Callable[..., str], call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that also notes when it begins and ends.

    Args:
        name: what it is called; or a function of its arguments that says so, "" for what is not noted.
    """

    def noted(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            if said := name if isinstance(name, str) else name(*args):
                events.append((said, begin, time.perf_counter()))

    return noted


class Timeline:
    """Methods for `collective_rpc`."""

    def note_events(self) -> None:
        """Begin to note. Where the engine's core is in this process, its own steps are noted, too."""
        from lora_merge.engine.vllm import core, worker
        from lora_merge.engine.worker.pull import PullTarget
        from lora_merge.engine.worker.session import WorkerSession

        self._events: list[Event] = []
        operations, method = cast(Any, worker), core._Calls._method
        operations.respond = noting(
            self._events, lambda at, ops, request, raised: f"worker: {json.loads(request)['op']}", operations.respond
        )
        cast(Any, PullTarget).merge = noting(self._events, "worker: launches", PullTarget.merge)
        wait = WorkerSession.wait_for_device
        cast(Any, WorkerSession).wait_for_device = noting(self._events, "worker: waits for its GPU", wait)

        def method_of(calls: core._Calls, name: str) -> Callable[..., Any]:
            return noting(self._events, "" if name == "collective_rpc" else f"core: {name}", method(calls, name))

        cast(Any, core._Calls)._method = method_of

    def noted_events(self) -> list[Event]:
        """What was noted since the last call."""
        found, self._events[:] = list(self._events), []
        return found
