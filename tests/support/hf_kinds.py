"""Tiny models of transformers for the layers that Megatron has besides usual ones: latent attention, gated delta nets,
Mamba, vision towers, experts with biases. No Megatron here."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SIZES: dict[str, Any] = {
    "vocab_size": 112,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rope_parameters": ROPE,
}
MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
TOKENS = torch.arange(1, 25).view(2, 12) * 7 % 101
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
"""As DeepSeek-V3 has it. Plain positions of latent attention are rotated wrongly by vLLM 0.32's kernel for CPUs; see
`test_vllm_megatron_kinds`."""
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


LARGER: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "kv_lora_rank": 512,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "mamba_head_dim": 32,
}
"""What vLLM's CPU backend wants of attention, of gated delta nets and of Mamba."""
HUB: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True},
    "qwen3_next": {"norm_topk_prob": True},
    "nemotron_h": {"chunk_size": 64},
}
"""What vLLM asks of a configuration: those of the hub have it, transformers' own may not."""


def config_of(kind: str, larger: bool = False) -> Any:
    """A configuration as the hub has them.

    Args:
        larger: with sizes that vLLM serves on a CPU.
    """
    import transformers as t

    hub = HUB.get(kind, {})

    def sized(sizes: dict[str, Any]) -> dict[str, Any]:
        grown = {name: LARGER[name] for name in sizes if larger and name in LARGER}
        if "mrope_section" not in sizes.get("rope_parameters", {}):
            grown.pop("rope_parameters", None)
        return sizes | grown

    vl = {"image_token_id": 104, "video_token_id": 105, "vision_start_token_id": 106, "vision_end_token_id": 107}
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 64}
    if larger:  # of `engines.qwen2_5_vl_processor`
        ids = {"vision_start": 257, "vision_end": 258, "image": 259, "video": 260}
        vl = {f"{name}_token_id": number for name, number in ids.items()}
    text = SIZES | {"rope_parameters": MROPE, "bos_token_id": 1, "eos_token_id": 2}
    text |= {"vocab_size": 264, "max_position_embeddings": 256} if larger else {}
    match kind:
        case "deepseek_v3":
            latent = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}
            latent |= {"qk_nope_head_dim": 8, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1}
            latent |= {"rope_parameters": YARN, "max_position_embeddings": 256}
            experts = {"n_shared_experts": 1, "n_routed_experts": 4, "first_k_dense_replace": 1}
            return t.DeepseekV3Config(**sized(SIZES | MOE | latent | experts | {"routed_scaling_factor": 1.5} | hub))
        case "qwen3_next":
            delta = {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2}
            delta |= {"linear_num_value_heads": 4, "linear_conv_kernel_dim": 4, "head_dim": 16}
            experts = {"num_experts": 4, "shared_expert_intermediate_size": 32, "full_attention_interval": 2}
            rope = {"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}
            return t.Qwen3NextConfig(**sized(SIZES | MOE | delta | experts | rope | hub))
        case "nemotron_h":
            mamba = {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16, "head_dim": 16}
            experts = {"n_routed_experts": 4, "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 32}
            layers = {"hybrid_override_pattern": "M*-E", "num_hidden_layers": 4}
            return t.NemotronHConfig(
                **sized(SIZES | MOE | mamba | experts | layers | hub | {"use_mamba_kernels": False})
            )
        case "gpt_oss":
            rope = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
            rope |= {"original_max_position_embeddings": 4096, "rope_theta": 150000.0}
            sizes = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": rope}
            return t.GptOssConfig(**sized(SIZES | sizes | {"max_position_embeddings": 131072}))
        case "qwen2_5_vl":
            text, tower = sized(text), tower | {"out_hidden_size": sized(text)["hidden_size"]}
            vision = t.Qwen2_5_VLConfig(text_config=text, vision_config=tower | {"fullatt_block_indexes": [1]}, **vl)
        case "qwen3_vl":
            text = sized(text | {"head_dim": 16})
            text["rope_parameters"] = text["rope_parameters"] | {"mrope_interleaved": True}  # as the hub has it
            tower |= {"out_hidden_size": text["hidden_size"]}
            vision = t.Qwen3VLConfig(text_config=text, vision_config=tower | {"deepstack_visual_indexes": [0]}, **vl)
        case "qwen3_vl_moe":
            text = sized(text | MOE | {"head_dim": 16, "num_experts": 4})
            tower |= {"deepstack_visual_indexes": [0], "out_hidden_size": text["hidden_size"]}
            vision = t.Qwen3VLMoeConfig(text_config=text, vision_config=tower, **vl)
            vision.text_config.norm_topk_prob = True  # in the hub's configurations, and asked for by vLLM
        case _:
            raise ValueError(kind)
    return vision


def hf_model(kind: str, dtype: torch.dtype = torch.float32, *, larger: bool = False) -> Any:
    """A model with random weights, norms and biases too."""
    import transformers as t

    config = config_of(kind, larger)
    classes = {
        "deepseek_v3": t.DeepseekV3ForCausalLM,
        "qwen3_next": t.Qwen3NextForCausalLM,
        "nemotron_h": t.NemotronHForCausalLM,
        "gpt_oss": t.GptOssForCausalLM,
        "qwen2_5_vl": t.Qwen2_5_VLForConditionalGeneration,
        "qwen3_vl": t.Qwen3VLForConditionalGeneration,
        "qwen3_vl_moe": t.Qwen3VLMoeForConditionalGeneration,
    }
    config._experts_implementation = "eager"
    config.architectures = [classes[kind].__name__]
    torch.manual_seed(0)
    model = classes[kind](config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("_bias"):
                parameter.add_(0.1 * torch.randn(parameter.shape))
            else:
                parameter.normal_(std=1.0 if name.endswith(("gate.weight", "router.weight")) else 0.08)
    model = model.to(dtype).eval()
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):  # has 32 bits in checkpoints
            module.e_score_correction_bias.data = 0.1 * torch.randn(module.e_score_correction_bias.shape)
    return model


def features(kind: str, tower: Any) -> Tensor:
    """What a tower makes of an image of four by four patches."""
    torch.manual_seed(1)
    patch = 14 if kind == "qwen2_5_vl" else 16
    with torch.no_grad():
        out = tower(torch.randn(16, 3 * 2 * patch * patch), torch.tensor([[1, 4, 4]]))
    return out[0] if isinstance(out, tuple) else out.pooler_output  # a tuple: Megatron-Bridge 0.5's tower


def tower_of(model: Any) -> Any | None:
    return getattr(model.model, "visual", None)


def checkpoint(model: Any) -> dict[str, Tensor]:
    """The tensors of a checkpoint as the hub has them: Qwen3-VL-MoE's experts are `[experts, in, out]` there, which
    transformers does not write."""
    with tempfile.TemporaryDirectory() as folder, mock.patch("torch.distributed.is_initialized", return_value=False):
        model.save_pretrained(folder)
        tensors = {k: v for file in sorted(Path(folder).glob("*.safetensors")) for k, v in load_file(file).items()}
    return _turned(model, tensors)


def _turned(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """From transformers' checkpoint of this model to the hub's, and back."""
    tensors = {name.replace("backbone.embedding.", "backbone.embeddings."): t for name, t in tensors.items()}  # of 5.8
    turned = {name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    turned = turned if type(model).__name__ == "Qwen3VLMoeForConditionalGeneration" else set()
    return tensors | {name: tensors[name].transpose(1, 2).contiguous() for name in turned}


def with_weights(model: Any, tensors: dict[str, Tensor]) -> Any:
    """A model like this one with the tensors of a checkpoint as the hub has it, rounded to its dtype."""
    tensors = {name: tensor.to(model.dtype).contiguous() for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        save_file(_turned(model, tensors), f"{folder}/model.safetensors", {"format": "pt"})
        loaded, said = type(model).from_pretrained(folder, dtype=model.dtype, output_loading_info=True)
    assert not said["missing_keys"], said
    assert not said["unexpected_keys"], said
    loaded.config._experts_implementation = "eager"
    return loaded.eval()


def save(model: Any, folder: str | os.PathLike[str]) -> None:
    """Save it as the hub has it, by this process, whatever rank it is."""
    model.config.save_pretrained(folder)
    save_file(checkpoint(model), Path(folder) / "model.safetensors", {"format": "pt"})
