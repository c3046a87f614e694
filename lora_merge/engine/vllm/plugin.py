"""What vLLM loads through its `vllm.general_plugins` entry point, in every one of its processes."""

from __future__ import annotations

BACKEND = "lora_merge"


def register() -> None:
    """Register the weight-transfer backend and add the worker method; harmless when called twice."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.worker.worker_base import WorkerBase

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "lora_merge.engine.vllm.backend", "LoraMergeWeightTransferEngine"
        )

    def lora_merge(self: WorkerBase, request: str) -> str:
        from .worker import lora_merge

        return lora_merge(self, request)

    WorkerBase.lora_merge = lora_merge


def registered() -> bool:
    """Whether vLLM has loaded this plugin here: its other processes read the same VLLM_PLUGINS."""
    from vllm.v1.worker.worker_base import WorkerBase

    return hasattr(WorkerBase, "lora_merge")
