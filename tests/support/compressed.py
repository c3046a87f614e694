"""Checkpoints that are quantised, as their own tools make them: compressed-tensors' functions, DeepSeek's blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

BLOCK = 128


def arguments(kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """How compressed-tensors says that weights are quantised.

    Args:
        kind: "int" or "float".
        strategy: "tensor", "channel" or "block".
    """
    block = {"block_structure": [BLOCK, BLOCK]} if strategy == "block" else {}
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False} | block | more


def by_their_tools(weight: Tensor, said: dict[str, Any]) -> dict[str, Tensor]:
    """Values and scales of a weight by compressed-tensors' own functions, as llm-compressor calls them.

    Args:
        weight: `[rows, cols]`; for blocks, of whole ones.
        said: as of `arguments`.
    """
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    its = QuantizationArgs(**said)
    if said["strategy"] == "tensor":
        least, most = weight.amin(), weight.amax()
    elif said["strategy"] == "channel":
        least, most = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    else:
        blocks = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        least, most = blocks.amin((1, 3)), blocks.amax((1, 3))
    scale, zero_point = calculate_qparams(least, most, its)
    values = quantize(weight, scale, zero_point, its, dtype=its.pytorch_dtype())
    return {"weight": values, "weight_scale": scale}


def compress(
    folder: Path,
    said: dict[str, Any],
    inputs: dict[str, Any] | None = None,
    also: dict[str, Tensor] | None = None,
    ignore: Sequence[str] = (),
) -> Path:
    """Quantise the linear layers of a checkpoint, in place, in the format of compressed-tensors.

    Args:
        said: how its weights are.
        inputs: what is said of activations in the place of dynamic ones with a scale for each token.
        also: tensors that each of these layers has besides.
        ignore: layers that are left as they are.
    """
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    for name in [name for name in _linear(tensors) if name.removesuffix(".weight") not in ignore]:
        made = by_their_tools(tensors[name], said) | {key: t.clone() for key, t in (also or {}).items()}
        tensors |= {f"{name.removesuffix('weight')}{key}": tensor for key, tensor in made.items()}
    numbers = {"num_bits": 8, "type": said["type"], "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": said,
        "input_activations": numbers | (inputs or {"strategy": "token", "dynamic": True}),
    }
    return _saved(
        folder,
        tensors,
        {
            "quant_method": "compressed-tensors",
            "format": f"{said['type']}-quantized",
            "ignore": ["lm_head", *_routers(tensors), *ignore],
            "config_groups": {"group_0": group},
        },
    )


def calibrate(folder: Path, k: float, v: float) -> Path:
    """Have a checkpoint of `compress` say that its KV cache is FP8, and with which scales."""
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("k_proj.weight")]:
        attention = name.removesuffix("k_proj.weight")
        tensors |= {f"{attention}k_scale": torch.tensor([k]), f"{attention}v_scale": torch.tensor([v])}
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    return _saved(folder, tensors, said | {"kv_cache_scheme": numbers | {"strategy": "tensor", "dynamic": False}})


def by_blocks(weight: Tensor) -> dict[str, Tensor]:
    """Values and scales of a weight as DeepGEMM's function makes them that vLLM compiles for GPUs, where 1 / 448 is
    multiplied (elsewhere it divides by 448, and a scale may be another in its last bit)."""
    (rows, cols), inverse = weight.shape, torch.tensor(1 / 448, device=weight.device)
    padded = nn.functional.pad(weight.float(), (0, -cols % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-4) * inverse
    values = blocks * scales.reciprocal()[:, None, :, None]
    return {
        "weight": values.flatten(2).flatten(0, 1)[:rows, :cols].to(torch.float8_e4m3fn).contiguous(),
        "weight_scale_inv": scales,
    }


def compress_by_blocks(folder: Path) -> Path:
    """Quantise the linear layers of a checkpoint, in place, as DeepSeek's checkpoints are."""
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    for name in _linear(tensors):
        tensors |= {f"{name.removesuffix('weight')}{key}": t for key, t in by_blocks(tensors[name]).items()}
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}
    return _saved(folder, tensors, said | {"modules_to_not_convert": _routers(tensors)})


def _linear(tensors: Mapping[str, Tensor]) -> list[str]:
    """Weights of linear layers but for a head and a router."""
    return [name for name in tensors if "_proj" in name and name.endswith(".weight")]


def _routers(tensors: Mapping[str, Tensor]) -> list[str]:
    """Layers that choose experts, which real checkpoints name as left alone: vLLM 0.26 would load them as quantised,
    with scales that are in no file."""
    return [name.removesuffix(".weight") for name in tensors if name.endswith("mlp.gate.weight")]


@contextmanager
def kernel_for_blocks() -> Iterator[None]:
    """A kernel for FP8 by blocks: it multiplies what values and scales stand for. vLLM 0.32's own needs AMX, and
    takes no bias of bf16, which this model has. How layers are loaded and processed is vLLM's own."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear import Fp8BlockScaledMMLinearKernel
    from vllm.platforms import current_platform

    class Plain(Fp8BlockScaledMMLinearKernel):
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
            inputs = A.float() * As.repeat_interleave(BLOCK, 1)[:, : A.shape[1]]
            scales = Bs.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: B.shape[0], : B.shape[1]]
            return (inputs @ (B.float() * scales).t()).to(self.config.out_dtype)

    kernels: list[Any] = linear._POSSIBLE_FP8_BLOCK_KERNELS[current_platform._enum]
    kernels.insert(0, Plain)  # the first one that is asked
    try:
        yield
    finally:
        kernels.remove(Plain)


def _saved(folder: Path, tensors: dict[str, Tensor], said: dict[str, Any]) -> Path:
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = said
    (folder / "config.json").write_text(json.dumps(config))
    return folder
