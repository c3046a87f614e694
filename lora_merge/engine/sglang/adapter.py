"""Adapter mode in SGLang's schedulers: an adapter of its own LoRA path, made of the tensors that came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..payload.adapter import ADAPTER_NAME

ADAPTER_ID = "lora_merge"
"""The one id of the adapter, in loading and in every request."""
_EMBEDDINGS = ("embed_tokens", "lm_head")
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules that are one layer in SGLang, which passes over an adapter on some of them without a word."""


def reference() -> Any:
    """Return SGLang's name of the adapter, for its schedulers and where requests come in."""
    from sglang.srt.lora.lora_registry import LoRARef

    return LoRARef(lora_id=ADAPTER_ID, lora_name=ADAPTER_NAME, lora_path="__tensor__", pinned=False)


def unserved_modules(manager: Any, modules: Sequence[str]) -> list[str]:
    """Return the modules (HF names) that SGLang has no LoRA layer for, or would pass over: experts, embeddings, and
    parts of a fused layer whose other parts have no adapter.

    Args:
        manager: SGLang's `LoRAManager`.
    """
    from sglang.srt.lora.utils import get_normalized_target_modules

    known, adapted = manager.target_modules, set(modules)
    found = []
    for module in modules:
        parent, _, kind = module.rpartition(".")
        group = next((group for group in _TOGETHER if kind in group), (kind,))
        whole = all(f"{parent}.{part}" in adapted for part in group)
        linear = ".experts." not in module and kind not in _EMBEDDINGS
        if not (linear and whole and get_normalized_target_modules([kind]) <= known):
            found.append(module)
    return found


def load_adapter(manager: Any, tensors: Mapping[str, Tensor], rank: int) -> None:
    """Load an adapter in place of the one before. alpha = r, because the scaling is in lora_B. SGLang has one rank for
    an adapter, so every module gets the same: rows and columns of zeros add nothing.

    Raises:
        RuntimeError: SGLang refuses it.
    """
    modules = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors})
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    padded = {f"base_model.model.{name}": _padded(name, tensor, rank) for name, tensor in tensors.items()}
    remove_adapter(manager)
    done = manager.load_lora_adapter_from_tensors(reference(), padded, settings)
    if not done.success:
        raise RuntimeError(f"SGLang does not take the adapter: {done.error_message}")


def _padded(name: str, tensor: Tensor, rank: int) -> Tensor:
    rows = "lora_A" in name
    lacking = rank - tensor.shape[0 if rows else 1]
    return torch.nn.functional.pad(tensor, (0, 0, 0, lacking) if rows else (0, lacking))


def remove_adapter(manager: Any) -> None:
    """Remove the adapter if it is loaded."""
    if ADAPTER_ID in manager.loras:
        done = manager.unload_lora_adapter(reference())
        if not done.success:
            raise RuntimeError(f"SGLang does not let go of the adapter: {done.error_message}")
