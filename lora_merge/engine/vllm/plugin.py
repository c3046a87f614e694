"""What vLLM loads through its entry points: `vllm.general_plugins` in every one of its processes when an engine is
started, `vllm.platform_plugins` in every process that imports it."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from ...extras import after_import
from .names import BACKEND, registered
from .stand_in import stands_in


def early() -> None:
    """Install TRL's switch when a process imports vLLM, if LORA_MERGE=1 asks for it; register no platform. A trainer
    whose rollout is a server starts no engine in its process, so `register` would not be called before it is made."""
    try:
        _switch_trainers_on()
    except Exception as error:  # which vLLM would pass over, and TRL go on in its own way
        sys.exit(f"LORA_MERGE=1 cannot be done: {error}")


def _switch_trainers_on() -> None:
    from ...integrations.options import switched_on

    if not switched_on():
        return
    # vLLM's own processes are started by Python's multiprocessing, without TRL; so may ranks of a trainer, with it.
    if "trl" in sys.modules or (multiprocessing.parent_process() is None and find_spec("trl") is not None):
        from ...integrations.trl.switch import install

        install()


def register() -> None:
    """Register the weight-transfer backend and add the worker method; harmless when called twice."""
    _switch_trainers_on()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.worker.worker_base import WorkerBase

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "lora_merge.engine.vllm.backend", "LoraMergeWeightTransferEngine"
        )

    def lora_merge(self: WorkerBase, request: str) -> str:
        from .worker import lora_merge

        return lora_merge(self, request)

    from .follow import install

    if url := os.environ.get("LORA_MERGE_FOLLOW"):
        install(url)
    if not registered():
        WorkerBase.__init__ = _watching(WorkerBase.__init__)
    WorkerBase.lora_merge = lora_merge
    # `EngineArgs` calls this, perhaps before either is imported; a process that is forked does not call it again.
    after_import("vllm.v1.engine.core", _add_to_core)
    after_import("vllm.v1.engine.llm_engine", _add_in_front)


def _add_to_core(module: Any) -> None:
    from .core import install
    from .kept import hook
    from .kept_requests import guard

    install(module.EngineCore)
    guard(module.EngineCore)
    hook(module.EngineCore)


def _add_in_front(module: Any) -> None:
    from .kept_requests import guard_in_front

    guard_in_front(module.LLMEngine)


@stands_in
def _watching(make: Callable[..., None], worker: Any, *args: Any, **kwargs: Any) -> None:
    """Make a worker, but first begin to note what loaders read, and then mend kernels. (`register` itself would import
    vLLM's loaders in every process.)"""
    from .loading.loaded_files import watch
    from .mixed_batches import mend

    watch()
    make(worker, *args, **kwargs)
    mend(worker.vllm_config)
