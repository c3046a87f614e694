"""Which of this package's adapters requests may ask for, in vLLM's engine core and in front of it.

A worker that is asked for an adapter it does not have ends the whole engine. So an engine looks at each request before
its scheduler gets it, and one that asks for an adapter which was not pushed or has gone (another mode, a version that
is not kept any more), or for a tenant that is not served any more, ends with an error.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

from ..adapter_versions import CONSTANT_PATH, PREFIX
from ..tenants import PATHS
from . import internals
from .names import ADAPTERS, TENANTS
from .stand_in import stands_in

_ALLOWED = "_lora_merge_allowed"
"""Attribute of an engine core that had adapters: the paths that requests may ask for."""
_COMING = "_lora_merge_coming"
"""Attribute of an engine core into which a push brings adapters: the paths of these."""
_TENANTS = "_lora_merge_tenants"
"""Attribute of an engine core that had tenants: the ids of those that are served."""
_ENDED = "_lora_merge_ended"
"""Attribute of an engine core in its owner's process: names of requests that were ended and not told of yet."""


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
    setattr(core, _ALLOWED, allowed)
    setattr(core, _COMING, frozenset(told["coming"]))
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
        merged, ids: as of `StaleRequests`.
        served: ids.
    """
    setattr(core, _TENANTS, frozenset(served))
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
    """Let a class of engine cores look at what requests ask for, and answer this module's calls where workers are
    called, which servers and Ray actors offer; harmless when called twice.

    Args:
        core: vLLM's `EngineCore`, of 0.26, 0.32 or 0.33.
    """
    if not hasattr(core.add_request, _ALLOWED):
        core.add_request = _guarded(core.add_request)
        functions: dict[str, Callable[..., Any]] = {ADAPTERS: lora_merge_adapters, TENANTS: lora_merge_tenants}
        core.collective_rpc = answering(core.collective_rpc, functions)


def _guarded(add: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(add)
    def add_request(core: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if not _refuses(core, request.lora_request):
            return add(core, request, *args, **kwargs)
        if not hasattr(core, "_send_error_outputs_to_client"):  # in its owner's process, where a door is in front
            raise ValueError(_refusal(request.lora_request))
        core._send_error_outputs_to_client([request.request_id], request.client_index)
        return None

    setattr(add_request, _ALLOWED, True)
    return add_request


def _paused(core: Any) -> bool:
    """Return True if new requests wait."""
    state = getattr(core.scheduler, "pause_state", None)
    return state is not None and state.name != "UNPAUSED"


def answering(call: Callable[..., Any], functions: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return `EngineCore.collective_rpc`, which also reaches some functions of the core: over HTTP, and in an actor,
    nothing else reaches it.

    Args:
        functions: by name, each called with the core and the arguments of the call.
    """

    @functools.wraps(call)
    def collective_rpc(core: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        function = functions.get(method) if isinstance(method, str) else None
        return call(core, method, timeout, args, kwargs) if function is None else [function(core, *args)]

    return collective_rpc


class Door:
    """An input processor's `_validate_lora` that refuses requests for adapters which are not there, and of tenants
    which are not served, in the process that makes them: before anything of vLLM's has noted the request.

    Args:
        check: vLLM's own, in whose place it stands.
    """

    def __init__(self, check: Callable[[Any], None]) -> None:
        self._check = check
        self.allowed: frozenset[str] | None = None
        self.tenants: frozenset[int] = frozenset()

    def __call__(self, lora: Any) -> None:
        if _lacks(lora, self.allowed, self.tenants):
            raise ValueError(_refusal(lora))
        self._check(lora)


def shut(engine: Any, allowed: Iterable[str] | None = None, *, tenants: Iterable[int] | None = None) -> None:
    """Let the door of a handle's engine, where this process makes its requests, pass some adapters alone.

    Args:
        allowed: paths of adapters; None: as before.
        tenants: ids of tenants; None: as before.
    """
    processor = getattr(engine, "input_processor", None)
    check = getattr(processor, "_validate_lora", None)
    if processor is None or check is None:
        return
    if not isinstance(check, Door):
        check = processor._validate_lora = Door(check)
    check.allowed = check.allowed if allowed is None else frozenset(allowed)
    check.tenants = check.tenants if tenants is None else frozenset(tenants)


def guard_in_front(engine: Any) -> None:
    """Let a class of engines whose owner steps them refuse, where their core runs in this process, what the core would,
    and hear which requests were ended: vLLM notes a request before its core sees it, and would wait for the answer for
    ever. Harmless when called twice.

    Args:
        engine: vLLM's `LLMEngine`.
    """
    if not hasattr(engine.__init__, _ALLOWED):
        engine.__init__ = _guarded_in_front(engine.__init__)
        setattr(engine.__init__, _ALLOWED, True)


@stands_in
def _guarded_in_front(make: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
    make(engine, *args, **kwargs)
    core: Any = getattr(engine.engine_core, "engine_core", None)
    processor: Any = getattr(engine, "input_processor", None)
    if core is None:
        return
    _tell_ended(core)
    if hasattr(processor, "_validate_lora") and engine.vllm_config.lora_config is not None:
        processor._validate_lora = _DoorOfCore(processor, core)


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


class _DoorOfCore:
    """An input processor's `_validate_lora` that asks the core, whoever pushes into it. It keeps neither alive."""

    def __init__(self, processor: Any, core: Any) -> None:
        self._processor: Callable[[], Any] = ref(processor)
        self._core: Callable[[], Any] = ref(core)

    def __call__(self, lora: Any) -> None:
        processor = self._processor()
        if _refuses(self._core(), lora):
            raise ValueError(_refusal(lora))
        type(processor)._validate_lora(processor, lora)


def _refuses(core: Any, lora: Any) -> bool:
    allowed: frozenset[str] = getattr(core, _ALLOWED, frozenset())
    if _paused(core):
        allowed |= getattr(core, _COMING, frozenset())
    return _lacks(lora, allowed, getattr(core, _TENANTS, frozenset()))


def _lacks(lora: Any, allowed: frozenset[str] | None, tenants: frozenset[int]) -> bool:
    if lora is None:
        return False
    if lora.lora_path.startswith(PATHS):
        return lora.lora_int_id not in tenants
    return allowed is not None and lora.lora_path.startswith(PREFIX) and lora.lora_path not in allowed


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
