"""Tiny policies that rollout engines serve on a CPU: what they must answer is what transformers computes."""

from __future__ import annotations

from pathlib import Path

import models
import torch
from torch import nn

# vLLM and SGLang want head dimensions of 32 and more.
SIZES = models._SIZES | {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 256,
}
MOE = {"head_dim": 32, "num_experts_per_tok": 2}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
"""Of Phi-3, whose checkpoints hold q, k and v in one tensor, gate and up in another."""


def qwen2(tied: bool = True) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=tied))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32))


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = SIZES | MOE | {"num_hidden_layers": 1}
    return models.eager(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=4, moe_intermediate_size=64)))


def gemma2(capped: bool = True) -> nn.Module:
    """A tied head, of which the engine's class knows nothing.

    Args:
        capped: whether logits have their soft caps, which SGLang without compiled kernels does not compute.
    """
    from transformers import Gemma2Config, Gemma2ForCausalLM

    # Other attention of transformers leaves the soft cap of its logits out.
    sizes = SIZES | {"head_dim": 32, "query_pre_attn_scalar": 32, "attn_implementation": "eager"}
    sizes |= {"hidden_act": "gelu_pytorch_tanh"}  # in the published checkpoints, and asked for by SGLang
    if not capped:
        sizes |= {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    return Gemma2ForCausalLM(Gemma2Config(**sizes))


def phi3() -> nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(**SIZES))


def train(model: nn.Module, seed: int = 1, size: float = 0.05) -> None:
    """Move the adapter as a step of an optimizer would."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "trainable_tokens_delta" in name:
                parameter.add_((torch.randn(parameter.shape, generator=g) * size).to(parameter))


def save_base(base: nn.Module, folder: Path) -> None:
    """The base in HF format, without what PEFT injected into it."""
    from safetensors.torch import save_file

    import lora_merge.stream.weights

    folder.mkdir(parents=True)
    base.config.architectures = [type(base).__name__]
    base.config.save_pretrained(folder)
    stream = lora_merge.stream.weights.MergedWeights(base, adapters=False)
    save_file({name: t.contiguous().clone() for name, t in stream}, folder / "model.safetensors", {"format": "pt"})


def prompts(count: int = 4, seed: int = 3) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 256, (12,), generator=g).tolist() for _ in range(count)]
