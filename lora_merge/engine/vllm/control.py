"""vLLM's control planes: a thin class for each kind of handle."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...errors import InvalidInput, PushRefused
from ..calls import watched, while_alive
from ..control import Call, Control
from ..web import NoRoute, Server
from .core import NAME
from .plugin import BACKEND, registered

_OF_CORE: dict[str, Callable[..., tuple[str, Sequence[Any]]]] = {
    "paused": lambda: ("is_sleeping", ()),
    "pause": lambda mode: ("sleep", (0, mode)),
    "resume": lambda: ("wake_up", (["scheduling"],)),
    "label": lambda version: ("set_weight_version", (version,)),  # 0.26 has none
    "name_adapter": lambda there: ("", ()),
    "reset_prefix_cache": lambda running, connector: ("reset_prefix_cache", (running, connector)),
}
"""What is asked of an engine, as methods of its core, which an `LLMEngine` has under the same names; "" where nothing
is to be done."""


class LlmControl(Control):
    """An in-process `vllm.LLM`, or its `LLMEngine`: nothing runs in it but what its owner steps."""

    name = "vLLM"
    plugins = "VLLM_PLUGINS"

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self.engine = getattr(handle, "llm_engine", handle)

    def config(self) -> Any:
        """The engine's `VllmConfig`, where this process has it; else None."""
        return getattr(self.engine, "vllm_config", None)

    def unfit(self) -> str:
        config = self.config()
        if config is None:  # behind a URL, in an actor: the first push hears it
            return ""
        if not registered():
            return (
                "was started without lora_merge's plugin for vLLM: is lora-merge installed where its workers run, and "
                "does VLLM_PLUGINS allow it?"
            )
        transfer = getattr(config, "weight_transfer_config", None)
        return "" if transfer is None or transfer.backend == BACKEND else other_backend(transfer.backend)

    async def _ask(self, request: str) -> Sequence[str]:
        return await self._call("collective_rpc", "lora_merge", args=(request,))

    async def paused(self) -> bool:
        return bool(await self._call("is_sleeping"))

    async def pause(self, mode: str) -> None:
        # Nothing of an LLM's is in flight between its calls, and in the caller's own process vLLM refuses to wait.
        await self._call("sleep", level=0, mode="keep" if mode == "wait" else mode)

    async def resume(self) -> None:
        await self._call("wake_up", tags=["scheduling"])

    async def sleep(self, level: int) -> None:
        await self._call("sleep", level=level)

    async def wake(self, tag: str) -> None:
        await self._call("wake_up", tags=[tag])

    async def label(self, version: str) -> None:
        # vLLM 0.32 notes on every output which tokens came from which.
        if hasattr(self.engine, "set_weight_version"):
            await self._call("set_weight_version", version)

    async def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        return bool(await self._call("reset_prefix_cache", running, connector))

    async def reset_media_caches(self) -> None:
        await self._call("reset_encoder_cache")
        await self._call("reset_mm_cache")

    async def chain(self, calls: Sequence[Call], returned: list[Any] | None = None) -> list[Any]:
        core: Any = getattr(self.engine, "engine_core", None)
        known = self.workers and hasattr(core, "call_utility") and all(c.method in ("rpc", *_OF_CORE) for c in calls)
        if not known or getattr(self.engine, "logger_manager", None):  # which is told of some of them on their way
            return await super().chain(calls, returned)
        made = [self._of_core(call) for call in calls]
        asked = [[name, arguments, call.wanted] for call, (name, arguments, _) in zip(calls, made, strict=True) if name]
        told = json.loads(while_alive(partial(core.call_utility, NAME, asked), self.workers))
        found, returned = iter(told["returned"]), [] if returned is None else returned
        for name, _, read in made:
            if not name:
                returned.append(None)
            elif (one := next(found, found)) is not found:
                returned.append(read(one))
            else:
                break
        if told["failed"]:
            raise RuntimeError(f"a call to the engine failed: {told['failed']}")
        return returned

    def _of_core(self, call: Call) -> tuple[str, Sequence[Any], Callable[[Any], Any]]:
        """A call as one of vLLM's engine core: its method ("" where nothing is to be done), the arguments, and how
        what it returns is read."""
        if call.method == "rpc":
            number, request = self._request(call.arguments[0], call.options)
            return "collective_rpc", ("lora_merge", None, (request,), {}), partial(self._answers, number)
        name, arguments = _OF_CORE[call.method](*call.arguments)
        return (name if hasattr(self.engine, name) else ""), arguments, _as_it_is

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        call = partial(getattr(self.engine, method), *args, **kwargs)
        return while_alive(call, self.workers) if self.workers else call()


