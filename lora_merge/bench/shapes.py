"""The linear weights of well-known models, as PEFT models with random values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, as in its HF config; `experts` > 0 turns every MLP into that many expert MLPs."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    experts: int = 0
    attention: bool = True

    def matrices(self) -> list[tuple[str, int, int]]:
        """Return (name, out, in) of every linear weight that an adapter for all linear layers covers."""
        q, kv, h, m = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden, self.intermediate
        attention = [("q_proj", q, h), ("k_proj", kv, h), ("v_proj", kv, h), ("o_proj", h, q)] if self.attention else []
        mlp = [("gate_proj", m, h), ("up_proj", m, h), ("down_proj", h, m)]
        experts = [f"experts.{e}." for e in range(self.experts)] or [""]
        layer = [(f"self_attn.{name}", rows, cols) for name, rows, cols in attention]
        layer += [(f"mlp.{expert}{name}", rows, cols) for expert in experts for name, rows, cols in mlp]
        return [(f"layers.{i}.{name}", rows, cols) for i in range(self.layers) for name, rows, cols in layer]


SHAPES = {
    "tiny": Shape(2, 96, 6, 2, 16, 200),
    # 61 million weights of usual widths, for a CPU.
    "small": Shape(4, 1024, 16, 4, 64, 4096),
    "small-1layer": Shape(1, 1024, 16, 4, 64, 4096),
    "small-moe": Shape(1, 512, 8, 2, 64, 256, experts=64, attention=False),
    "qwen2.5-0.5b": Shape(24, 896, 14, 2, 64, 4864),
    "qwen2.5-1.5b": Shape(28, 1536, 12, 2, 128, 8960),
    "qwen2.5-3b": Shape(36, 2048, 16, 2, 128, 11008),
    "qwen2.5-7b": Shape(28, 3584, 28, 4, 128, 18944),
    "qwen2.5-14b": Shape(48, 5120, 40, 8, 128, 13824),
    "qwen2.5-32b": Shape(64, 5120, 40, 8, 128, 27648),
    "qwen2.5-72b": Shape(80, 8192, 64, 8, 128, 29568),
    "llama3-8b": Shape(32, 4096, 32, 8, 128, 14336),
    "qwen3-30b-a3b": Shape(48, 2048, 32, 4, 128, 768, experts=128),
    "qwen3-235b-a22b": Shape(94, 4096, 64, 4, 128, 1536, experts=128),
    # Sizes of DeepSeek-V3 and Kimi-K2, whose latent attention is counted as grouped-query attention.
    "like-deepseek-v3": Shape(61, 7168, 128, 8, 128, 2048, experts=256),
    "like-kimi-k2": Shape(61, 7168, 64, 8, 128, 2048, experts=384),
    # The expert weights alone of 8 layers: 3072 matrices.
    "qwen3-30b-a3b-8layers": Shape(8, 2048, 32, 4, 128, 768, experts=128, attention=False),
    # A sweep over the number of experts starts from these.
    "qwen3-30b-a3b-1layer": Shape(1, 2048, 32, 4, 128, 768, experts=128, attention=False),
    "tiny-moe": Shape(1, 64, 4, 2, 16, 48, experts=4, attention=False),
}


def random_model(
    shape: Shape, rank: int, dtype: torch.dtype, adapter_dtype: torch.dtype, device: torch.device
) -> tuple[nn.Module, Callable[[int], Tensor]]:
    """Return a PeftModel whose linear layers have this shape; and the base weight of its n-th layer, drawn anew.

    Weights have standard deviation 0.02, the update `scaling * lora_B @ lora_A` a tenth of that. Bases are functions
    of their number, so a check needs no second copy of the model.
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import Linear

    matrices = shape.matrices()

    def base(n: int) -> Tensor:
        return _normal(matrices[n][1:], 0.02, dtype, device, seed=n)

    model = nn.Module()
    for n, (name, rows, cols) in enumerate(matrices):
        parent = model
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        linear = nn.Linear(cols, rows, bias=False, device="meta")
        linear.weight = nn.Parameter(base(n))
        parent.add_module(leaf, linear)
    leaves = sorted({name.rsplit(".", 1)[1] for name, _, _ in matrices})
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=leaves, init_lora_weights=False)
    peft_model = get_peft_model(model, config, autocast_adapter_dtype=False)
    layers = [module for module in peft_model.modules() if isinstance(module, Linear)]
    for n, layer in enumerate(layers):
        (_, rows, cols), scaling = matrices[n], layer.scaling["default"]
        for part, size, std in (
            (layer.lora_A, (rank, cols), 1 / math.sqrt(cols)),
            (layer.lora_B, (rows, rank), 0.002 / scaling * math.sqrt(cols / rank)),
        ):
            values = _normal(size, std, adapter_dtype, device, seed=len(matrices) + n)
            part["default"].weight = nn.Parameter(values)
    return peft_model, base


def _normal(size: tuple[int, int], std: float, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(size, dtype=dtype, device=device, generator=generator).mul_(std)
