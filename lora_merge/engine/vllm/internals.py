"""Names of vLLM's that are used in its processes and belong to no interface that vLLM promises: `internals.NAME` is
imported when it is first used, and `lacks` lists those that a vLLM does not have.

Read in vLLM 0.26, 0.32 and 0.33; run with 0.26 and 0.32.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from importlib import import_module
from typing import Any

_RELOAD = "vllm.model_executor.model_loader.reload"
_OF_MODULES = {
    f"{_RELOAD}.layerwise": (
        *("get_layerwise_info", "_place_kernel_tensors", "_layerwise_process", "_get_original_loader"),
    ),
    f"{_RELOAD}.meta": ("restore_layer_on_meta", "materialize_layer"),
    f"{_RELOAD}.utils": ("get_layer_params_buffers", "get_layer_tensors"),
    f"{_RELOAD}.types": ("LayerReloadingInfo",),
    "vllm.model_executor.model_loader": ("get_model_loader",),
    "vllm.model_executor.layers.attention": ("Attention", "MLAAttention", "MMEncoderAttention"),
    "vllm.lora.layers": ("BaseLayerWithLoRA",),
    "vllm.lora.lora_model": ("LoRAModel",),
    "vllm.lora.peft_helper": ("PEFTHelper",),
    "vllm.device_allocator.cumem": ("CuMemAllocator", "unmap_and_release"),
    "vllm.distributed.parallel_state": ("get_tp_group",),
    "vllm.distributed.kv_transfer.kv_connector.v1.base": ("KVConnectorBase_V1",),
    "vllm.distributed.kv_transfer": ("get_kv_transfer_group", "has_kv_transfer_group"),
    "vllm.v1.engine": ("EngineCoreRequestType", "EngineCoreOutput", "EngineCoreOutputs", "FinishReason"),
    "vllm.v1.request": ("RequestStatus",),
}
_WHERE = {name: module for module, names in _OF_MODULES.items() for name in names}
_LATER = {
    "is_deferred_attention_layer": "vllm.model_executor.layers.attention",
    "build_mm_input_norm": "vllm.model_executor.layers.fusion.mm_input_norm",
    "DefaultModelLoader": "vllm.model_executor.model_loader.default_loader",
    "RunaiModelStreamerLoader": "vllm.model_executor.model_loader.runai_streamer_loader",
    "AsyncLLM": "vllm.v1.engine.async_llm",
    "LLMEngine": "vllm.v1.engine.llm_engine",
    "GracefulHTTPError": "vllm.exceptions",
    "WeightVersionSpan": "vllm.outputs",
    "lora_ops": "vllm.lora.ops.torch_ops",
    "PunicaWrapperCPU": "vllm.lora.punica_wrapper.punica_cpu",
}
"""Names that pushes do without where a release lacks them (0.26 has no norms of inputs, and no versions), and those of
`follow.py` and `mixed_batches.py`."""
_MEMBERS = {
    "LayerReloadingInfo": ("restore_metadata", "kernel_tensors", "kernel_non_persistent_buffers", "reset"),
    "LoRAModel": ("from_lora_tensors",),
    "PEFTHelper": ("from_dict", "validate_legal"),
    "CuMemAllocator": ("instance",),
    "KVConnectorBase_V1": ("reset_cache",),
}
_OF_MANAGERS = (
    *("modules", "packed_modules", "add_adapter", "activate_adapter", "remove_adapter", "capacity"),
    *("lora_slots", "_active_adapters"),
)


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name) or _LATER.get(name)
    if where is None:
        raise AttributeError(f"{name} is none of vLLM's names that are known here")
    return getattr(import_module(where), name)


def has(name: str) -> bool:
    """Return True if this vLLM has a name that only some have."""
    try:
        __getattr__(name)
    except (ImportError, AttributeError):
        return False
    return True


@cache
def _lacks() -> tuple[str, ...]:
    """Return the names that this vLLM's modules lack."""
    lacking = [f"{where}.{name}" for name, where in _WHERE.items() if not has(name)]
    for name, members in _MEMBERS.items():
        if has(name):
            found = __getattr__(name)
            known = {f.name for f in fields(found)} if hasattr(found, "__dataclass_fields__") else set()
            lacking += [f"{name}.{member}" for member in members if member not in known and not hasattr(found, member)]
    return tuple(lacking)


def lacks(worker: Any) -> list[str]:
    """Return the names, dotted, that a worker's vLLM lacks of all that is used here."""
    lacking = [*_lacks()]
    manager = getattr(worker.model_runner, "lora_manager", None)
    if manager is not None:
        inner = getattr(manager, "_adapter_manager", None)
        lacking += [f"{type(manager).__name__}._adapter_manager"] if inner is None else []
        lacking += [f"{type(inner).__name__}.{n}" for n in _OF_MANAGERS if inner is not None and not hasattr(inner, n)]
    return lacking
