"""Which of this package's adapters requests may ask for, in vLLM's engine core and in front of it.

A worker that is asked for an adapter it does not have ends the whole engine. So an engine looks at each request before
its scheduler gets it, and one that asks for an adapter which was not pushed or has gone (another mode, a version that
is not kept any more), or for a tenant that is not served any more, ends with an error.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from inspect import ismethod
from typing import Any
from weakref import WeakMethod, ref

from ..adapter_versions import CONSTANT_PATH, PREFIX
from ..tenants import PATHS
from . import internals
from .stand_in import stands_in

_SERVED = "_lora_merge_served"
"""Attribute of an engine core that had adapters of this package: what requests may ask for."""
_ENDED = "_lora_merge_ended"
"""Attribute of an engine core in its owner's process: names of requests that were ended and not told of yet."""


@dataclass(frozen=True)
class Served:
    """Which of this package's adapters requests may ask for.

    Args:
        allowed: paths; None: all, where no push from this process has said which.
        coming: paths that a push is about to bring. Requests that wait for it may ask for them.
        tenants: ids.
    """

    allowed: frozenset[str] | None = frozenset()
    coming: frozenset[str] = frozenset()
    tenants: frozenset[int] = frozenset()

    def check(self, lora: Any, waits: bool) -> None:
        """Raise ValueError if what a request asks for, a `LoRARequest` or None, is an adapter that is not there."""
        path = "" if lora is None else lora.lora_path
        if path.startswith(PATHS):
            there = lora.lora_int_id in self.tenants
        else:
            there = self.allowed is None or not path.startswith(PREFIX) or path in self.allowed
            there = there or (waits and path in self.coming)
        if not there:
            raise ValueError(_refusal(lora))


def _served(core: Any) -> Served:
    served: Served = getattr(core, _SERVED, Served())
    return served


def lora_merge_adapters(core: Any, message: str) -> str:
    """Allow requests to ask for some of this package's adapters, and for no other one of them.

    Args:
        core: vLLM's `EngineCore`.
        message: JSON: `allowed`, paths; `end`: whether requests that have another one are ended. (The engine is paused
            then, so that nothing of them was computed with other weights.) `coming`, paths that a push is about to
            bring: requests may ask for them, too, while the engine is paused, and wait.

    Returns:
        JSON: `in_use`, the paths that requests in flight have.
    """
    told = json.loads(message)
    allowed = frozenset(told["allowed"])
    setattr(core, _SERVED, replace(_served(core), allowed=allowed, coming=frozenset(told["coming"])))
    ours = {
        name: request.lora_request.lora_path
        for name, request in core.scheduler.requests.items()
        if request.lora_request is not None and request.lora_request.lora_path.startswith(PREFIX)
    }
    if told["end"]:
        end_requests(core, [name for name, path in ours.items() if path not in allowed])
        ours = {name: path for name, path in ours.items() if path in allowed}
    return json.dumps({"in_use": sorted(set(ours.values()))})


def lora_merge_tenants(core: Any, merged: bool, ids: Sequence[int], served: Sequence[int]) -> None:
    """End requests that came while the tenants changed and were made for the ones before: they would be answered by
    another one, or ask for an adapter that has gone. From now on refuse those of tenants that are not served.

    Args:
        core: vLLM's `EngineCore`, which is paused.
        merged, ids: see `StaleRequests`.
        served: ids.
    """
    setattr(core, _SERVED, replace(_served(core), tenants=frozenset(served)))
    end_requests_with(core, lambda lora: merged if lora == 0 else lora in ids)


def end_requests_with(core: Any, ends: Callable[[int], bool]) -> None:
    """End the requests for whose adapter's id (0: none) `ends` returns True."""
    requests = core.scheduler.requests.items()
    end_requests(
        core, [name for name, one in requests if ends(one.lora_request.lora_int_id if one.lora_request else 0)]
    )


def end_requests(core: Any, names: Sequence[str] | None = None) -> None:
    """End requests of a core, or all; their clients hear "abort"."""
    names = [*core.scheduler.requests] if names is None else names
    ended = core.scheduler.finish_requests(names, internals.RequestStatus.FINISHED_ABORTED) if names else []
    if not hasattr(core, "_send_abort_outputs"):  # in its owner's process
        getattr(core, _ENDED, []).extend(names)
    elif ended:
        core._send_abort_outputs(ended)


def guard(core: Any) -> None:
    """Let a class of engine cores look at what requests ask for; harmless when called twice.

    Args:
        core: vLLM's `EngineCore`, of 0.26, 0.32 or 0.33.
    """
    if not hasattr(core.add_request, _SERVED):
        core.add_request = _guarded(core.add_request)


