"""The adapters of a Megatron model as PEFT knows them: exported as adapter mode sends them, loaded by PEFT itself."""

from __future__ import annotations

import copy
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from torch import Tensor

from lora_merge import MergedWeights
from lora_merge.engine.payload.adapter import AdapterBuilder
from lora_merge.megatron import Chunks


def exported(model: Chunks) -> dict[str, Tensor]:
    """On every rank: lora_A and lora_B of every module, in float32; collective.

    Raises:
        UnsupportedAdapter: adapter mode refuses them.
    """
    weights = MergedWeights(model)
    source = AdapterBuilder(weights)(torch.float32)
    buffer = torch.empty(source.capacity, dtype=torch.uint8, device=source.device)
    source.fill(0, buffer, {})
    return {slot.name: slot.view(buffer).clone() for slot in source.table[0]}


def with_peft(hf: Any, tensors: dict[str, Tensor]) -> PeftModel:
    """A copy of a HF model with these tensors as a checkpoint of PEFT's.

    Experts have a module for each projection, which PEFT fuses as transformers fuses their weights.
    """
    r = {name.removesuffix(".lora_A.weight"): t.shape[0] for name, t in tensors.items() if "lora_A" in name}
    usual = min(r.values())
    unusual = {name: rank for name, rank in r.items() if rank != usual}
    config = LoraConfig(
        r=usual,
        lora_alpha=usual,
        target_modules=sorted({name.rpartition(".")[2] for name in r}),
        rank_pattern=unusual,
        alpha_pattern=unusual,
        task_type="CAUSAL_LM",
    )
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing")
        config.save_pretrained(folder)
        checkpoint = {f"base_model.model.{name}": t for name, t in tensors.items()}
        save_file(checkpoint, Path(folder) / "adapter_model.safetensors")
        return PeftModel.from_pretrained(copy.deepcopy(hf), folder).eval()
