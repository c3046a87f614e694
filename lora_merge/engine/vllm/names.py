"""Names that this package has in vLLM: of its backend, and of methods that the plugin adds to vLLM's classes."""

from __future__ import annotations

BACKEND = WORKER_METHOD = "lora_merge"
"""The weight-transfer backend, and the method of workers through which everything of a push reaches them."""
CORE_PREFIX = "lora_merge_"
"""Begins the names of methods that the engine core gets; where workers are called, these reach the core (core.py)."""
CALLS = "lora_merge_calls"
WRONG_MODE = "lora_merge_end_wrong_mode_requests"
STILL_PAUSED = "lora_merge_still_paused"
HOLDERS = "lora_merge_holders"
ADAPTERS = "lora_merge_adapters"
TENANTS = "lora_merge_tenants"
"""These six are methods of the engine core; see core.py and, for the last two, kept_requests.py."""
WILL_KEEP = "lora_merge_will_keep"
KEEP_CACHE = "lora_merge_keep_cache"
"""So are these two; see kept.py."""


def registered() -> bool:
    """Return True if vLLM has loaded the plugin in this process; its other processes read the same VLLM_PLUGINS."""
    from vllm.v1.worker.worker_base import WorkerBase

    return hasattr(WorkerBase, WORKER_METHOD)


def other_backend(backend: str) -> str:
    """Return what is wrong with an engine that was started for another weight-transfer backend."""
    return (
        f"was started for vLLM's weight-transfer backend {backend!r}: pass "
        f'weight_transfer_config=WeightTransferConfig(backend="{BACKEND}"), or none'
    )
