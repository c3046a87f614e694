"""vLLM's control plane for a server, by its URL."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, ClassVar

from ...errors import PushRefused
from ..adapter_versions import PREFIX
from ..control.base import Call, judges
from ..control.http import Answered, NoRoute, Server
from ..control.one_server import OneServer
from .control import ASYNCHRONOUS, CollectiveControl, OfCore
from .names import CALLS, HOLDERS, KEEP_CACHE, TENANTS, WILL_KEEP, WRONG_MODE


class HttpControl(OneServer, CollectiveControl):
    """A running `vllm serve` with `VLLM_SERVER_DEV_MODE=1`, by its URL. JSON goes in and out."""

    # Its front has to hear of adapters, too: that call goes by itself, between two messages.
    _of_core: ClassVar[OfCore] = {method: of for method, of in ASYNCHRONOUS.items() if method != "allow_adapters"}

    adapters = (
        "its API server does not know adapters that a worker loaded by itself; versions of one it is told of: "
        "push(mode='adapter', keep=1)"
    )
    preloads = False

    def __init__(self, handle: str) -> None:
        super().__init__(handle)
        self._server = Server(
            handle, "is this the URL of a vLLM server, and was it started with VLLM_SERVER_DEV_MODE=1?"
        )

    async def _collective(self, method: str, *arguments: Any) -> Sequence[str]:
        answer = self._server.post("collective_rpc", body={"method": method, "args": arguments})
        results = answer.get("results")
        if not isinstance(results, list) or not results or not all(map(_ANSWERS.get(method, _is_object), results)):
            raise self._server.unlike(answer)
        return results

    async def check_versions(self) -> None:
        try:
            # Of an empty name vLLM says that it names nothing.
            self._server.confirm("v1/unload_lora_adapter", {"lora_name": ""})
        except Answered:
            return
        except NoRoute as error:
            raise PushRefused(
                f"{self._server.url} takes no adapters at run time: start it with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 (and one API server), and let it listen on a private interface "
                'alone; or push with mode="merged" instead'
            ) from error
        raise PushRefused(f"{self._server.url} takes off an adapter without a name: is something in front of it?")

    async def name_version(self, name: str, path: str) -> None:
        self._server.confirm("v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def allow_adapters(self, paths: Sequence[str], end: bool, coming: Sequence[str] = ()) -> list[str]:
        # First in front: a request that names one of the others is told so, and never reaches the engine.
        cards = self._server.get("v1/models").get("data", [])
        for card in cards:
            if str(card.get("root", "")).startswith(PREFIX) and card["root"] not in paths:
                self._server.confirm("v1/unload_lora_adapter", {"lora_name": card["id"]})
        return await super().allow_adapters(paths, end, coming)

    async def chain(self, calls: Sequence[Call], returned: list[Any] | None = None) -> list[Any]:
        returned = [] if returned is None else returned
        for _, some in groupby(calls, lambda call: call.method in ("rpc", *self._of_core)):
            part, made = [_judged(call, calls, returned) for call in some], list[Any]()
            try:
                await super().chain(part, made)
            finally:
                returned += made
            if len(made) < len(part) or (part[-1].wanted and made[-1] not in part[-1].wanted):
                break
        return returned

    async def paused(self) -> bool:
        answer = self._server.get("is_paused")
        if not isinstance(answer.get("is_paused"), bool):
            raise self._server.unlike(answer)
        return bool(answer["is_paused"])

    async def pause(self, mode: str) -> None:
        self._server.do("pause", {"status": "paused"}, mode=mode, clear_cache="false")

    async def resume(self) -> None:
        self._server.do("resume", {"status": "resumed"})

    async def wake(self, tag: str) -> None:
        # It says "sleeping" while other memory is still unmapped; what the workers say is looked at next.
        self._server.do("wake_up", {}, or_says=("status", "tags"), tags=tag)

    async def sleep(self, level: int) -> None:
        self._server.do("sleep", {}, or_says=("status", "level"), level=str(level))

    async def label(self, version: str) -> None:
        with contextlib.suppress(NoRoute):  # vLLM 0.26 keeps no versions
            done = {"success": True, "new_version": version}
            self._server.do("update_weight_version", done, {"new_version": version})

    async def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        # 0.26 does not say whether it could: it can wherever requests that run give up their blocks, and where none do,
        # this costs nothing. (What its connector did is not known.)
        query = {"reset_running_requests": "true", "reset_external": str(connector).lower()}
        answer = self._server.post("reset_prefix_cache", **query)
        if answer and not isinstance(answer.get("success"), bool):
            raise self._server.unlike(answer)
        return bool(answer.get("success", True))

    async def reset_media_caches(self) -> None:
        self._server.do("reset_encoder_cache", {})


def _judged(call: Call, calls: Sequence[Call], returned: Sequence[Any]) -> Call:
    """Return a call of a chain without its `unless` where that was called in an earlier message; one that does nothing
    and returns None where it is not made."""
    judge = judges([*calls, call])[-1]
    if judge is None or judge >= len(returned):
        return call
    return Call("name_adapter", (False,)) if returned[judge] else replace(call, unless=None)


def _is_object(answer: Any) -> bool:
    try:
        return isinstance(json.loads(answer), dict)
    except (TypeError, ValueError):
        return False


def _is_text(answer: Any) -> bool:
    return isinstance(answer, str)


def _is_of_calls(answer: Any) -> bool:
    if not _is_object(answer):
        return False
    said = json.loads(answer)
    return isinstance(said.get("returned"), list) and isinstance(said.get("failed"), str)


_ANSWERS: dict[str, Callable[[Any], bool]] = {
    CALLS: _is_of_calls,
    WILL_KEEP: _is_text,
    KEEP_CACHE: _is_text,
    HOLDERS: _is_text,
    **dict.fromkeys((TENANTS, WRONG_MODE), lambda answer: True),  # which say nothing
}
"""Methods of the core that answer otherwise than by an object of JSON -> whether this is such an answer."""
