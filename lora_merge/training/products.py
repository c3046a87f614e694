"""Products of activations with adapters' factors: float32 factors beside 16-bit activations lose nothing.

PEFT casts activations to the dtype of the factors first, which takes a float32 copy of each. A float32 number is the
sum of three bf16 numbers (8 bits each), and products of bf16 numbers are exact in float32. So a product of bf16
activations with a float32 factor is one of bf16 with the three parts side by side, summed in float32: as exact as
PEFT's, without its copy, and on the matrix units. Where that is not to be had, activations are cast a block at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.bindings import operators
from ..kernels.cuda import backend as cuda

BLOCK = 1 << 22
"""Elements of activations that are cast at a time."""


def factor_gradients(
    x: Tensor, dy: Tensor, lora_A: Tensor, lora_B: Tensor, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return `(dy lora_B)^T x` and `dy^T (x lora_A^T)`, in the dtypes of the factors; None for one that is not wanted.

    Args:
        x, dy: `[tokens, in]`, `[tokens, out]`.
        lora_A, lora_B: `[r, in]`, `[out, r]`.
    """
    return (
        _outer(x, dy, lora_B, lora_A.dtype).t() if wants[0] else None,
        _outer(dy, x, lora_A.t(), lora_B.dtype) if wants[1] else None,
    )


def _outer(rows: Tensor, x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `rows^T (x factor)`, in `dtype`."""
    if not (dtype == factor.dtype == torch.float32 and _on_matrix_units(x) and _on_matrix_units(rows)):
        return times(rows.t(), times(x, factor).to(dtype))
    # What the first product leaves to be summed becomes three parts for the second in one pass.
    narrow = torch.mm(x, parts(factor), out_dtype=torch.float32)
    return _summed(torch.mm(rows.t(), parts(narrow, 3), out_dtype=torch.float32))


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
    if _on_matrix_units(x):
        return _summed(torch.mm(x, parts(factor), out_dtype=torch.float32))
    found = factor.new_empty(len(x), factor.shape[1])
    step = max(BLOCK // max(x.shape[1], 1), 1)
    for some, here in zip(x.split(step), found.split(step), strict=True):
        torch.mm(some.to(factor.dtype), factor, out=here)
    return found


def parts(factor: Tensor, planes: int = 1) -> Tensor:
    """Return bf16 `[k, 3 * r]`: of each number three that have it as their sum, exactly from 2^-110 up.

    Args:
        factor: float32 `[k, planes * r]`.
        planes: so many numbers, r columns apart, are summed to one first.
    """
    if factor.is_cuda and factor.numel() and cuda.unavailable(factor.device) is None:
        found = factor.new_empty(len(factor), factor.shape[1] // planes * 3, dtype=torch.bfloat16)
        operators.thirds_cuda(factor, planes, found)
        return found
    rest, some = factor.view(len(factor), planes, -1).sum(1) if planes > 1 else factor, []
    for _ in range(3):
        some.append(rest.to(torch.bfloat16))
        rest = rest - some[-1]
    return torch.cat(some, 1)


def _summed(planes: Tensor) -> Tensor:
    """Return `[rows, r]`, the sum of the three planes of a product with `parts`."""
    return planes.view(len(planes), 3, -1).sum(1)


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


def _on_matrix_units(x: Tensor) -> bool:
    """Return True if a product of bf16 `x` with float32 parts can be had, summed in float32."""
    return x.dtype == torch.bfloat16 and x.is_cuda and torch.version.hip is None and x.numel() > 0
