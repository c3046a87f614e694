"""`LORA_MERGE_FOLLOW=STORE`: an `AsyncLLM`, that of `vllm serve` too, follows a store by itself.

A process beside it looks at the store (follower_process.py), and a thread here makes the calls that it asks for in the
engine's event loop. Until the engine serves the newest version that there is, requests wait: an engine that comes late,
or is started anew, answers nothing of its checkpoint. If the store has no version yet, the checkpoint is served until
there is one.

vLLM tells a plugin of no engine that is made, and lets it hold back no request, so `AsyncLLM.__init__`, `add_request`,
`sleep` and `shutdown` are wrapped. Read in vLLM 0.26 and 0.32, run with 0.32.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from http import HTTPStatus
from multiprocessing.connection import Connection
from operator import attrgetter
from secrets import token_hex
from typing import Any

from ...errors import InvalidInput
from ...logs import announce, shown
from . import internals
from .stand_in import stands_in

VARIABLE = "LORA_MERGE_FOLLOW"
_log = logging.getLogger(__name__)
_ATTRIBUTE = "_lora_merge_following"
_PROCESS = "lora_merge.engine.vllm.follower_process"
_ENDED = "the process that follows it has ended; start the engine anew"


class Following:
    """What one `AsyncLLM` has to follow a store.

    Args:
        engine: the `AsyncLLM`.
        url: of the store.
    """

    def __init__(self, engine: Any, url: str) -> None:
        self._engine, self._url = engine, url
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._serves, self._tried = asyncio.Event(), asyncio.Event()
        self._failed = ""
        self._asked = False  # whether the process beside has asked the engine anything since it threw weights away

    async def ready(self) -> None:
        """Wait until the engine serves what it should; begin to follow at the first call.

        Raises:
            GracefulHTTPError: it cannot be brought to that; servers answer with 503 and the reason, and with those of
                other errors that come from here they say none.
            RuntimeError: the same, in a vLLM without it.
        """
        if self._loop is None:
            self.begin()
        if self._serves.is_set():
            return
        await self._tried.wait()
        if not self._serves.is_set():
            why = f"this engine follows {shown(self._url)} and serves no version of it yet: {self._failed}"
            if internals.has("GracefulHTTPError"):
                raise internals.GracefulHTTPError(why, HTTPStatus.SERVICE_UNAVAILABLE)
            raise RuntimeError(why)

    def begin(self) -> None:
        """Begin to follow, in the running event loop; raise `RuntimeError` if none runs."""
        loop = asyncio.get_running_loop()
        here, there = socket.socketpair()
        # Containers that share a host's name may share process ids, too.
        name = f"{socket.gethostname()}-{os.getpid()}-{token_hex(2)}"
        model = str(self._engine.vllm_config.model_config.model)
        connection = Connection(here.detach())
        connection.send((self._url, model, name))  # not on the command line, which other users see
        command = [sys.executable, "-m", _PROCESS, str(there.fileno())]
        # It works on the CPU alone, and holds nothing of a GPU.
        environment = {k: v for k, v in os.environ.items() if k != VARIABLE} | {"CUDA_VISIBLE_DEVICES": ""}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        with there:
            self._process = subprocess.Popen(command, pass_fds=[there.fileno()], env=environment)
        self._loop = loop  # from here on requests wait for it
        threading.Thread(target=self._listen, args=(connection,), daemon=True, name="lora_merge_follow").start()

    def lose(self) -> None:
        """Have requests wait until the process beside has looked at the engine: it throws its weights away."""
        self._asked = False
        self._serves.clear()
        if not self._failed.endswith(_ENDED):  # else nobody will
            self._tried.clear()

    def end(self) -> None:
        """End the process beside."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)

    def _listen(self, connection: Connection) -> None:
        """Make the calls that the process beside asks for, until it ends."""
        assert self._loop is not None
        try:
            with connection:
                while True:
                    kind, *said = connection.recv()
                    if kind == "call":
                        self._asked = True
                        connection.send(self._made(*said))
                    elif kind == "tried":
                        self._loop.call_soon_threadsafe(self._note, *said)
                    else:
                        # Not as a warning: what vLLM's server imports silences those of all loggers but its own.
                        announce(*said)
        except (EOFError, OSError):
            if self._process is not None:
                _log.error("%s=%s: %s", VARIABLE, shown(self._url), _ENDED)
                with contextlib.suppress(RuntimeError):  # of an event loop that has ended, too
                    self._loop.call_soon_threadsafe(self._note, _ENDED)

    def _made(self, method: str, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Make a call in the engine's event loop; return whether it went well, and its value or its error in words. A
        method whose name ends with "?" is not called where this release lacks it."""
        assert self._loop is not None
        try:
            if method.endswith("?") and not hasattr(self._engine, method[:-1]):
                return True, None
            call = attrgetter(method.removesuffix("?"))(self._engine)(*args, **kwargs)
            return True, asyncio.run_coroutine_threadsafe(call, self._loop).result()
        except Exception as error:
            return False, f"{type(error).__name__}: {error}"

    def _note(self, error: str | None) -> None:
        """Let requests go on, or fail those that wait."""
        if error is None and not (self._asked or self._serves.is_set()):
            return  # of a look at the store alone, or from before
        # What the process has said before it ended is why.
        self._failed = "; ".join(filter(None, (self._failed, error))) if error == _ENDED else error or ""
        if error is None:
            self._serves.set()
        self._tried.set()


def install(url: str) -> None:
    """Have every `AsyncLLM` of this process follow a store; harmless when called twice."""
    engine, stepped = internals.AsyncLLM, internals.LLMEngine
    if getattr(engine, _ATTRIBUTE, None) is not None:
        return
    setattr(engine, _ATTRIBUTE, url)
    engine.__init__ = _following(engine.__init__)
    engine.add_request = _waiting(engine.add_request)
    engine.shutdown = _ending(engine.shutdown)
    engine.sleep = _losing(engine.sleep)
    stepped.__init__ = _warning(stepped.__init__)


@stands_in
def _following(make: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
    if kwargs.get("client_count", 1) > 1:
        raise InvalidInput(
            f"{VARIABLE} needs one API server for an engine, got --api-server-count {kwargs['client_count']}: "
            "leave it out, or run lora-merge follow beside the server"
        )
    make(engine, *args, **kwargs)
    following = Following(engine, getattr(type(engine), _ATTRIBUTE))
    engine.__dict__[_ATTRIBUTE] = following
    with contextlib.suppress(RuntimeError):  # no event loop runs yet: the first request begins it
        following.begin()


def _waiting(add: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(add)
    async def add_request(engine: Any, *args: Any, **kwargs: Any) -> Any:
        await engine.__dict__[_ATTRIBUTE].ready()
        return await add(engine, *args, **kwargs)

    return add_request


@stands_in
def _losing(sleep: Callable[..., Any], engine: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
    if level == 2:  # whoever wakes it finds no weights, until the next look brings them
        engine.__dict__[_ATTRIBUTE].lose()
    return sleep(engine, level, *args, **kwargs)


@stands_in
def _ending(end: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
    following = engine.__dict__.get(_ATTRIBUTE)
    if following is not None:
        following.end()
    end(engine, *args, **kwargs)


@stands_in
def _warning(make: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
    warnings.warn(
        f"{VARIABLE} does nothing for an LLM, which runs only when its owner steps it: use "
        "lora_merge.Follower(llm, url).step() between two calls",
        stacklevel=3,
    )
    make(engine, *args, **kwargs)
