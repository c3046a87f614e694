"""SGLang's control planes: a thin class for each kind of handle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from ...errors import InvalidInput
from ..control.base import Control
from ..control.calls import to_its_end, watched, while_alive
from ..control.http import Answered, NoRoute, Server, Unfit
from ..control.one_server import OneServer
from ..payload.adapter import ADAPTER_NAME
from . import internals
from .adapter import reference
from .door import end_wrong_mode_requests

_DONE = {"status": "ok"}
"""The answer of its server to a call that succeeded."""


class SglangControl(Control):
    """Base of the control planes for all handles."""

    name = "SGLang"
    plugins = "SGLANG_PLUGINS"
    folders = (
        f"{Control.folders}: serve it by SGLang's load_lora_adapter, or push from a trainer with "
        'SglangSync(model, engine, merge="engine")'
    )

    async def _ask(self, request: str) -> Sequence[str]:
        message = await self._checked(internals.PREFIX + request)
        try:
            # Of several data-parallel engines the first one's: the others refuse a push in the same words.
            answers, _ = json.JSONDecoder().raw_decode(message)
            if not isinstance(answers, list) or not answers or not all(isinstance(one, dict) for one in answers):
                raise ValueError
        except ValueError as error:
            raise self._not_the_plugin(message.replace(request, "...")) from error
        return [json.dumps(answer) for answer in answers]

    async def _checked(self, action: str) -> str:
        """Return the message of `check_weights`."""
        raise NotImplementedError

    def _not_the_plugin(self, message: str) -> Unfit:
        """Return the error for an answer of `check_weights` that is not the plugin's."""
        raise NotImplementedError

    async def pause(self, mode: str) -> None:
        if mode == "wait":
            await self._ended()
        elif mode == "abort":
            await self._pause("abort")
        # Running requests go back to the queue with the tokens that they have; no memory is theirs until they go on.
        await self._pause("retract")

    async def _pause(self, mode: str) -> None:
        raise NotImplementedError

    async def _ended(self) -> None:
        """Wait for the requests that are in flight now. In an engine that stands still (a push has failed) none would
        end, and these are kept."""
        begun: set[str] | None = None
        while begun is None or begun:
            answers = await self.rpc("requests")
            if any(answer["paused"] for answer in answers):
                return
            found = {rid for answer in answers for rid in answer["requests"]}
            begun = found if begun is None else begun & found
            if begun:
                await self.rest()

    async def sleep(self, level: int) -> None:
        await self.rpc("unmap_memory")

    async def wake(self, tag: str) -> None:
        await self.rpc("map_memory", weights=tag == "weights")

    async def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        return all(answer["forgotten"] for answer in await self.rpc("flush_cache"))

    async def reset_media_caches(self) -> None:
        await self.rpc("reset_media_caches")


class EngineControl(SglangControl):
    """An `sglang.Engine`. Its calls run in its event loop, or are awaited there where it is in use."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self.engine = handle.tokenizer_manager
        self._turn, self._ours = threading.Lock(), False

    def unfit(self) -> str:
        return internals.unknown_release(internals.handle_lacks(self.handle))

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return self.engine.event_loop or self.handle.loop

    @property
    def suspends(self) -> bool:
        return self._loop.is_running() and not self._ours

    async def _checked(self, action: str) -> str:
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        call = self._run(self.engine.check_weights(CheckWeightsReqInput(action=action)))
        # Wait to the end: SGLang would take an unread answer for that of the next call.
        _, message, *_ = await (to_its_end(asyncio.ensure_future(call)) if self.suspends else call)
        return str(message)

    def _not_the_plugin(self, message: str) -> Unfit:
        return _without_plugin(internals.installed(), message)

    async def paused(self) -> bool:
        return bool(self.engine.is_pause)

    async def stands(self) -> bool:
        if await self.paused():
            await self._ended()  # "abort" waits until its requests have gone
        return await self.paused()

    async def pause(self, mode: str) -> None:
        if mode == "wait":
            await self._run(self._hold())
        await super().pause(mode)

    async def _hold(self) -> None:
        """Hold back requests that arrive from now on until generation resumes."""
        async with self.engine.is_pause_cond:
            self.engine.is_pause = True

    async def _pause(self, mode: str) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self._run(self.engine.pause_generation(PauseGenerationReqInput(mode=mode)))

    async def resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._run(self.engine.continue_generation(ContinueGenerationReqInput()))

    async def label(self, version: str) -> None:
        if not hasattr(self.engine, "update_weight_version"):  # SGLang 0.5.17
            self.engine._update_weight_version_if_provided(version)
            return
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        await self._run(self.engine.update_weight_version(request))

    async def name_adapter(self, there: bool) -> None:
        registry = getattr(self.engine, "lora_registry", None)
        if registry is not None:
            await self._run(_named(registry, there))

    async def end_wrong_mode_requests(self, adapter: bool) -> None:
        await self._run(end_wrong_mode_requests(self.engine, adapter))

    async def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        if not self.suspends:
            return while_alive(partial(self._alone, call), self.workers)
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is not self._loop:
            call.close()
            raise InvalidInput("the engine is in use in another thread, or event loop: await apush() there")
        return await watched(call, self.workers)

    def _alone(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Run a call in the engine's idle event loop, after a call that an interrupt left behind."""
        with self._turn:
            self._ours = True
            try:
                return self._loop.run_until_complete(call)
            finally:
                self._ours = False


