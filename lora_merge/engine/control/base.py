"""Control planes: how an engine is called. One interface; each engine's folder has a small class for each kind of
handle."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

LOOK_S = 0.02
"""Seconds between two checks of what an engine does."""
TIMEOUT_S = 600
"""Seconds that a control call over HTTP may take."""


class WorkerFailed(RuntimeError):
    """Workers of an engine reported an error; the other workers have done their part."""


class NotOurs(WorkerFailed):
    """An engine is not in the middle of this trainer's push (any more): nothing was done."""


class Moved(WorkerFailed):
    """An engine has generated in the middle of a push."""


class Unheard(RuntimeError):
    """No reply was received; the engine's progress is unknown."""


class OutOfStep(RuntimeError):
    """An engine returned the answers to an earlier call: after a call failed in one worker, the others' answers were
    left unread. The engine cannot be used any more."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a `Control.chain`.

    Args:
        method: of `Control`.
        arguments, options: of the method.
        wanted: what it has to return for the next call to be made; empty for anything.
        unless: an earlier call of the same chain: if that returned something true, this one is not made, and returns
            None.
    """

    method: str
    arguments: Sequence[Any] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    wanted: Sequence[Any] = ()
    unless: Call | None = None


def judges(calls: Sequence[Call]) -> list[int | None]:
    """Return for every call of a chain the number of its `unless`; None if it has none."""
    return [next((at for at, one in enumerate(calls) if one is call.unless), None) for call in calls]


