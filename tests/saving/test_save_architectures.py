"""Bases of other kinds: a vision tower, an encoder beside the decoder, fused weights, latent attention with experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_same, tensors, write_adapter, write_base
from peft import PeftModel
from torch import nn

from lora_merge import MergedWeights, merge_checkpoint

SIZES: dict[str, Any] = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}


def llava() -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = CLIPVisionConfig(**sizes, image_size=28, patch_size=14)
    text = LlamaConfig(**SIZES, **HEADS)
    return LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_index=5))


def qwen2_vl() -> nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = {**SIZES, **HEADS, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(vocab_size=101, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4))


def gemma3() -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **HEADS, head_dim=8))


def phi3() -> nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(**SIZES, **HEADS, pad_token_id=0))


def deepseek_v3() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16}
    heads |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    config = DeepseekV3Config(**SIZES, **heads, **experts, moe_intermediate_size=16, first_k_dense_replace=1)
    return DeepseekV3ForCausalLM(config)


CASES: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
    (llava, {"target_modules": ["q_proj", "up_proj"]}),
    (qwen2_vl, {"target_modules": "all-linear"}),
    (t5, {"target_modules": ["q", "v", "wo"]}),
    (gemma3, {}),
    (phi3, {}),
    (deepseek_v3, {"target_modules": ["q_b_proj", "o_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}),
]


@pytest.mark.parametrize(("build", "options"), CASES, ids=[build.__name__ for build, _ in CASES])
def test_architectures(build: Callable[[], nn.Module], options: dict[str, Any], tmp_path: Path) -> None:
    """The bits of the stream of the loaded model, under the names of the base."""
    base, adapter, out = tmp_path / "base", tmp_path / "adapter", tmp_path / "out"
    write_base(base, build, torch.float32, shard="20KB")
    write_adapter(adapter, base, build, **options)
    (saved,) = merge_checkpoint(base, [adapter], out, verify=True)
    cls: Any = type(build())
    model = PeftModel.from_pretrained(cls.from_pretrained(base), adapter)
    assert_same(tensors(out), {name: t.clone() for name, t in MergedWeights(model)})
    assert saved.changed
    assert tensors(out).keys() == tensors(base).keys()
    cls.from_pretrained(out)
    if build is llava:
        config = json.loads((base / "config.json").read_text())
        config["text_config"]["torch_dtype"] = "float32"
        (base / "config.json").write_text(json.dumps(config))
        merge_checkpoint(base, [adapter], tmp_path / "half", dtype=torch.bfloat16)
        config = json.loads((tmp_path / "half" / "config.json").read_text())
        assert {config["dtype"], config["text_config"]["torch_dtype"]} == {"bfloat16"}