async def _named(registry: Any, registered: bool) -> None:
    """Register the adapter where requests are looked up, or remove it there."""
    lacks = bool(await registry.get_unregistered_loras({ADAPTER_NAME}))
    if registered and lacks:
        await registry.register(reference())
    elif not registered and not lacks:
        await registry.unregister(ADAPTER_NAME)


class HttpControl(OneServer, SglangControl):
    """A running `sglang.launch_server`, by its URL. JSON goes in and out."""

    adapters = "its server does not know adapters that a scheduler loaded by itself"

    def __init__(self, handle: str) -> None:
        super().__init__(handle)
        hint = "is this the URL of an SGLang server, and not of another one, or of a router?"
        self._server = Server(handle, hint, "http://host:30000")

    async def _checked(self, action: str) -> str:
        try:
            answer = self._server.post("weights_checker", body={"action": action})
        except Answered as error:
            answer = {}
            with contextlib.suppress(ValueError):
                answer = json.loads(error.body)
            if not _has_message(answer):
                raise
        except NoRoute as error:
            if release := self._release():
                raise Unfit(
                    f"{self._server.url} runs SGLang {release}, which does not offer /weights_checker; "
                    f"{internals.SUPPORTED} are supported"
                ) from error
            raise
        if not _has_message(answer):
            raise self._server.unlike(answer)
        return str(answer["message"])

    def _release(self) -> str:
        """Return the release of SGLang that runs there; "" where nothing says that one does."""
        for route in ("server_info", "get_server_info"):  # the second one of older releases
            with contextlib.suppress(OSError, RuntimeError):
                answer: Any = self._server.get(route)
                if isinstance(answer, dict) and "version" in answer:
                    return str(answer["version"])
        return ""

    def _not_the_plugin(self, message: str) -> Unfit:
        release = self._release()
        return _without_plugin(release, message) if release else self._server.unlike({"message": message})

    async def paused(self) -> bool:
        return any(answer["paused"] for answer in await self.rpc("requests"))

    async def pause(self, mode: str) -> None:
        await super().pause(mode)
        if not await self.paused():  # its schedulers themselves say so
            raise Unfit(f"{self._server.url} says that it has paused, and its schedulers go on: {self._server.hint}")

    async def _pause(self, mode: str) -> None:
        self._server.do("pause_generation", _DONE, {"mode": mode})

    async def resume(self) -> None:
        self._server.do("continue_generation", _DONE, {})

    async def label(self, version: str) -> None:
        done, body = {"success": True, "new_version": version}, {"new_version": version, "abort_all_requests": False}
        self._server.do("update_weight_version", done, body)


def _without_plugin(release: str, message: str) -> Unfit:
    """Return the error for an engine whose own `check_weights`, of this release, has answered."""
    others = (
        "?"
        if release in internals.RELEASES
        else f"? {internals.SUPPORTED} are supported, and where a release does not offer what the plugin hooks, its "
        f'log says "Failed to apply hooks to {internals.HOOKED}": install one of these'
    )
    return Unfit(
        f"SGLang {release} itself answers ({message}), and not lora_merge's plugin for it: is lora-merge installed "
        f"where its schedulers run, and does SGLANG_PLUGINS allow it{others}"
    )


def _has_message(answer: Any) -> bool:
    return isinstance(answer, dict) and "message" in answer


def control_of(engine: Any) -> Control:
    """Return the control plane of a handle: an `sglang.Engine`, or a server's URL. A `Control` is returned as it is.

    Raises:
        InvalidInput: it is none of them.
    """
    if isinstance(engine, Control):
        return engine
    if isinstance(engine, str):
        return HttpControl(engine)
    if hasattr(engine, "tokenizer_manager"):
        return EngineControl(engine)
    raise InvalidInput(f"engine must be an sglang.Engine or a URL, got {type(engine).__name__}")
