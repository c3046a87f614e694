"""Triton kernels of the gradients of lora_A and lora_B: imported when one is launched.

Two launches: `down` gives `p = x lora_A^T` and `q = dy lora_B`, `up` gives `dA = q^T x` and `dB = dy^T p`. Each reads
both activations once. One launch for all would read them once in all, and write and read partial results instead: of
each block of 64 rows one of float32 for dA and dB, which above rank 8 is more than it saves.

Accuracy: sums are float32. A float32 factor beside bf16 activations is split into three parts of 8 bits, whose products
are exact; then each block is summed apart and added with rounding, as matrix units cut the low bits of a running sum.
"""

# A kernel's arguments are tiles and pointers without types of their own; DTYPE and the like are no constants to ruff.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from .merge_kernels import INTERPRETED, _dot, _split, float32


@triton.jit(do_not_specialize=["tokens"])
def down(
    x,
    dy,
    lora_A,
    lora_B,
    p,
    q,
    tokens: tl.int32,
    columns: tl.int32,
    rows: tl.int32,
    rank: tl.int32,
    x_stride: tl.int64,
    dy_stride: tl.int64,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Write float32 `p = x @ lora_A^T` and `q = dy @ lora_B`, `[tokens, rank]`, TILE_T tokens of one of them a program.

    Args:
        x, dy: `[tokens, columns]` and `[tokens, rows]`, adjacent columns.
        lora_A, lora_B: `[rank, columns]` and `[rows, rank]`, contiguous.
        PARTS: see `add_product`.
        RANK: a power of two that is no less than the rank.
    """
    if tl.program_id(1) == 0:
        _down(x, lora_A, p, tokens, columns, rank, x_stride, 1, columns, PARTS, RANK, TILE_T, TILE_K)
    else:
        _down(dy, lora_B, q, tokens, rows, rank, dy_stride, rank, 1, PARTS, RANK, TILE_T, TILE_K)


@triton.jit
def _down(
    x,
    factor,
    out,
    tokens,
    width,
    rank,
    x_stride,
    factor_k,
    factor_r,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Write `x @ factor` of the program's tokens; `factor_k`, `factor_r`: strides of `factor`."""
    t, r = tl.program_id(0) * TILE_T + tl.arange(0, TILE_T), tl.arange(0, RANK)
    line = x + t.to(tl.int64)[:, None] * x_stride
    total = tl.zeros([TILE_T, RANK], tl.float32)
    for begin in range(0, width, TILE_K):
        k = begin + tl.arange(0, TILE_K)
        some = tl.load(line + k[None, :], (t < tokens)[:, None] & (k < width)[None, :], other=0)
        tile = tl.load(
            factor + k[:, None] * factor_k + r[None, :] * factor_r,
            (k < width)[:, None] & (r < rank)[None, :],
            other=0,
        )
        total = add_product(total, some, tile, PARTS, TILE_T, RANK)
    tl.store(out + t.to(tl.int64)[:, None] * rank + r[None, :], total, (t < tokens)[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["tokens", "share"])
def up(
    x,
    dy,
    p,
    q,
    dA,
    dB,
    tokens: tl.int32,
    share: tl.int32,
    columns: tl.int32,
    rows: tl.int32,
    rank: tl.int32,
    x_stride: tl.int64,
    dy_stride: tl.int64,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_T: tl.constexpr,
):
    """Write float32 `dA = q^T @ x`, `[shares, rank, columns]`, and `dB = dy^T @ p`,
    `[shares, rows, rank]`, of `share` tokens each: TILE_N columns or rows of one share a program."""
    unit, across = tl.program_id(0), tl.cdiv(columns, TILE_N)
    if unit < across:
        to = dA + tl.program_id(1).to(tl.int64) * rank * columns
        _up(x, q, to, unit, tokens, share, columns, rank, x_stride, 1, columns, PARTS, RANK, TILE_N, TILE_T)
    else:
        to = dB + tl.program_id(1).to(tl.int64) * rank * rows
        unit -= across
        _up(dy, p, to, unit, tokens, share, rows, rank, dy_stride, rank, 1, PARTS, RANK, TILE_N, TILE_T)


@triton.jit
def _up(
    x,
    p,
    out,
    unit,
    tokens,
    share,
    width,
    rank,
    x_stride,
    out_n,
    out_r,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_T: tl.constexpr,
):
    """Write `x^T @ p` of a share's tokens; `out_n`, `out_r`: strides of `out`."""
    n, r = unit * TILE_N + tl.arange(0, TILE_N), tl.arange(0, RANK)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, tokens)
    total = tl.zeros([TILE_N, RANK], tl.float32)
    for begin in range(first, last, TILE_T):
        t = begin + tl.arange(0, TILE_T)
        line = t.to(tl.int64)[:, None]
        some = tl.load(x + line * x_stride + n[None, :], (t < last)[:, None] & (n < width)[None, :], other=0)
        tile = tl.load(p + line * rank + r[None, :], (t < last)[:, None] & (r < rank)[None, :], other=0)
        total = add_product(total, tl.trans(some), tile, PARTS, TILE_N, RANK)
    place = n.to(tl.int64)[:, None] * out_n + r[None, :] * out_r
    tl.store(out + place, total, (n < width)[:, None] & (r < rank)[None, :])


@triton.jit
def add_product(total, x, factor, PARTS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """`total + x @ factor`.

    Args:
        PARTS: 1: the factor is cast to the dtype of `x`, 3: `x` is bf16 and the factor float32, which loses nothing,
            0: both are multiplied in float32.
    """
    if PARTS == 1:
        return _dot(x, factor, total, x.dtype)
    elif PARTS == 3:
        high, middle, low = _split(factor)
        block = _dot(x, low, tl.zeros([TILE_M, TILE_N], tl.float32), tl.bfloat16)
        block = _dot(x, high, _dot(x, middle, block, tl.bfloat16), tl.bfloat16)
        return tl.fma(block, 1.0, total)
    elif INTERPRETED:
        return _dot(x, factor, total, tl.float32)
    else:
        return tl.dot(float32(x), float32(factor), total, input_precision="ieee")
