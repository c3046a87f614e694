"""Products of activations with adapters' factors: float32 factors beside 16-bit activations lose nothing.

PEFT casts activations to the dtype of the factors first, which takes a float32 copy of each. A float32 number is the
sum of three bf16 numbers (8 bits each), and products of bf16 numbers are exact in float32. So a product of bf16
activations with a float32 factor is one of bf16 with the three parts side by side, summed in float32: as exact as
PEFT's, without its copy, and on the matrix units. Where that is not to be had, activations are cast a block at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1 << 22
"""Elements of activations that are cast at a time."""
TRITON = False
"""Whether large inputs on a GPU take the Triton kernels; False until `benchmarks/backward.py` has shown them faster."""
_LARGE = 1024
"""Tokens from which these are worth their launches."""


def factor_gradients(
    x: Tensor, dy: Tensor, lora_A: Tensor, lora_B: Tensor, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return `(dy lora_B)^T x` and `dy^T (x lora_A^T)`, in the dtypes of the factors; None for one that is not wanted.

    Args:
        x, dy: `[tokens, in]`, `[tokens, out]`.
        lora_A, lora_B: `[r, in]`, `[out, r]`.
    """
    if TRITON and all(wants) and x.is_cuda and len(x) >= _LARGE:
        from ..kernels.triton import gradients

        if gradients.serves(x, dy, lora_A, lora_B):
            dA, dB = gradients.factor_gradients(x, dy, lora_A, lora_B)
            return dA.to(lora_A.dtype), dB.to(lora_B.dtype)
    return (
        times(x.t(), times(dy, lora_B).to(lora_A.dtype)).t() if wants[0] else None,
        times(dy.t(), times(x, lora_A.t()).to(lora_B.dtype)) if wants[1] else None,
    )


def times(x: Tensor, factor: Tensor) -> Tensor:
    """Return `x @ factor`, in the dtype of the factor, as if `x` were cast to it.

    Args:
        x: `[rows, k]`, with any strides.
        factor: `[k, r]`.
    """
    if x.dtype == factor.dtype:
        return x @ factor
    if factor.dtype != torch.float32 or x.dtype not in (torch.bfloat16, torch.float16):
        return x.to(factor.dtype) @ factor
    if x.dtype == torch.bfloat16 and _sums_in_float32(x.device) and x.numel():
        found = torch.mm(x, torch.cat(parts(factor), 1), out_dtype=torch.float32)
        return found.view(len(x), 3, -1).sum(1)
    found = factor.new_empty(len(x), factor.shape[1])
    step = max(BLOCK // max(x.shape[1], 1), 1)
    for some, here in zip(x.split(step), found.split(step), strict=True):
        torch.mm(some.to(factor.dtype), factor, out=here)
    return found


def parts(factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three bf16 tensors whose sum is a float32 one: exactly, for values from 2^-110 up."""
    first = factor.to(torch.bfloat16)
    rest = factor - first
    second = rest.to(torch.bfloat16)
    return first, second, (rest - second).to(torch.bfloat16)


def dots(one: Tensor, other: Tensor, minus: Tensor | None = None) -> Tensor:
    """Return float32 `sum(one * (other - minus))` over the rows, a block of them cast at a time; float64 of float64.

    Args:
        one, other: `[rows, columns]`.
        minus: `[columns]`.
    """
    dtype = torch.float64 if other.dtype == torch.float64 else torch.float32
    found = torch.zeros(one.shape[1], dtype=dtype, device=one.device)
    step = max(BLOCK // max(one.shape[1], 1), 1)
    for left, right in zip(one.split(step), other.split(step), strict=True):
        right = right.to(dtype)
        found += (left.to(dtype) * (right if minus is None else right - minus)).sum(0)
    return found


def _sums_in_float32(device: torch.device) -> bool:
    """Return True if a product of bf16 matrices can be had in float32."""
    return device.type == "cuda" and torch.version.hip is None
