"""Tiny models with random weights, of the real transformers classes, and PEFT adapters on them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

VOCABULARY = 101
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts_per_tok": 2, "head_dim": 8, "num_hidden_layers": 1}


def qwen2(tied: bool = False, **sizes: int) -> nn.Module:
    """Biases on q, k and v; an untied or tied head."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**(_SIZES | sizes), tie_word_embeddings=tied))


def gpt2(width: int = 32) -> nn.Module:
    """Conv1D weights, stored `[in, out]`; a tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_embd": width, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def qwen3_moe() -> nn.Module:
    """Fused experts `[E, out, in]`."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = _SIZES | _EXPERTS
    return eager(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=4, moe_intermediate_size=24)))


def mixtral() -> nn.Module:
    """Fused experts `[E, out, in]`, square where gate and up have half the hidden size."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = _SIZES | _EXPERTS | {"intermediate_size": 16}
    return eager(MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=3)))


def gpt_oss() -> nn.Module:
    """Fused experts stored `[E, in, out]`."""
    from transformers import GptOssConfig, GptOssForCausalLM

    return eager(GptOssForCausalLM(GptOssConfig(**(_SIZES | _EXPERTS), num_local_experts=4)))


def eager(model: nn.Module) -> nn.Module:
    """Experts one by one: the grouped product takes no float64."""
    model.config._experts_implementation = "eager"
    return model


class Convolutions(nn.Module):
    """Convolutions of one to three dimensions, a wide and a narrow one of each."""

    def __init__(self) -> None:
        super().__init__()
        # PEFT cannot merge a Conv3d with a 1x1x1 kernel (it takes it for a Conv2d), so that has a test of its own.
        for n, conv in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), start=1):
            self.add_module(f"wide{n}", conv(3, 6, 3, stride=2, padding=1))
            self.add_module(f"narrow{n}", conv(6, 4, 2 if n == 3 else 1))

    def forward(self, x: Tensor) -> Tensor:
        """`x`: `[batch, 3, 7, 7, 7]`."""
        slices = (x[:, :, :, 0, 0], x[:, :, :, :, 0], x)
        outputs = [
            self.get_submodule(f"narrow{n}")(torch.tanh(self.get_submodule(f"wide{n}")(part))).flatten()
            for n, part in enumerate(slices, start=1)
        ]
        return torch.cat(outputs)


CONVOLUTIONS = [f"{kind}{n}" for kind in ("wide", "narrow") for n in (1, 2, 3)]


def with_lora(
    build: Callable[[], nn.Module],
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    adapters: tuple[str, ...] = ("default",),
    adapter_dtype: torch.dtype | None = None,
    **config: Any,
) -> PeftModel:
    """A PEFT model in eval mode whose adapters all have an effect.

    Args:
        adapters: names of the adapters; all of them act.
        adapter_dtype: default: float32, PEFT's choice on half-precision bases.
        config: of `LoraConfig`; `r` defaults to 4.
    """
    torch.manual_seed(seed)
    # Each adapter gets a configuration of its own: PEFT writes into them.
    settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "init_lora_weights": False} | config
    model = get_peft_model(build().to(dtype), LoraConfig(**copy.deepcopy(settings)), adapters[0])
    for number, name in enumerate(adapters[1:], start=1):
        model.add_adapter(name, LoraConfig(**(copy.deepcopy(settings) | {"r": settings["r"] + number})))
    model.base_model.set_adapter(list(adapters))
    for name, parameter in model.named_parameters():
        if "lora_" in name and adapter_dtype is not None:
            parameter.data = parameter.data.to(adapter_dtype)
        if "lora_" in name and not parameter.any():
            parameter.data.normal_(std=0.1)
        if "lora_magnitude" in name:  # initialised to the norm itself, which would leave nothing to see
            parameter.data *= 1 + 0.1 * torch.rand_like(parameter)
    return model.eval()


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))


def outputs(model: nn.Module, seed: int = 0) -> Tensor:
    """The logits of a language model, or the output of `Convolutions`."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    with torch.no_grad():
        if isinstance(base, Convolutions):
            x = torch.randn(2, 3, 7, 7, 7, generator=torch.Generator().manual_seed(seed))
            return model(x.to(next(model.parameters()).dtype))
        return model(tokens(seed)).logits
