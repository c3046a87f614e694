"""vLLM's control planes: a thin class for each kind of handle. That of a server lies in url.py."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias

from ...errors import PushRefused
from ..control.base import Call, Control, Unheard, judges
from ..control.calls import EngineGone, watched, while_alive
from .kept_requests import core_inside, end_requests, put_door
from .names import (
    ADAPTERS,
    BACKEND,
    CALLS,
    HOLDERS,
    KEEP_CACHE,
    STILL_PAUSED,
    TENANTS,
    WILL_KEEP,
    WORKER_METHOD,
    WRONG_MODE,
    other_backend,
    registered,
)

OfCore: TypeAlias = dict[str, Callable[..., tuple[str, Sequence[Any]]]]
_SYNCHRONOUS: OfCore = {
    "paused": lambda: ("is_sleeping", ()),
    "stands": lambda: (STILL_PAUSED, ("is_sleeping",)),
    "pause": lambda mode: ("sleep", (0, mode)),
    "resume": lambda: ("wake_up", (["scheduling"],)),
    "label": lambda version: ("set_weight_version?", (version,)),  # 0.26 has none
    "name_adapter": lambda there: ("nothing?", ()),
    "end_wrong_mode_requests": lambda adapter: (WRONG_MODE, (adapter,)),
    "end_tenants_requests": lambda merged, ids, served: (TENANTS, (merged, ids, served)),
    "reset_prefix_cache": lambda running, connector: ("reset_prefix_cache", (running, connector)),
    "reset_media_caches": lambda: ("reset_encoder_cache", ()),
    "holders": lambda: (HOLDERS, ()),
    "allow_adapters": lambda *arguments: (ADAPTERS, (_allowing(*arguments),)),
    "will_keep": lambda: (WILL_KEEP, ()),
    "keep_cache": lambda: (KEEP_CACHE, ()),
}
"""Calls to an engine -> the core's methods, as `lora_merge_calls` takes them."""
ASYNCHRONOUS: OfCore = _SYNCHRONOUS | {
    "paused": lambda: ("is_scheduler_paused", ()),
    "stands": lambda: (STILL_PAUSED, ("is_scheduler_paused",)),
    "pause": lambda mode: ("pause_scheduler", (mode, False)),
    "resume": lambda: ("resume_scheduler", ()),
}


def _allowing(paths: Sequence[str], end: bool, coming: Sequence[str] = ()) -> str:
    """Return the message of `lora_merge_adapters`."""
    return json.dumps({"allowed": list(paths), "end": end, "coming": list(coming)})