class AsyncControl(LlmControl):
    """A `vllm.AsyncLLM`, driven in its own event loop."""

    suspends = True

    async def paused(self) -> bool:
        return bool(await self._call("is_paused"))

    async def pause(self, mode: str) -> None:
        await self._call("pause_generation", mode=mode, clear_cache=False)

    async def resume(self) -> None:
        await self._call("resume_generation")

    async def label(self, version: str) -> None:
        if hasattr(self.engine, "update_weight_version"):
            await self._call("update_weight_version", version)

    async def reset_media_caches(self) -> None:
        await self._call("reset_encoder_cache")
        await self._call("reset_mm_cache")

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await watched(getattr(self.engine, method)(*args, **kwargs), self.workers)


class RayControl(AsyncControl):
    """A Ray actor around `vllm.AsyncLLM`, or around `vllm.LLM`, whose calls queue up behind each other."""

    suspends = False

    def config(self) -> Any:
        return None

    async def paused(self) -> bool:
        # An actor around an LLM does one call after the other: it stands still whenever it takes ours.
        return await super().paused() if hasattr(self.engine, "pause_generation") else True

    async def reset_media_caches(self) -> None:
        if not hasattr(self.engine, "reset_encoder_cache"):
            raise PushRefused("the encoder cache of a multimodal model can only be reset in an actor around AsyncLLM")
        await super().reset_media_caches()

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        import ray

        return ray.get(getattr(self.engine, method).remote(*args, **kwargs))


class HttpControl(LlmControl):
    """A running `vllm serve` with `VLLM_SERVER_DEV_MODE=1`, by its URL. JSON goes in and out."""

    adapters = "its API server does not know adapters that a worker loaded by itself"

    def __init__(self, handle: str) -> None:
        super().__init__(handle)
        self._server = Server(
            handle, "is this the URL of a vLLM server, and was it started with VLLM_SERVER_DEV_MODE=1?"
        )

    def config(self) -> Any:
        return None

    async def _ask(self, request: str) -> Sequence[str]:
        answer = self._server.post("collective_rpc", body={"method": "lora_merge", "args": [request]})
        if not isinstance(answer, dict) or "results" not in answer:
            raise self._server.unlike(answer)
        return answer["results"]

    async def paused(self) -> bool:
        return bool(self._server.get("is_paused")["is_paused"])

    async def pause(self, mode: str) -> None:
        self._server.post("pause", mode=mode, clear_cache="false")

    async def resume(self) -> None:
        self._server.post("resume")

    async def wake(self, tag: str) -> None:
        self._server.post("wake_up", tags=tag)

    async def sleep(self, level: int) -> None:
        self._server.post("sleep", level=str(level))

    async def label(self, version: str) -> None:
        with contextlib.suppress(NoRoute):  # vLLM 0.26 keeps no versions
            self._server.post("update_weight_version", body={"new_version": version})

    async def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        query = {"reset_running_requests": str(running).lower(), "reset_external": str(connector).lower()}
        return bool(self._server.post("reset_prefix_cache", **query).get("success", True))

    async def reset_media_caches(self) -> None:
        self._server.post("reset_encoder_cache")
        self._server.post("reset_mm_cache")


def _as_it_is(found: Any) -> Any:
    return found


def other_backend(backend: str) -> str:
    """What is wrong with an engine that was started for another weight-transfer backend."""
    return (
        f"was started for vLLM's weight-transfer backend {backend!r}: pass "
        f'weight_transfer_config=WeightTransferConfig(backend="{BACKEND}"), or none'
    )


def control_of(engine: Any) -> Control:
    """The control plane of a handle: an LLM, an AsyncLLM, a Ray actor, or a server's URL. One that is a control plane
    already (a trainer's integration made it) is taken as it is.

    Raises:
        InvalidInput: it is none of them.
    """
    if isinstance(engine, Control):
        return engine
    if isinstance(engine, str):
        if not engine.startswith(("http://", "https://")):
            raise InvalidInput(f"engine must be a URL like http://host:8000, got {engine!r}")
        return HttpControl(engine)
    if type(engine).__module__.startswith("ray."):
        return RayControl(engine)
    if asyncio.iscoroutinefunction(getattr(engine, "collective_rpc", None)):
        return AsyncControl(engine)
    if hasattr(engine, "llm_engine") or hasattr(engine, "collective_rpc"):
        return LlmControl(engine)
    raise InvalidInput(
        f"engine must be a vllm.LLM, an LLMEngine, an AsyncLLM, a Ray actor or a URL, got {type(engine).__name__}"
    )
