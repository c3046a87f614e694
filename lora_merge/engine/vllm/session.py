"""The `WorkerSession` of a worker of vLLM's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..worker.beside import Beside, beside
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
    as whatever the memory holds; and keeps what layers hold beside parameters and buffers until they come back. vLLM
    keeps buffers alone, and a push brings parameters.

    Args:
        sleep: the method in whose place it stands.
        worker: of vLLM's.
    """

    def __init__(self, sleep: Any, worker: Any) -> None:
        self.sleep, self.worker = sleep, worker
        self._beside = Beside()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        thrown_away = (args[0] if args else kwargs.get("level", 1)) == 2  # level 1 keeps all by itself
        if thrown_away and not asleep():
            mapped = _weights()  # what else layers hold does not sleep with them
            held = beside(self.worker.get_model(), "vllm")
            self._beside.keep(t for t in held if any(t.data_ptr() in where for where in mapped))
        try:
            return self.sleep(*args, **kwargs)
        finally:
            level = asleep()
            if level != 2:
                self._beside.forget()
            else:
                session = session_of(self.worker.get_model(), self.worker.model_config, self.worker.device)
                session.mark_overwritten("sleep at level 2 threw its weights away")

    def bring_back(self) -> None:
        """Copy what was kept to where it was, if the weights are awake."""
        if not asleep():
            self._beside.bring_back()


class WakeUp:
    """A worker's `wake_up` that brings back what its `sleep` has kept.

    Args:
        wake_up: the method in whose place it stands.
    """

    def __init__(self, wake_up: Any, sleep: Sleep) -> None:
        self.wake_up, self.sleep = wake_up, sleep

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.wake_up(*args, **kwargs)
        finally:
            self.sleep.bring_back()


def note_sleeps(worker: Any) -> None:
    """Have a worker note from now on when its weights are thrown away."""
    if not isinstance(vars(worker).get("sleep"), Sleep):
        worker.sleep = Sleep(worker.sleep, worker)
        worker.wake_up = WakeUp(worker.wake_up, worker.sleep)


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
    return [data for data in _allocations().values() if data.is_asleep]


def _weights() -> list[range]:
    """Return the addresses of the weights that sleep mode's allocator has mapped."""
    return [range(at, at + data.handle[1]) for at, data in _allocations().items() if data.tag == "weights"]


def _allocations() -> dict[int, Any]:
    """Return what sleep mode's allocator notes of each allocation, by its address."""
    allocator = internals.CuMemAllocator.instance if torch.cuda.is_initialized() else None
    return {} if allocator is None else allocator.pointer_to_data