class LlmControl(Control):
    """An in-process `vllm.LLM`, or its `LLMEngine`: nothing runs in it but what its owner steps."""

    name = "vLLM"
    plugins = "VLLM_PLUGINS"
    versions = ""
    folders = ""
    _of_core: ClassVar[OfCore] = _SYNCHRONOUS
    _utility = "call_utility"
    """The method of its engine's client that calls one of the core."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self.engine = getattr(handle, "llm_engine", handle)

    @property
    def beats(self) -> bool:
        return False  # its client has one socket, for one thread

    def config(self) -> Any:
        """Return the engine's `VllmConfig` where this process has it; else None."""
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
        return await self._collective(WORKER_METHOD, request)

    async def _collective(self, method: str, *arguments: Any) -> Sequence[str]:
        """Call a method of all workers, or one of the core that such calls reach (core.py); return the answers."""
        found: Sequence[str] = await self._call("collective_rpc", method, args=arguments)
        return found

    async def _core(self, method: str, *arguments: Any) -> Any:
        """Call a method of the core in another process."""
        return await self._call(f"engine_core.{self._utility}", method, *arguments)

    async def paused(self) -> bool:
        return bool(await self._call("is_sleeping"))

    async def pause(self, mode: str) -> None:
        if mode == "wait":  # vLLM refuses to, in the caller's own process
            if self.engine.has_unfinished_requests():  # of an LLM nothing is in flight between its calls
                raise PushRefused(
                    "requests are in flight that have to end first (pause='wait', or the mode changes, or which tenant "
                    "is merged), and this engine runs only when its owner steps it: step until "
                    "has_unfinished_requests() says False, or push with pause='abort'"
                )
            mode = "keep"
        core = core_inside(self.engine)
        if mode == "abort" and core is not None:  # vLLM's own would tell nobody
            end_requests(core)
        await self._call("sleep", level=0, mode=mode)

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

    async def will_keep(self) -> str:
        (said,) = await self._collective(WILL_KEEP)
        return said

    async def keep_cache(self) -> bool:
        (said,) = await self._collective(KEEP_CACHE)
        return str(said) == str(True)  # servers answer in words

    async def reset_media_caches(self) -> None:
        # Not reset_mm_cache: it empties the processors' caches, which hold inputs as the user sent them, on one side
        # of vLLM's process boundary at a time. A request that refers to an input on the other side is lost then, and
        # with mm_processor_cache_type="shm" it ends the engine.
        await self._call("reset_encoder_cache")

    async def holders(self) -> str:
        core = core_inside(self.engine)
        if hasattr(core, HOLDERS):
            return str(getattr(core, HOLDERS)())
        return str(await self._core(HOLDERS)) if self._reaches_core() else await self._tried()

    async def check_versions(self) -> None:
        processor = getattr(self.engine, "input_processor", None)
        if core_inside(self.engine) is not None and not hasattr(processor, "_validate_lora"):
            raise PushRefused(
                "this vLLM has no place (InputProcessor._validate_lora) where requests for versions that are gone can "
                "be refused: start the engine in a process of its own (VLLM_ENABLE_V1_MULTIPROCESSING=1), or push "
                "without keep"
            )

    async def allow_adapters(self, paths: Sequence[str], end: bool, coming: Sequence[str] = ()) -> list[str]:
        answers = await self._collective(ADAPTERS, _allowing(paths, end, coming))
        self._allow(paths, end, coming)
        return _in_use(answers[0])

    async def end_tenants_requests(self, merged: bool, ids: Sequence[int], served: Sequence[int]) -> None:
        await self._collective(TENANTS, merged, ids, served)
        put_door(self.engine, tenants=served)

    async def _tried(self) -> str:
        """Implement `holders` where the core cannot be asked: there are some if a reset of its blocks fails now."""
        try:
            done = await self.reset_prefix_cache(True, False)
        except Exception as error:
            if "reset KV cache" not in str(error):  # vLLM's own words
                raise
            done = False
        return "" if done else "their ids cannot be asked for over this handle"

    async def chain(self, calls: Sequence[Call], returned: list[Any] | None = None) -> list[Any]:
        if not all(call.method in ("rpc", *self._of_core) for call in calls) or not self._reaches_core():
            return await super().chain(calls, returned)
        asked, readers = list[Sequence[Any]](), list[Callable[[Any], Any]]()
        for call, unless in zip(calls, judges(calls), strict=True):
            if call.method == "rpc":
                number, request = self._request(call.arguments[0], call.options)
                asked.append(["collective_rpc", (WORKER_METHOD, None, (request,), {}), call.wanted, unless])
                readers.append(partial(self._answers, number))
            else:
                asked.append([*self._of_core[call.method](*call.arguments), call.wanted, unless])
                readers.append(_in_use if call.method == "allow_adapters" else lambda found: found)
            if call.method == "allow_adapters" and call.arguments[2:]:
                self._allow(*call.arguments)  # before the pause: the core lets nothing in too early
        try:
            answer = json.loads(await self._core(CALLS, asked, secrets.token_hex(8)))
        except (EngineGone, Unheard):
            raise
        except Exception as error:
            raise Unheard(f"{type(error).__name__}: {error}") from error
        returned, answered = [] if returned is None else returned, answer["returned"]
        for call, found, read in zip(calls, answered, readers, strict=False):  # fewer where one ended it
            returned.append(None if found is None else read(found))
            if call.method == "allow_adapters":
                self._allow(*call.arguments)
            elif call.method == "end_tenants_requests":
                put_door(self.engine, tenants=call.arguments[2])
        if answer["failed"]:
            raise RuntimeError(f"a call to the engine failed: {answer['failed']}")
        if len(answered) < len(calls) and not (answered and call.wanted and returned[-1] not in call.wanted):
            raise Unheard(f"of {len(calls)} calls {len(answered)} were answered, and none of these ended them")
        return returned

    def _allow(self, paths: Sequence[str], end: bool, coming: Sequence[str] = ()) -> None:
        put_door(self.engine, allowed=paths, coming=coming)

    def _reaches_core(self) -> bool:
        """Return True if `lora_merge_calls` can be called in the engine's core, in another process."""
        # The logger is told of some calls on their way.
        core, logs = getattr(self.engine, "engine_core", None), getattr(self.engine, "logger_manager", None)
        return bool(self.workers) and hasattr(core, self._utility) and not logs

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        call = partial(attrgetter(method)(self.engine), *args, **kwargs)
        return while_alive(call, self.workers) if self.workers else call()