def _guarded(add: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(add)
    def add_request(core: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            _check(core, request.lora_request)
        except ValueError:
            if not hasattr(core, "_send_error_outputs_to_client"):  # in its owner's process, where a `Door` is in front
                raise
            core._send_error_outputs_to_client([request.request_id], request.client_index)
            return None
        return add(core, request, *args, **kwargs)

    setattr(add_request, _SERVED, True)
    return add_request


def _check(core: Any, lora: Any) -> None:
    """Raise ValueError if a core does not serve what a new request asks for."""
    state = getattr(core.scheduler, "pause_state", None)
    _served(core).check(lora, waits=state is not None and state.name != "UNPAUSED")


class Door:
    """An input processor's `_validate_lora`, which refuses requests for adapters that are not there in the process that
    makes them: before anything of vLLM's has noted the request. If the core runs in this process, it asks the core,
    else it goes by `served`: what pushes from this process have brought. It keeps neither core nor processor alive.

    Args:
        engine: vLLM's `LLMEngine` or `AsyncLLM`.
    """

    def __init__(self, engine: Any) -> None:
        core, check = core_inside(engine), engine.input_processor._validate_lora
        self._check: Callable[[], Any] = WeakMethod(check) if ismethod(check) else lambda: check
        self._core: Callable[[], Any] = ref(core) if core is not None else lambda: None
        self.served = Served(allowed=None)

    def __call__(self, lora: Any) -> None:
        core = self._core()
        if core is None:
            self.served.check(lora, waits=True)  # the core lets nothing in too early
        else:
            _check(core, lora)
        self._check()(lora)


def put_door(engine: Any, **served: Iterable[Any]) -> None:
    """Put a `Door` in front of a handle's engine, where this process makes its requests, unless it has one.

    Args:
        served: fields of the door's `Served` that change.
    """
    processor = getattr(engine, "input_processor", None)
    check = getattr(processor, "_validate_lora", None)
    if processor is None or check is None:
        return
    if not isinstance(check, Door):
        check = processor._validate_lora = Door(engine)
    check.served = replace(check.served, **{name: frozenset(some) for name, some in served.items()})


def core_inside(engine: Any) -> Any:
    """Return the core of an engine where it runs in this process; else None."""
    return getattr(getattr(engine, "engine_core", None), "engine_core", None)


def guard_in_front(engine: Any) -> None:
    """Let a class of engines whose owner steps them have a `Door` from the start on, where their core runs in this
    process, and hear which requests were ended: vLLM notes a request before its core sees it, and would wait for the
    answer for ever. Harmless when called twice.

    Args:
        engine: vLLM's `LLMEngine`.
    """
    if not hasattr(engine.__init__, _SERVED):
        engine.__init__ = _guarded_in_front(engine.__init__)
        setattr(engine.__init__, _SERVED, True)


@stands_in
def _guarded_in_front(make: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
    make(engine, *args, **kwargs)
    core = core_inside(engine)
    if core is None:
        return
    _tell_ended(core)
    if engine.vllm_config.lora_config is not None:
        put_door(engine)


def _tell_ended(core: Any) -> None:
    """Have a core say with its next step which requests were ended since the last one, as cores in processes of their
    own do by themselves."""
    step, ended = core.step_fn, vars(core).setdefault(_ENDED, list[str]())

    def telling() -> tuple[Any, bool]:
        outputs, executed = step()
        if ended:
            outputs, reason = outputs or {}, internals.FinishReason.ABORT
            said = [internals.EngineCoreOutput(name, [], finish_reason=reason) for name in ended]
            outputs.setdefault(0, internals.EngineCoreOutputs()).outputs.extend(said)
            ended.clear()
        return outputs, executed

    core.step_fn = telling


def _refusal(lora: Any) -> str:
    if lora.lora_path.startswith(PATHS):
        return (
            f"{lora.lora_name} is no tenant of this engine (any more): it serves what another push has brought, or was "
            "started anew; push the tenants again, and ask for lora_request(tenant=...) then"
        )
    if lora.lora_path == CONSTANT_PATH:
        return (
            f"{lora.lora_name} is not in this engine (any more): it holds what another push has brought, or was "
            "started anew; ask for sync.lora_request() again (it is None for merged weights)"
        )
    return (
        f"{lora.lora_name} is not kept in this engine (any more): ask for a newer version (sync.lora_request()), or "
        "keep more of them (push(mode='adapter', keep=...))"
    )
