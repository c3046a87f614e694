"""What SGLang loads through its entry-point group `sglang.srt.plugins`, in the process that starts an engine and in
each of its schedulers."""

from __future__ import annotations

from typing import Any

from .internals import HOOKED, PENALTIES, PREFIX, QUEUE_LIMIT, RELEASE_MEMORY, RESUME_MEMORY, RETRACT


def register() -> None:
    """Answer requests of this package by `check_weights`, notice weights that are unmapped, count what a request said
    before it began anew, forget its hidden states of before, and let it back into a full queue."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(HOOKED, check_weights, HookType.AROUND)
    HookRegistry.register(RELEASE_MEMORY, release_memory_occupation, HookType.AROUND)
    HookRegistry.register(RESUME_MEMORY, resume_memory_occupation, HookType.AROUND)
    HookRegistry.register(PENALTIES, count_again, HookType.AROUND)
    HookRegistry.register(QUEUE_LIMIT, abort_on_queued_limit, HookType.AROUND)
    HookRegistry.register(RETRACT, reset_for_retract, HookType.AROUND)


def check_weights(original: Any, manager: Any, request: Any) -> Any:
    """Answer requests of this package; pass all others to SGLang's own `check_weights`."""
    if not request.action.startswith(PREFIX):
        return original(manager, request)
    from .worker import lora_merge

    return lora_merge(manager, request.action.removeprefix(PREFIX))


def release_memory_occupation(original: Any, manager: Any, request: Any) -> Any:
    """Call SGLang's own, then forget the weights that went. What is mapped again in their place may look like them in
    part."""
    from .worker import released, releasing

    releasing(manager, request.tags)
    answer = original(manager, request)
    released(manager)
    return answer


def resume_memory_occupation(original: Any, manager: Any, request: Any) -> Any:
    """Call SGLang's own, then bring back what it did not keep."""
    from .worker import resumed

    answer = original(manager, request)
    resumed(manager)
    return answer


def count_again(original: Any, orchestrator: Any, *args: Any, **kwargs: Any) -> None:
    """Make the penalties of a batch; see penalties.py."""
    from .penalties import count_again

    count_again(original, orchestrator, *args, **kwargs)


def abort_on_queued_limit(original: Any, scheduler: Any, request: Any) -> Any:
    """End a request for which the queue has no place, unless it comes back to the queue: SGLang had taken it before."""
    return False if request.is_retracted else original(scheduler, request)


def reset_for_retract(original: Any, request: Any) -> None:
    """Forget what was computed of a request, and its hidden states with it: SGLang keeps those, and computes all anew:
    an answer had the rows of the old weights in front of all of the new ones."""
    original(request)
    request.hidden_states = []
