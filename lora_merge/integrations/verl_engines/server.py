"""verl's vLLM server, as a push calls it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

from ...engine.control.calls import while_alive
from ...engine.vllm.control import AsyncControl

LOOK_S = 0.002
"""Seconds between two looks at whether a call inside of a server has ended."""
_CALLS = "_lora_merge_calls"


class ServerControl(AsyncControl):
    """A Ray actor of verl's around `AsyncLLM`. Its own methods give no answers of workers back, so the engine inside of
    it is called, as verl itself calls into actors; a call that waits goes on in the actor's event loop."""

    suspends = False

    def config(self) -> Any:
        return None

    async def label(self, version: str) -> None:
        if self._inside(_offers, "update_weight_version"):  # vLLM 0.26 keeps no versions
            await self._call("update_weight_version", version)

    @cached_property
    def _offers_core(self) -> bool:
        return bool(self._inside(_offers, "engine_core.call_utility_async"))

    def _reaches_core(self) -> bool:
        return self._offers_core

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        wait = partial(self._wait, method, args, kwargs)
        return while_alive(wait, self.workers) if self.workers else wait()

    def _wait(self, method: str, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
        call = secrets.token_hex(8)
        self._inside(_begin, call, method, tuple(args), kwargs)
        while (done := self._inside(_look, call)) is None:
            time.sleep(LOOK_S)
        value, error = done
        if error is not None:
            raise RuntimeError(error)
        return value

    def _inside(self, work: Callable[..., Any], *given: Any) -> Any:
        """Return `work(server, *given)`, called in the actor."""
        import ray

        return ray.get(self.engine.__ray_call__.remote(work, *given))


def _offers(server: Any, method: str) -> bool:
    """Return, in the actor, whether its engine or a part of it has a method."""
    with suppress(AttributeError):
        return callable(attrgetter(method)(server.engine))
    return False


def _begin(server: Any, call: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Begin a call of the engine, in the actor."""
    calls = server.__dict__.setdefault(_CALLS, {})
    loop = server._server_task.get_loop()  # Ray runs this in another thread than the actor's coroutines
    calls[call] = asyncio.run_coroutine_threadsafe(attrgetter(method)(server.engine)(*args, **kwargs), loop)


def _look(server: Any, call: str) -> tuple[Any, str | None] | None:
    """Return, in the actor, a call's value and its error in words, once; None while it goes on."""
    future = getattr(server, _CALLS)[call]
    if not future.done():
        return None
    del getattr(server, _CALLS)[call]
    error = future.exception()
    return (None, f"{type(error).__name__}: {error}") if error is not None else (future.result(), None)
