"""What vLLM's engine core does where a push keeps the KV cache of requests in flight (`cache="keep"`), and what it
notes of every request's versions.

- **A request that has begun** keeps its blocks and goes on from them. vLLM's own reset of the prefix cache takes every
  block's hash, and with that its contents from all lookups. The hashes that such a request brings to later blocks
  become its own, as those blocks were computed after old ones: nobody else finds them, and it looks nothing up itself.
- **A new request** therefore computes its prompt with the new weights, and its blocks are found by others as usual.
- **A request that vLLM preempts** loses its blocks, and is computed again with the weights of that moment.

A push calls the core when generation stands still. Read in vLLM 0.32 and 0.33, run with 0.32; 0.26 is refused.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..adapter_versions import label_of
from .names import KEEP_CACHE, WILL_KEEP
from .stand_in import stands_in

SPANS = "lora_merge"
"""Key under which an answer's `kv_transfer_params` say its versions: the only field that vLLM carries through from its
core to every kind of answer. (Engines with a KV connector, which use it, are refused.)"""
_HISTORY = "_lora_merge_history"
"""Attribute of a request: for each change of the version, the one before, and how many tokens the request had sampled
(with those that a step under way has sampled), how many positions were in its KV cache, and how often it had been
preempted."""


def lora_merge_will_keep(core: Any) -> str:
    """Prepare an engine for pushes that keep: from now on its answers say their versions.

    Args:
        core: vLLM's `EngineCore`, which is paused.

    Returns:
        ids of requests that cannot be kept; "" for none. A session of streamed input counts its tokens anew with each
        part, so that nothing could say later which of them are old.
    """
    _tell_versions(core)
    return ", ".join(name for name, request in core.scheduler.requests.items() if request.resumable and _begun(request))


def lora_merge_keep_cache(core: Any) -> bool:
    """Leave requests in flight the blocks that they have, and let no other request find these.

    Args:
        core: vLLM's `EngineCore`, which is paused.

    Returns:
        True if vLLM's prefix cache was reset.
    """
    manager = core.scheduler.kv_cache_manager
    pool = manager.block_pool
    # The reset asks first whether blocks are in use, which is what it must not mind here.
    pool.get_num_free_blocks = lambda: pool.num_gpu_blocks - 1
    try:
        done = bool(manager.reset_prefix_cache())
    finally:
        del pool.get_num_free_blocks
    for request in core.scheduler.requests.values():
        if request.num_computed_tokens:
            _set_apart(request)
    return done


def _set_apart(request: Any) -> None:
    """Give the blocks of a request hashes that no other request has; each further hash is made of the last one."""
    salt = secrets.token_bytes(64)
    hashes = request.block_hashes
    hashes[:] = [_mixed(block, int.from_bytes(salt[: len(block)], "big")) for block in hashes]
    request.cache_salt = f"{request.cache_salt or ''}{salt.hex()}"  # for the first hash, where there is none yet
    request.skip_reading_prefix_cache = True


def _mixed(block: bytes, salt: int) -> bytes:
    """Return a hash that is another one for each salt."""
    return (int.from_bytes(block, "big") ^ salt).to_bytes(len(block), "big")


def _begun(request: Any) -> bool:
    return bool(request.num_computed_tokens or request.num_output_tokens)


def _tell_versions(core: Any) -> None:
    """Have an engine's answers say their versions, from now on; harmless when called twice."""
    scheduler = core.scheduler
    if "update_from_output" in vars(scheduler):
        return
    update = scheduler.update_from_output

    @functools.wraps(update)
    def update_from_output(scheduled: Any, computed: Any) -> Any:
        # Those that end in this step are forgotten in it.
        requests = {name: scheduler.requests.get(name) for name in scheduled.num_scheduled_tokens}
        outputs = update(scheduled, computed)
        for of_client in outputs.values():
            for output in of_client.outputs:
                request = requests.get(output.request_id)
                if request is not None and _tells(request, output):
                    spans = _spans(request, core.get_weight_version())
                    output.kv_transfer_params = {**(output.kv_transfer_params or {}), SPANS: spans}
        return outputs

    scheduler.update_from_output = update_from_output


