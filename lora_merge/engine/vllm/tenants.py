"""Tenants in vLLM's workers: its own LoRA slots, relative to the merged weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...stream.buckets import Slot, dtype_name
from ..payload.tenants import nothing, own_name, rank_of, relative, tables_of
from ..state import State
from ..tenants import PATHS, tenant_id
from ..transport.base import Received
from ..worker.session import WorkerSession
from .kept_adapters import OPERATIONS, keeper


def limits(config: Any) -> dict[str, Any]:
    """Return what adapters an engine serves, in the form of `LoraLimits`.

    Args:
        config: vLLM's `LoRAConfig`.
    """
    room = config.max_cpu_loras or config.max_loras
    return {"max_rank": config.max_lora_rank, "dtype": dtype_name(config.lora_dtype), "room": room}


@OPERATIONS.register
def receive_tenants(
    worker: Any,
    session: WorkerSession,
    layouts: Sequence[Any],
    which: Sequence[int],
    state: dict[str, Any],
    verify: bool,
) -> None:
    """Receive the factors of all tenants, and load each relative to the merged one. If that fails, the engine is
    dirty.

    Args:
        worker: a `VllmWorker`.
        layouts, which: what is in the buckets, see `TenantsSource`.
        state: that the engine holds after it.
    """
    before, brought = session.state(), State(**state)
    if (before.kind, before.version, before.trainer) != (brought.kind, brought.version, brought.trainer):
        raise RuntimeError(f"tenants belong to the merged weights of the same push; this engine holds {before}")
    session.begin("a push of tenants is under way or did not end")
    manager, merged = worker.raw.model_runner.lora_manager, dict[str, Tensor]()

    def load(slots: Sequence[Slot], received: Received) -> None:
        assert received.data is not None
        own = {own_name(slot): slot.view(received.data) for slot in slots}
        if received.index == 0:
            merged.update({name: factor.clone() for name, factor in own.items()})
            load_nothing(manager, brought.tenants[0], merged)
        elif not merged:
            raise RuntimeError("the merged tenant's factors have to come first")
        else:
            load_tenant(manager, brought.tenants[received.index], own, merged, received.index)

    session.receive(tables_of(layouts, which), load, verify)
    session.end(brought)


def load_tenant(manager: Any, name: str, own: dict[str, Tensor], merged: dict[str, Tensor], place: int) -> None:
    """Load a tenant relative to the merged one.

    Args:
        place: of the tenant among those beside the merged one, from 1. As many as there are slots get one now, the
            others when their first request comes.
    """
    made = relative(own, merged)
    rank = max(rank_of({factor: tensor.shape for factor, tensor in made.items()}).values())
    keeper(manager).put(path_of(name), tenant_id(name), made, rank)
    if place <= manager._adapter_manager.lora_slots:
        manager._adapter_manager.activate_adapter(tenant_id(name))


def load_nothing(manager: Any, name: str, merged: dict[str, Tensor]) -> None:
    """Load the merged tenant relative to itself: requests that began when it was not merged name its id."""
    keeper(manager).put(path_of(name), tenant_id(name), nothing(merged), 1)


def path_of(name: str) -> str:
    """Return the path of a tenant in requests."""
    return f"{PATHS}{name}"
