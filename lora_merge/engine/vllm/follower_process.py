"""The process beside an `AsyncLLM` in which its follower works: reading adapters takes a second of Python, for which
the process that answers requests must not wait.

The two have a connection. The other one begins with `(url, base, name)`, as for `Follower`. This one sends `("call",
method, args, kwargs)` and gets `(True, value)` or `(False, error)`; it sends `("tried", error)` after each look at the
store (None: all is well) and `("told", line)`, which nobody answers. It ends when the other one has gone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from ...logs import words_of
from ...publish.follower import Follower
from .control import AsyncControl


class PipeControl(AsyncControl):
    """An `AsyncLLM` in another process, which makes the calls that come through a connection.

    Attributes:
        over: whether no call is made any more.
    """

    suspends = False

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._connection, self._lock, self.over = connection, threading.Lock(), False

    def say(self, *message: Any) -> None:
        """Send what nobody answers."""
        with self._lock:
            self._connection.send(message)

    async def label(self, version: str) -> None:
        await self._call("update_weight_version?", version)  # 0.26 has none

    def _reaches_core(self) -> bool:
        return True

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.over:
            raise EOFError("the engine ends")
        with self._lock:
            self._connection.send(("call", method, args, kwargs))
            well, value = self._connection.recv()
        if not well:
            raise RuntimeError(value)
        return value


def main(descriptor: int) -> None:
    """Follow a store until the other end of the connection is closed, or the other process ends this one.

    Args:
        descriptor: of the connection.
    """
    connection = Connection(descriptor)
    url, base, name = connection.recv()
    control = PipeControl(connection)

    def end(*_: Any) -> None:
        control.over = True
        sys.exit()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, which ends this process
    try:
        cache: Any = os.environ.get("LORA_MERGE_CACHE", "reset")
        follower = Follower(
            control, url, base=base, name=name, cache=cache, told=lambda line: control.say("told", line)
        )
    except Exception as error:
        why = words_of(error, url)
        control.say("told", f"{name}: {why}")
        control.say("tried", why)
        return

    def tried(well: bool) -> None:
        control.say("tried", None if well else follower.error)

    with suppress(OSError, EOFError):  # the engine has gone
        follower.run(tried=tried)


if __name__ == "__main__":
    main(int(sys.argv[1]))
