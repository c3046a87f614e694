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
"""Seconds between two looks at what an engine does."""
TIMEOUT_S = 600
"""Seconds that a control call over HTTP may take."""


class WorkerFailed(RuntimeError):
    """Workers of an engine reported an error; the other workers have done their part."""


class NotOurs(WorkerFailed):
    """An engine is not in the middle of this trainer's push (any more): nothing was done."""


class Moved(WorkerFailed):
    """An engine has generated in the middle of a push."""


class Unheard(RuntimeError):
    """No answer to a message came, and how far the engine came with it, nobody knows."""


class OutOfStep(RuntimeError):
    """An engine returned the answers to an earlier call: after a call failed in one worker, the others' answers were
    left unread. The engine cannot be used any more."""


@dataclass(frozen=True, slots=True)
class Call:
    """One of several that are made in one go.

    Args:
        method: of `Control`.
        arguments, options: as it takes them.
        wanted: what it has to return for the next one to be made; empty where that may be anything.
        unless: an earlier one of the same chain: where that returned something true, this one is not made, and returns
            None.
    """

    method: str
    arguments: Sequence[Any] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    wanted: Sequence[Any] = ()
    unless: Call | None = None


def judges(calls: Sequence[Call]) -> list[int | None]:
    """For every call of a chain the number of the one that decides whether it is made; None where none does."""
    return [next((at for at, one in enumerate(calls) if one is call.unless), None) for call in calls]


class Control:
    """What is asked of an engine. Every method is a coroutine function; those of synchronous handles never suspend.

    Attributes:
        handle: what the user gave.
        engine: what is called.
        workers: process ids of its workers on this host, other processes than this one. A call that is under way when
            the engine dies is left without an answer for ever.
        far: whether it has workers on other hosts, which cannot look this process up.
    """

    adapters: str | None = None
    """Why adapters cannot be served over this handle."""
    media: str | None = None
    """Why encoders' caches cannot be reset over this handle."""
    name: ClassVar[str] = ""
    """Of this kind of engines."""
    plugins: ClassVar[str] = ""
    """The environment variable that says which plugins the engine loads."""

    def __init__(self, handle: Any) -> None:
        self.handle = self.engine = handle
        self.workers: list[int] = []
        self.far = False

    @property
    def suspends(self) -> bool:
        """Whether calls have to be awaited in the handle's own event loop."""
        return False

    @property
    def keeps(self) -> bool:
        """Whether requests may be in flight between its calls, which a pause of its user's keeps."""
        return True

    @property
    def beats(self) -> bool:
        """Whether calls can be made beside one that is under way."""
        return True

    @property
    def elsewhere(self) -> bool:
        """Whether, as far as is known, other processes do all the work of its calls."""
        return bool(self.workers)

    def unfit(self) -> str:
        """Why no push can reach this engine, as far as this process knows already, in words that follow its name;
        "" where nothing is known."""
        return ""

    async def rpc(self, op: str, **message: Any) -> list[dict[str, Any]]:
        """Call an operation of engine/worker/commands.py, or one of the engine's own, in every worker.

        Returns:
            their answers, in rank order.

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

    def _answers(self, call: str, told: Sequence[str]) -> list[dict[str, Any]]:
        """What workers have answered to a call; raises as `rpc`."""
        answers = [json.loads(answer) for answer in told]
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
        """Make calls in their order, up to the first one that does not return what it has to, in one message where the
        handle can.

        Args:
            returned: a list that gets what is returned, also where a call raises.

        Returns:
            what those returned that were made.

        Raises:
            what a call raises; those after it are not made.
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
        """What each worker answers to a request."""
        raise NotImplementedError

    async def paused(self) -> bool:
        """Whether generation is paused; requests that its user's pause lets end may run on."""
        raise NotImplementedError

    async def stands(self) -> bool:
        """Whether generation is paused, and stands still: a pause of its user's that lets requests end first is waited
        for."""
        return await self.paused()

    async def moves(self) -> bool:
        """Whether the engine generates. A call to its workers is made between two steps, so that a step lies between
        two calls wherever there is something to compute."""
        counts = list[list[int]]()
        for _ in range(3):
            counts.append([answer["steps"] for answer in await self.rpc("steps")])
            await self._rest()
        return any(count != counts[0] for count in counts)

    async def _rest(self) -> None:
        """Wait for a moment."""
        await asyncio.sleep(LOOK_S) if self.suspends else time.sleep(LOOK_S)

    async def pause(self, mode: str) -> None:
        """Stop generation; `mode` is one of `PAUSES`."""
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
        """Allow requests to name the loaded adapter from now on, or forbid it."""

    async def end_wrong_mode_requests(self, adapter: bool) -> None:
        """End requests that came while a push changed the mode and were made for the other one: their clients hear
        "abort". Where nobody can tell them, none is.

        Args:
            adapter: whether adapter mode is the one from now on.
        """

    async def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        """Drop cached blocks; with `running` also those of requests, which then compute them again. Returns whether it
        worked."""
        raise NotImplementedError

    async def reset_media_caches(self) -> None:
        """Forget what encoders made of images and other media, and queries that wait to be scored. (Inputs as
        processors leave them depend on no weights: where those are cached they stay.)"""
        raise NotImplementedError

    async def holders(self) -> str:
        """Name the requests of a paused engine whose cached blocks no reset can drop, as they wait for more of their
        input; "" for none."""
        return ""