class Control:
    """How an engine is called. Every method is a coroutine function; those of synchronous handles never suspend.

    Attributes:
        handle: what the user gave.
        engine: what is called.
        workers: process ids of its workers on this host, in other processes than this one: a call that is under way
            when the engine dies is never answered.
        far: whether it has workers on other hosts, which cannot look this process up.
        chains: whether calls of its workers may bring several calls of the engine in one message.
        adapters, media: why adapters cannot be served, and encoders' caches not be reset, over this handle.
        versions: why no versions of adapters can be kept over this handle; "" where they can.
        preloads: whether a worker loads a version by itself; else `name_version` has it loaded.
        folders: why no adapter can be loaded from a folder, in words that follow whose engine it is; "" where one can.
        name: of this kind of engines.
        plugins: the environment variable that says which plugins the engine loads.
    """

    adapters: str | None = None
    versions: str = "this kind of engine keeps none"
    preloads: bool = True
    folders: ClassVar[str] = "whose workers merge no adapter onto their own checkpoint"
    media: str | None = None
    name: ClassVar[str] = ""
    plugins: ClassVar[str] = ""

    def __init__(self, handle: Any) -> None:
        self.handle = self.engine = handle
        self.workers: list[int] = []
        self.far = self.chains = False

    @property
    def suspends(self) -> bool:
        """Whether calls have to be awaited in the handle's own event loop."""
        return False

    @property
    def keeps(self) -> bool:
        """Whether requests may be in flight between calls, so that a pause by its user keeps them."""
        return True

    @property
    def beats(self) -> bool:
        """Whether a call can be made while another one is under way."""
        return True

    @property
    def ends_requests(self) -> bool:
        """Whether requests that come while a push changes the tenants can be ended, or none can come."""
        return True

    @property
    def elsewhere(self) -> bool:
        """Whether other processes do all the work of calls, as far as is known."""
        return bool(self.workers)

    def unfit(self) -> str:
        """Return why no push can reach this engine, as far as this process knows, in words that follow its name."""
        return ""

    async def rpc(self, op: str, **message: Any) -> list[dict[str, Any]]:
        """Call an operation (engine/worker/operations.py) in every worker, and return their answers in rank order.

        Raises:
            WorkerFailed: one or several report an error; names them.
            OutOfStep: the answers are not to this call.
        """
        call, request = self._request(op, message)
        return self._answers(call, await self._ask(request))

    def _request(self, op: str, message: Mapping[str, Any]) -> tuple[str, str]:
        """Return a number for a call, and the request that each worker gets."""
        call = secrets.token_hex(8)
        return call, json.dumps({"op": op, "call": call, **message})

    def _answers(self, call: str, replies: Sequence[str]) -> list[dict[str, Any]]:
        """Read the workers' replies to a call; see `rpc`."""
        answers = [json.loads(reply) for reply in replies]
        if any(answer.get("call") != call for answer in answers):
            raise OutOfStep(
                "its workers' answers belong to an earlier call, which was left unread when one worker failed in it: "
                "start this engine anew"
            )
        errors = [f"worker {answer['rank']}: {answer['error']}" for answer in answers if "error" in answer]
        if errors:
            known = {"lost": NotOurs, "stepped": Moved}
            kinds = [known[answer["why"]] for answer in answers if answer.get("why") in known]
            raised = kinds[0] if kinds else WorkerFailed
            raise raised("; ".join(dict.fromkeys(errors)) if len(answers) > 1 else answers[0]["error"])
        return sorted(answers, key=lambda answer: answer["rank"])

    async def chain(self, calls: Sequence[Call], returned: list[Any] | None = None) -> list[Any]:
        """Make calls in order, up to the first one that raises or does not return what it has to; in one message if the
        handle can.

        Args:
            returned: a list that gets what is returned, also if a call raises.

        Returns:
            what the calls returned that were made.
        """
        returned = [] if returned is None else returned
        for call, number in zip(calls, judges(calls), strict=True):
            if number is not None and returned[number]:
                returned.append(None)
                continue
            returned.append(await getattr(self, call.method)(*call.arguments, **call.options))
            if call.wanted and returned[-1] not in call.wanted:
                break
        return returned

    async def _ask(self, request: str) -> Sequence[str]:
        """Return each worker's reply to a request."""
        raise NotImplementedError

    async def paused(self) -> bool:
        """Return True if generation is paused; requests that the user's pause lets end may still run."""
        raise NotImplementedError

    async def stands(self) -> bool:
        """Return True if generation is paused, after waiting for requests that the user's pause lets end first."""
        return await self.paused()

    async def moves(self) -> bool:
        """Return True if the engine generates. Calls to its workers are made between steps, so that a step lies between
        two calls if there is something to compute."""
        counts = list[list[int]]()
        for _ in range(3):
            counts.append([answer["steps"] for answer in await self.rpc("steps")])
            await self.rest()
        return any(count != counts[0] for count in counts)

    async def rest(self) -> None:
        """Wait for `LOOK_S` before the next look at what an engine does."""
        await asyncio.sleep(LOOK_S) if self.suspends else time.sleep(LOOK_S)

    async def pause(self, mode: str) -> None:
        """Stop generation; `mode` is a `Pause`."""
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    async def sleep(self, level: int) -> None:
        """Unmap the weights and the KV cache again, after a push that woke them was refused."""
        raise NotImplementedError

    async def wake(self, tag: str) -> None:
        """Map the memory of a sleeping engine again: "weights" or "kv_cache"."""
        raise NotImplementedError

    async def label(self, version: str) -> None:
        """Set the engine's name for its weights (the weight version)."""
        raise NotImplementedError

    async def name_adapter(self, there: bool) -> None:
        """Allow requests to name the loaded adapter, or forbid it."""

    async def check_versions(self) -> None:
        """Raise `PushRefused` if this engine cannot keep versions of adapters, before anything is sent."""

    async def name_version(self, name: str, path: str) -> None:
        """Let requests name a version of an adapter that all workers have."""

    async def allow_adapters(self, paths: Sequence[str], end: bool, coming: Sequence[str] = ()) -> list[str]:
        """Let requests ask for these of this package's adapters alone (adapter_versions.py).

        Args:
            end: whether requests in flight that have another one are ended.
            coming: what a push is about to bring: while the engine is paused, requests for it come in, and wait.

        Returns:
            the paths that requests in flight have.
        """
        raise NotImplementedError

    async def end_wrong_mode_requests(self, adapter: bool) -> None:
        """End requests that came while a push changed the mode and were made for the other one: their clients get
        "abort". Do nothing if this engine cannot tell them apart.

        Args:
            adapter: whether adapter mode is the new one.
        """

    async def end_tenants_requests(self, merged: bool, ids: Sequence[int], served: Sequence[int]) -> None:
        """End requests that came while a push changed the tenants, as `StaleRequests` says which: their clients get
        "abort". From now on refuse requests of tenants that are not served.

        Args:
            served: the ids of those that are.
        """
        raise NotImplementedError

    async def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        """Drop cached blocks; with `running` also those of requests, which then compute them again. Return whether that
        worked."""
        raise NotImplementedError

    async def will_keep(self) -> str:
        """Prepare a paused engine for a push that keeps the KV cache of requests in flight; name those whose cache
        cannot be kept, "" for none."""
        raise NotImplementedError

    async def keep_cache(self) -> bool:
        """Leave requests in flight their cached blocks, and drop these for all others. Return whether that worked."""
        raise NotImplementedError

    async def reset_media_caches(self) -> None:
        """Drop encoders' outputs for images and other media, and queries that wait to be scored. (Caches of processed
        inputs stay: those depend on no weights.)"""
        raise NotImplementedError

    async def holders(self) -> str:
        """Name the requests of a paused engine whose cached blocks no reset can drop, as they wait for more of their
        input; "" for none."""
        return ""
