"""Methods that vLLM's engine core gets. `lora_merge_calls` makes several of the core's calls for one message; the
others do what the core does not do by itself.

A message to an engine in another process goes through six threads there and back, most of a millisecond, and a push
has ten small calls. What one of them returns decides whether the next is made, so it is judged here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from ..worker.answered import Answered
from . import internals
from .adapter import ADAPTER_ID
from .kept_requests import end_requests_with, lora_merge_adapters, lora_merge_tenants
from .names import ADAPTERS, CALLS, CORE_PREFIX, HOLDERS, STILL_PAUSED, TENANTS, WRONG_MODE
from .stand_in import stands_in

_ANSWERED = "_lora_merge_answered"
"""Attribute of an engine core: the answers to `lora_merge_calls`."""


def lora_merge_calls(core: Any, calls: Sequence[Sequence[Any]], number: str | None = None) -> str | Future[str]:
    """Make calls in order, up to the first that fails or does not return what it has to.

    Args:
        core: vLLM's `EngineCore`.
        calls: each as (method, arguments, wanted, unless). method: of the core; the name of one that not every release
            has ends with "?", and returns None where it is missing. wanted: what it has to return for the next call to
            be made; empty for anything (workers that report an error always end the calls). unless: None, or the number
            of an earlier call: if that returned something true, this one is not made, and returns None.
        number: which no other calls have. Those that come again, as a proxy repeats a POST, are not made again.

    Returns:
        JSON: `returned` by the calls that were made, and `failed`, the error of the one after them; "" for none.
    """
    answered: Answered[Future[str]] = core.__dict__.setdefault(_ANSWERED, Answered())
    ended = answered.to(number)
    if ended is None:
        done = _Calls(core, calls)
        ended = answered.keep(number, done.ended)
        done.go_on()
    return ended if not ended.done() else ended.result()


def lora_merge_end_wrong_mode_requests(core: Any, adapter: bool) -> None:
    """End requests that were made for the other mode: they would go on with the bare base, or ask for an adapter that
    has gone, which ends a worker. Nothing of them was computed yet, and their clients hear "abort".

    Args:
        core: vLLM's `EngineCore`, which is paused.
        adapter: True if adapter mode begins. Requests with other adapters of the user's stay.
    """
    end_requests_with(core, lambda lora: lora == 0 if adapter else lora == ADAPTER_ID)


def lora_merge_still_paused(core: Any, paused: str) -> bool | Future[bool]:
    """Return True if generation is paused, once it stands still: a pause that lets requests end first is waited for.

    Args:
        core: vLLM's `EngineCore`.
        paused: name of its method that says whether it is paused.
    """

    def now() -> bool:
        return bool(getattr(core, paused)())

    state = getattr(getattr(core.scheduler, "pause_state", None), "name", "")
    if state != "PAUSED_NEW" or not hasattr(core, "has_work") or not core.has_work():
        return now()
    found: Future[bool] = Future()

    def ended(pause: Future[Any]) -> None:
        if (error := pause.exception()) is not None:
            found.set_exception(error)
        else:
            found.set_result(now())

    pause = core.pause_scheduler("wait", False)  # the same once more: it changes nothing, and ends with the user's own
    if pause is None:
        return now()
    pause.add_done_callback(ended)
    return found


def lora_merge_holders(core: Any) -> str:
    """Return the ids of requests whose blocks vLLM cannot take from them: those that wait for more of their input
    (streaming-input sessions), or for blocks of other engines. Running ones release theirs when its prefix cache is
    reset.

    Args:
        core: vLLM's `EngineCore`, which is paused.
    """
    scheduler = core.scheduler
    running = {request.request_id for request in scheduler.running}
    blocks = scheduler.kv_cache_manager.get_block_ids
    return ", ".join(name for name in scheduler.requests if name not in running and any(blocks(name)))


class _Calls:
    """Calls under way. Where one ends later (vLLM pauses when its requests have stopped), so do those after it."""

    def __init__(self, core: Any, calls: Sequence[Sequence[Any]]) -> None:
        self._core, self._left = core, list(calls)
        self._returned: list[Any] = []
        self._late = False
        self.ended: Future[str] = Future()

    def go_on(self, late: Future[Any] | None = None) -> None:
        """Make the calls that are left.

        Args:
            late: what the first of them has returned before, which has ended by now.
        """
        while self._left:
            name, arguments, wanted, unless = self._left[0]
            try:
                if unless is not None and self._returned[unless]:
                    self._returned.append(None)
                else:
                    found = self._method(name)(*arguments) if late is None else late.result()
                    if isinstance(found, Future):
                        self._late = True
                        found.add_done_callback(self.go_on)
                        return
                    if not self._may_go_on(found, wanted):
                        break
            except Exception as error:
                self._end(f"{name}: {error}")
                return
            late = None
            del self._left[0]
        self._end()

    def _method(self, name: str) -> Callable[..., Any]:
        if name.endswith("?") and not hasattr(self._core, name[:-1]):
            return lambda *arguments: None  # this release does not have it
        method: Callable[..., Any] = getattr(self._core, name.removesuffix("?"))
        return method

    def _may_go_on(self, found: Any, wanted: Sequence[Any]) -> bool:
        self._returned.append(found)
        if isinstance(found, list):  # answers of workers; see `respond`
            return not any("error" in json.loads(answer) for answer in found)
        return not wanted or found in wanted

    def _end(self, failed: str = "") -> None:
        if self._late and hasattr(self._core, "input_queue"):
            # When vLLM has nothing to do, it tells of what has ended, and then waits for a message, also where these
            # calls have brought it work: a resume lets requests go on that were kept.
            self._core.input_queue.put_nowait((internals.EngineCoreRequestType.WAKEUP, None))
        self.ended.set_result(json.dumps({"returned": self._returned, "failed": failed}))


OF_CORE: dict[str, Callable[..., Any]] = {
    CALLS: lora_merge_calls,
    WRONG_MODE: lora_merge_end_wrong_mode_requests,
    STILL_PAUSED: lora_merge_still_paused,
    HOLDERS: lora_merge_holders,
    ADAPTERS: lora_merge_adapters,
    TENANTS: lora_merge_tenants,
}
"""Methods that the plugin adds to vLLM's `EngineCore`, by name."""


def install(core: Any) -> None:
    """Add them to a class of engine cores, and let calls of its workers reach them: over HTTP, and in an actor, nothing
    else reaches the core. Harmless when called twice."""
    if not hasattr(core, CALLS):
        core.collective_rpc = _reaching(core.collective_rpc)
    for name, method in OF_CORE.items():
        setattr(core, name, method)


@stands_in
def _reaching(
    call: Callable[..., Any], core: Any, method: Any, timeout: Any = None, args: Sequence[Any] = (), kwargs: Any = None
) -> Any:
    """Call a method of all workers; or one of the core, whose answer is given as that of one worker, in a future where
    it comes later."""
    if not isinstance(method, str) or not method.startswith(CORE_PREFIX):
        return call(core, method, timeout, args, kwargs)
    found = getattr(core, method)(*args)
    if not isinstance(found, Future):
        return [found]
    listed: Future[list[Any]] = Future()

    def ended(later: Future[Any]) -> None:
        if (error := later.exception()) is not None:
            listed.set_exception(error)
        else:
            listed.set_result([later.result()])

    found.add_done_callback(ended)
    return listed
