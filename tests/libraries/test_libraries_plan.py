"""What `lora-merge plan` says of a QLoRA base, beside the bytes of real quantised models."""

from __future__ import annotations

from pathlib import Path

import bitsandbytes as bnb
import models
import pytest
import torch
from torch import nn

from lora_merge.sizing import Setup, estimate, read_policy


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_a_quantised_base(base: str, tmp_path: Path) -> None:
    model = models.qwen2(hidden_size=128, intermediate_size=256).bfloat16()
    model.config.architectures = ["Qwen2ForCausalLM"]
    model.config.save_pretrained(tmp_path)
    policy = read_policy(tmp_path)
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, nn.Linear) or name == "lm_head":
            continue
        sizes = layer.in_features, layer.out_features, layer.bias is not None
        made = (
            bnb.nn.Linear4bit(*sizes, quant_type="nf4", compress_statistics=False)
            if base == "nf4"
            else bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
        )
        made.load_state_dict(layer.state_dict())
        made.bias = layer.bias
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, made.to("cpu"))
    held = sum(p.nbytes for p in model.parameters())
    for layer in model.modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            held += layer.weight.quant_state.absmax.nbytes
        elif isinstance(layer, bnb.nn.Linear8bitLt):
            held += layer.weight.SCB.nbytes
    said = estimate(policy, Setup(base=base))[0].training
    assert torch.uint8 in {p.dtype for p in model.parameters()} or base == "int8"
    assert said == held
