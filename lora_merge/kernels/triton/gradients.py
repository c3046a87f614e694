"""Gradients of lora_A and lora_B by Triton: two launches, each of which reads both activations once."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .backend import unavailable

MOST = 256
"""The largest rank."""
TILE = 64
"""Tokens, rows or columns of a tile."""
_SHARE = 512
"""Tokens that are summed by one program at the least."""


def serves(x: Tensor, dy: Tensor, lora_A: Tensor, lora_B: Tensor) -> bool:
    """Return True if the kernels take tensors of these dtypes and shapes on this device."""
    floats = (torch.bfloat16, torch.float16, torch.float32)
    return (
        x.dtype == dy.dtype
        and lora_A.dtype == lora_B.dtype
        and {x.dtype, lora_A.dtype} <= set(floats)
        and 0 < len(lora_A) <= MOST
        and x.numel() > 0
        and dy.numel() > 0
        and unavailable(x.device) is None
    )


def factor_gradients(
    x: Tensor, dy: Tensor, lora_A: Tensor, lora_B: Tensor, shares: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return `(dy lora_B)^T x` and `dy^T (x lora_A^T)`, float32, summed in float32.

    The sums have one order: equal inputs give equal bits on a GPU of one kind.

    Args:
        x, dy: `[tokens, in]`, `[tokens, out]`, of one dtype; copied where columns are not adjacent.
        lora_A, lora_B: `[r, in]`, `[out, r]`, of one dtype; as for `x`.
        shares: of tokens, summed by programs of their own. Default: as many as fill the GPU.
    """
    from .gradient_kernels import down, up

    x, dy = (t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in (x, dy))
    lora_A, lora_B = lora_A.contiguous(), lora_B.contiguous()
    (tokens, columns), (rows, rank) = x.shape, lora_B.shape
    units = -(-columns // TILE) - (-rows // TILE)
    if shares is None:
        shares = max(min(-(-2 * _processors(x.device) // units), tokens // _SHARE), 1)
    share = -(-tokens // shares)
    p, q = torch.empty(2, tokens, rank, dtype=torch.float32, device=x.device)
    dA = torch.empty(shares, rank, columns, dtype=torch.float32, device=x.device)
    dB = torch.empty(shares, rows, rank, dtype=torch.float32, device=x.device)
    parts, strides, sizes = parts_of(x.dtype, lora_A.dtype), (x.stride(0), dy.stride(0)), (columns, rows, rank)
    depth, options = shape_of(rank, parts)
    with torch.cuda.device_of(x):
        down[(-(-tokens // TILE), 2)](
            x, dy, lora_A, lora_B, p, q, tokens, *sizes, *strides, TILE_T=TILE, TILE_K=depth, **options
        )
        up[(units, shares)](x, dy, p, q, dA, dB, tokens, share, *sizes, *strides, TILE_N=TILE, TILE_T=depth, **options)
    return (dA[0], dB[0]) if shares == 1 else (dA.sum(0), dB.sum(0))


def parts_of(activations: torch.dtype, factors: torch.dtype) -> int:
    """Return PARTS of the kernels."""
    if activations == factors and factors != torch.float32:
        return 1
    return 3 if (activations, factors) == (torch.bfloat16, torch.float32) else 0


def shape_of(rank: int, parts: int) -> tuple[int, dict[str, int]]:
    """Return how much of the summed dimension a tile has, and the options of a launch; tiles fit 227 KiB."""
    padded = max(1 << (rank - 1).bit_length(), 16)
    large, stages = padded > 64, 4 if padded <= 64 else 3 if padded <= 128 else 2
    depth = 32 if padded > 128 or (parts == 0 and large) else 64
    return depth, {"RANK": padded, "PARTS": parts, "num_stages": stages, "num_warps": 8 if large else 4}


@cache
def _processors(device: torch.device) -> int:
    return 1 if device.type == "cpu" else int(torch.cuda.get_device_properties(device).multi_processor_count)