class AsyncControl(LlmControl):
    """A `vllm.AsyncLLM`, driven in its own event loop."""

    suspends = True
    beats = True
    _of_core: ClassVar[OfCore] = ASYNCHRONOUS
    _utility = "call_utility_async"

    @property
    def ends_requests(self) -> bool:
        return self._reaches_core()

    async def paused(self) -> bool:
        return bool(await self._call("is_paused"))

    async def stands(self) -> bool:
        return await _stands(self)

    async def pause(self, mode: str) -> None:
        await self._call("pause_generation", mode=mode, clear_cache=False)

    async def resume(self) -> None:
        await self._call("resume_generation")

    async def label(self, version: str) -> None:
        if hasattr(self.engine, "update_weight_version"):
            await self._call("update_weight_version", version)

    async def end_wrong_mode_requests(self, adapter: bool) -> None:
        if self._reaches_core():
            await self._core(WRONG_MODE, adapter)

    def _reaches_core(self) -> bool:
        return hasattr(getattr(self.engine, "engine_core", None), self._utility)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await watched(attrgetter(method)(self.engine)(*args, **kwargs), self.workers)


class CollectiveControl(AsyncControl):
    """A handle over which calls of workers alone reach the engine's core (core.py)."""

    suspends = False

    def _reaches_core(self) -> bool:
        return self.chains

    async def _core(self, method: str, *arguments: Any) -> Any:
        (found,) = await self._collective(method, *arguments)
        return found


class RayControl(CollectiveControl):
    """A Ray actor around `vllm.AsyncLLM`, or around `vllm.LLM`, whose calls queue up behind each other."""

    def config(self) -> Any:
        return None

    @property
    def keeps(self) -> bool:
        # An actor around an LLM does one call after the other: it stands still whenever it takes ours.
        return hasattr(self.engine, "pause_generation")

    def _reaches_core(self) -> bool:
        return self.keeps and super()._reaches_core()

    async def will_keep(self) -> str:
        if not hasattr(self.engine, "update_weight_version"):
            raise PushRefused(
                "this actor does not offer update_weight_version, so that the engine's answers could not say which "
                "weights computed what: let it, as vLLM's own classes do, or push with cache='reset'"
            )
        return await super().will_keep()

    async def paused(self) -> bool:
        return await super().paused() if self.keeps else not await self.moves()

    async def stands(self) -> bool:
        if self.keeps:
            return await super().stands()
        if await self.moves():  # nothing of an LLM's could pause it
            raise PushRefused(
                "this actor around an LLM generates during the calls of a push (max_concurrency above 1?): push when "
                "its generate() has returned, or start the actor with max_concurrency=1"
            )
        return True

    async def pause(self, mode: str) -> None:
        if self.keeps:
            await super().pause(mode)
        else:  # after a failure
            await self._call("sleep", level=0, mode=mode)

    async def resume(self) -> None:
        if self.keeps:
            await super().resume()
        else:
            await self._call("wake_up", tags=["scheduling"])

    @property
    def media(self) -> str | None:  # type: ignore[override]
        offered = hasattr(self.engine, "reset_encoder_cache")
        return None if offered else "an actor around an LLM does not offer its reset: make one around an AsyncLLM"

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        import ray

        return ray.get(getattr(self.engine, method).remote(*args, **kwargs))


def _in_use(found: str) -> list[str]:
    """Read what `lora_merge_adapters` answers."""
    return list(json.loads(found)["in_use"])


async def _stands(control: Control) -> bool:
    """Implement `Control.stands` for an engine whose core cannot be asked. One that generates although it is paused
    lets requests end first; wait for that."""
    if not await control.paused():
        return False
    if await control.moves():
        await control.pause("wait")
    return await control.paused()
