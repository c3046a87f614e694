"""Which calls a worker, or vLLM's engine core, has answered: a proxy may repeat a request."""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, TypeVar

_REPLIES, _CALLS = 16, 2048
"""How many answers are kept, and of how many calls it is known that they were answered."""
_T = TypeVar("_T")


class Answered(Generic[_T]):
    """The last calls that were answered. One that comes again, as a proxy repeats a POST, is not run again: a bucket
    that is received twice is taken for the next one."""

    def __init__(self) -> None:
        self._replies: dict[str, _T | None] = {}  # None: gone
        self._last: deque[str] = deque()

    def to(self, call: Any) -> _T | None:
        """Return what a call was answered; None if it is a new one.

        Raises:
            RuntimeError: it was answered so long ago that its answer is gone.
        """
        reply = self._replies.get(call)
        if reply is None and call in self._replies:
            raise RuntimeError(
                "this call was answered before, and comes again: does a proxy repeat what it is sent? A request has "
                "to reach the engine once"
            )
        return reply

    def keep(self, call: Any, reply: _T) -> _T:
        """Note what a call was answered, and return it."""
        if call is not None:
            self._replies[call] = reply
            self._last.append(call)
            if len(self._last) > _REPLIES:
                self._replies[self._last.popleft()] = None
            if len(self._replies) > _CALLS:
                del self._replies[next(iter(self._replies))]
        return reply