def _tells(request: Any, output: Any) -> bool:
    """Return True if an output may be the last one of its request (the front end ends those with stop strings), or if
    its request has seen several versions."""
    if request.sampling_params is None or request.resumable:
        return False
    return output.finish_reason is not None or bool(request.sampling_params.stop) or _HISTORY in vars(request)


@stands_in
def noting(set_version: Callable[[Any, str], None], core: Any, weight_version: str) -> None:
    """Set the version of an engine, but first note on every request in flight where the old one ends. (An engine notes
    from its start on: the first push that keeps may come late in a request.)"""
    before = core.get_weight_version()
    for request in core.scheduler.requests.values():
        if _begun(request):
            # In its owner's process, an engine that schedules ahead (async_scheduling) has a step under way, of which
            # nothing was delivered yet.
            sampled = request.num_output_tokens + request.num_output_placeholders
            noted = (before, sampled, request.num_computed_tokens, request.num_preemptions)
            vars(request).setdefault(_HISTORY, []).append(noted)
    set_version(core, weight_version)


def _spans(request: Any, version: str) -> dict[str, Any]:
    """Return the versions of a request, as `weight_spans` reads them."""
    history: Sequence[tuple[str, int, int, int]] = vars(request).get(_HISTORY, ())
    own = None if request.lora_request is None else label_of(request.lora_request.lora_path)
    if own is not None:  # all of it is of the version of an adapter that it began with; the engine has the base's name
        history, version = (), own
    tokens, computed = request.num_output_tokens, max(request.num_tokens - 1, 0)
    # What was computed before the last preemption was computed again after it.
    stays = [(name, kv) for name, _, kv, preempted in history if preempted == request.num_preemptions]
    kv = _cut(stays, version, computed)
    return {
        "tokens": _cut([(name, sampled) for name, sampled, _, _ in history], version, tokens),
        "kv": kv,
        "mixed": len(kv) > 1,
    }


def _cut(ends: Sequence[tuple[str, int]], last: str, total: int) -> list[list[Any]]:
    """Return `[version, start, end]` for each stretch that is not empty.

    Args:
        ends: versions in order, each with the end of its stretch.
        last: the version that follows, to `total`.
    """
    found, start = list[list[Any]](), 0
    for version, end in (*ends, (last, total)):
        if start < min(end, total):
            found.append([version, start, min(end, total)])
            start = end
    return found


OF_CORE: Mapping[str, Callable[[Any], Any]] = {WILL_KEEP: lora_merge_will_keep, KEEP_CACHE: lora_merge_keep_cache}
"""Methods that the plugin adds to vLLM's `EngineCore`, by name."""


def hook(core: Any) -> None:
    """Add what this module needs to vLLM's class `EngineCore`; harmless when called twice."""
    if hasattr(core, KEEP_CACHE) or not hasattr(core, "set_weight_version"):  # 0.26 has no versions
        return
    core.set_weight_version = noting(core.set_weight_version)
    for name, method in OF_CORE.items():
        setattr(core, name, method)


def unkept(config: Any, has_versions: bool) -> str:
    """Return why an engine cannot keep its KV cache over a push, in words that follow its name; "" where it can.

    Args:
        config: vLLM's `VllmConfig`.
        has_versions: whether this vLLM notes versions.
    """
    events, connector = config.kv_events_config, config.kv_transfer_config
    if not has_versions:
        return "runs a vLLM that notes no weight versions of its answers, so that nobody could tell what is old: 0.32"
    if connector is not None and connector.kv_connector:
        return f"has a KV connector ({connector.kv_connector}), which hands blocks of the old weights to new requests"
    if events is not None and events.enable_kv_cache_events:
        return "tells others of its blocks (kv_events_config), who would send it requests for blocks that it keeps"
    if getattr(getattr(config, "aux_output_config", None), "enabled", False):
        return (
            "returns the experts that tokens went to (enable_return_routed_experts), which it stores by prompt until "
            "its caches are reset: new requests would be given those of the old weights"
        )
    if config.model_config.runner_type == "pooling":
        return "is a pooling engine, whose answers could not say of which weights they are"
    scheduler = config.scheduler_config.scheduler_cls  # vLLM's own where it is None
    where = scheduler if isinstance(scheduler, str) else getattr(scheduler, "__module__", "")
    if scheduler is not None and not where.startswith("vllm."):
        return "has a scheduler of its own (scheduler_cls), of which nothing is known here"
    return ""
