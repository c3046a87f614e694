"""The `WorkerSession` of a worker of vLLM's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..worker.modules import Modules
from ..worker.session import WorkerSession
from ..worker.session import session_of as kept
from . import internals
from .loading.loader import Loader


def session_of(model: nn.Module, model_config: Any, device: torch.device) -> WorkerSession:
    """Return the `WorkerSession` of a model, for one call to a worker."""
    # By name at each call: tests replace both, as CPUs have no sleep mode.
    sleep = (lambda: asleep(), lambda: cache_asleep())
    return kept(model, lambda: WorkerSession(Loader(Modules(model), model_config, device), *sleep))


class Sleep:
    """A worker's `sleep` that notes in its session that weights were thrown away (level 2), from which they come back
    as whatever the memory holds.

    Args:
        sleep: the method in whose place it stands.
        worker: of vLLM's.
    """

    def __init__(self, sleep: Any, worker: Any) -> None:
        self.sleep, self.worker = sleep, worker

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.sleep(*args, **kwargs)
        finally:
            if asleep() == 2:
                session = session_of(self.worker.get_model(), self.worker.model_config, self.worker.device)
                session.mark_overwritten("sleep at level 2 threw its weights away")


def note_sleeps(worker: Any) -> None:
    """Have a worker note from now on when its weights are thrown away."""
    if not isinstance(vars(worker).get("sleep"), Sleep):
        worker.sleep = Sleep(worker.sleep, worker)


def asleep() -> int:
    """Return the level at which this process's weights sleep, so that they must not be read: 1 (kept in the host's
    memory) or 2 (thrown away); 0 if they are awake."""
    weights = [data for data in _unmapped() if data.tag == "weights"]
    return 0 if not weights else 2 if any(data.cpu_backup_tensor is None for data in weights) else 1


def cache_asleep() -> bool:
    """Return True while the memory of this process's KV cache is unmapped."""
    return any(data.tag == "kv_cache" for data in _unmapped())


def _unmapped() -> list[Any]:
    """Return what sleep mode's allocator notes of each allocation that is unmapped now."""
    allocator = internals.CuMemAllocator.instance if torch.cuda.is_initialized() else None
    return [] if allocator is None else [data for data in allocator.pointer_to_data.values() if data.is_asleep]
