"""Adapter mode in vLLM's workers: its own `LoRAModel`, made of the tensors that came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from . import internals
from .loading.parts import language_model

ADAPTER_ID = 2_020_202_020
"""The one id of the adapter, in loading and in every request."""
_TOWERS = "enable_tower_connector_lora"
"""The setting by which vLLM gives towers and connectors LoRA layers."""


def unserved_modules(manager: Any, modules: Sequence[str]) -> list[str]:
    """Return the modules (HF names) that vLLM has no LoRA layer for, and would pass over in silence, and those that it
    splits (gate and up of GLM-4) where the checkpoint has one for all."""
    inner = manager._adapter_manager
    parts = {name for names in inner.packed_modules.values() for name in names}
    whole = {name for name in inner.modules if inner.packed_modules.get(name, [name]) == [name]}
    mapper = _mapper(inner.model)
    return [module for module in modules if _mapped(mapper, module) not in parts | whole]


def tower_advice(manager: Any, config: Any, unserved: Sequence[str]) -> str:
    """Return in words which setting gives modules LoRA layers that have none; "" where none does. vLLM makes those of
    towers only where it is told to."""
    model = manager._adapter_manager.model
    inside = language_model(model)
    mapper = _mapper(model)
    names = [(_mapped(mapper, module)) for module in unserved]
    towers = [n for n in names if inside is not None and not n.startswith(f"{inside}.") and _exists(model, n)]
    if not towers or getattr(config, _TOWERS, True):  # a release without the setting
        return ""
    return f" (of towers: start the engine with {_TOWERS}=True)"


def _exists(model: nn.Module, name: str) -> bool:
    """Return True if a model has the layer around a module, which may be packed with others."""
    try:
        return model.get_submodule(name.rpartition(".")[0]) is not model
    except AttributeError:
        return False


def adapter_of(manager: Any, number: int, tensors: Mapping[str, Tensor], rank: int) -> Any:
    """Return vLLM's `LoRAModel` of an adapter, with a number as its id. alpha = r, because the scaling is in lora_B."""
    modules = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors})
    helper = internals.PEFTHelper.from_dict({"r": rank, "lora_alpha": rank, "target_modules": modules})
    helper.validate_legal(manager.lora_config)
    return internals.LoRAModel.from_lora_tensors(
        number,
        {f"base_model.model.{name}": tensor for name, tensor in tensors.items()},
        helper,
        device="cpu" if next(iter(tensors.values())).device.type == "cpu" else str(manager.device),
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=_mapper(manager._adapter_manager.model),
    )


def _mapper(model: nn.Module) -> Any:
    """Return vLLM's map from checkpoint names to its own, renames only."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for narrow in ("get_rename_mapper", "get_unstacked_mapper"):
        if mapper is not None and hasattr(mapper, narrow):
            return getattr(mapper, narrow)()
    return mapper


def _mapped(mapper: Any, name: str) -> str:
    return name if mapper is None else (mapper._map_name(f"{name}.") or name).removesuffix(".")
