"""`LORA_MERGE_FOLLOW=STORE`: an `AsyncLLM`, that of `vllm serve` too, follows a store by itself.

A thread of the process that holds the `AsyncLLM` looks at the store, and calls the engine in its event loop. Until the
engine serves the newest version that there is, requests wait: an engine that comes late, or is started anew, answers
nothing of its checkpoint. If the store has no version yet, the checkpoint is served until there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

from ...errors import InvalidInput
from .control import AsyncControl

VARIABLE = "LORA_MERGE_FOLLOW"
_log = logging.getLogger(__name__)
_ATTRIBUTE = "_lora_merge_following"


class LoopControl(AsyncControl):
    """An `AsyncLLM` that is called from another thread than its event loop's."""

    suspends = False

    def __init__(self, handle: Any, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(handle)
        self._loop = loop

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        call = super()._call(method, *args, **kwargs)
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


class Following:
    """What one `AsyncLLM` has to follow a store.

    Args:
        engine: that.
        url: of the store.
    """

    def __init__(self, engine: Any, url: str) -> None:
        self._engine, self._url, self._stop = engine, url, threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serves = asyncio.Event()
        self._failed: str | None = None
        self._tried = asyncio.Event()

    async def ready(self) -> None:
        """Wait until the engine serves what it should; begin to follow at the first call.

        Raises:
            RuntimeError: it cannot be brought to that.
        """
        if self._loop is None:
            self.begin()
        if self._serves.is_set():
            return
        await self._tried.wait()
        if not self._serves.is_set():
            raise RuntimeError(
                f"this engine follows {self._url}, and does not serve a version of it yet: {self._failed}"
            )

    def begin(self) -> None:
        """Begin to follow, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, daemon=True, name="lora_merge_follow").start()

    def end(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        from ...publish.follower import INTERVAL_S, Follower

        assert self._loop is not None
        try:
            model = self._engine.vllm_config.model_config.model
            control = LoopControl(self._engine, self._loop)
            follower = Follower(control, self._url, base=model, told=_log.warning)
        except Exception as error:
            _log.exception("%s=%s", VARIABLE, self._url)
            self._loop.call_soon_threadsafe(self._note, str(error))
            return
        loop = self._loop

        def tried(well: bool) -> None:
            loop.call_soon_threadsafe(self._note, None if well else follower.error)

        with contextlib.suppress(RuntimeError):  # of an event loop that has ended
            follower.run(self._stop, interval=INTERVAL_S, tried=tried)

    def _note(self, error: str | None) -> None:
        """Let requests go on, or fail those that wait."""
        self._failed = error
        if error is None:
            self._serves.set()
        self._tried.set()


def install(url: str) -> None:
    """Have every `AsyncLLM` of this process follow a store; harmless when called twice."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    if getattr(AsyncLLM, _ATTRIBUTE, None) is not None:
        return
    setattr(AsyncLLM, _ATTRIBUTE, url)
    AsyncLLM.__init__ = _following(AsyncLLM.__init__)
    AsyncLLM.add_request = _waiting(AsyncLLM.add_request)
    AsyncLLM.shutdown = _ending(AsyncLLM.shutdown)
    LLMEngine.__init__ = _warning(LLMEngine.__init__)


def switched_on() -> str:
    """Return the store that the environment names; "" for none."""
    return os.environ.get(VARIABLE, "")


def _following(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def __init__(engine: Any, *args: Any, **kwargs: Any) -> None:
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

    return __init__


def _waiting(add: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(add)
    async def add_request(engine: Any, *args: Any, **kwargs: Any) -> Any:
        await engine.__dict__[_ATTRIBUTE].ready()
        return await add(engine, *args, **kwargs)

    return add_request


def _ending(end: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(end)
    def shutdown(engine: Any, *args: Any, **kwargs: Any) -> None:
        following = engine.__dict__.get(_ATTRIBUTE)
        if following is not None:
            following.end()
        end(engine, *args, **kwargs)

    return shutdown


def _warning(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def __init__(engine: Any, *args: Any, **kwargs: Any) -> None:
        warnings.warn(
            f"{VARIABLE} does nothing for an LLM, which runs only when its owner steps it: use "
            "lora_merge.Follower(llm, url).step() between two calls",
            stacklevel=2,
        )
        make(engine, *args, **kwargs)

    return __init__
