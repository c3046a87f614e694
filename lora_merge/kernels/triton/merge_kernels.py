"""The Triton kernels: imported when a plan is prepared for them, so that the package does without triton.

They read the packed table that `layout.py` describes. A program takes tiles, each of one segment.

Accuracy: the rank is taken in blocks of BLOCK_K, in order, padded with zeros, in every tile alike, so that an element's
bits depend on its row of lora_B, its column of lora_A and its weight alone. Matrix units cut off the low bits of their
running sum; each block is therefore summed apart, from zero, and then added with rounding: the error stays at the size
of a block. A pair of bf16 or of fp16 adapters multiplies exactly. All others are split into bf16 parts of 8 bits, which
add up to the values exactly; of the products of parts those below 2^-21 are left out (they take either sign), the rest
is summed small ones first.
"""

# A kernel's arguments are tiles and pointers without types of their own; DTYPE and the like are no constants to ruff.
# ruff: noqa: ANN001, ANN201, ANN202, SIM300
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import packed, segments

INTERPRETED = tl.constexpr(not isinstance(tl.sum, triton.JITFunction))
"""Whether TRITON_INTERPRET=1 was set when triton was imported."""
PTX = tl.constexpr(torch.version.hip is None)
"""Whether inline assembly can be NVIDIA's: not with a torch for AMD's GPUs."""

WORDS = tl.constexpr(segments.WORDS)
SOURCE, DESTINATION = tl.constexpr(segments.SOURCE), tl.constexpr(segments.DESTINATION)
LORA_A, LORA_B = tl.constexpr(segments.LORA_A), tl.constexpr(segments.LORA_B)
ROW_SCALE, SCALING = tl.constexpr(segments.ROW_SCALE), tl.constexpr(segments.SCALING)
ROWS, COLS, RANK = tl.constexpr(segments.ROWS), tl.constexpr(segments.COLS), tl.constexpr(segments.RANK)
SOURCE_STRIDE = tl.constexpr(segments.SOURCE_STRIDE)
DESTINATION_STRIDE = tl.constexpr(segments.DESTINATION_STRIDE)
LORA_A_STRIDE, LORA_B_STRIDE = tl.constexpr(segments.LORA_A_STRIDE), tl.constexpr(segments.LORA_B_STRIDE)
KEY, FIRST, PITCH = tl.constexpr(segments.KEY), tl.constexpr(segments.FIRST), tl.constexpr(segments.PITCH)
PLACE, CODE = tl.constexpr(segments.PLACE), tl.constexpr(segments.CODE)
ABSMAX, BLOCK = tl.constexpr(segments.ABSMAX), tl.constexpr(segments.BLOCK)
ABSMAX_CODE, ABSMAX_SCALE = tl.constexpr(segments.ABSMAX_CODE), tl.constexpr(segments.ABSMAX_SCALE)
ABSMAX_BLOCK, ABSMAX_OFFSET = tl.constexpr(segments.ABSMAX_BLOCK), tl.constexpr(segments.ABSMAX_OFFSET)
INT8 = tl.constexpr(segments.FORMATS["Int8"])
INT8_STEP = tl.constexpr(packed.INT8_STEP)
UNIT_BEGIN, UNITS_ACROSS = tl.constexpr(segments.UNIT_BEGIN), tl.constexpr(segments.UNITS_ACROSS)


@triton.jit(do_not_specialize=["units", "seed"])
def run_table(
    table, unit_segment, units: tl.int32, seed: tl.int64,
    SOURCE_T: tl.constexpr, DESTINATION_T: tl.constexpr, LORA_A_T: tl.constexpr, LORA_B_T: tl.constexpr,
    ALIGN: tl.constexpr, LORA_ALIGN: tl.constexpr, RANK_BLOCKS: tl.constexpr, SCALED: tl.constexpr,
    STOCHASTIC: tl.constexpr, FORMAT: tl.constexpr, NESTED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Merge tiles of segments, one after the other.

    Args:
        table: int64 `[S, WORDS]`.
        unit_segment: int32, the segment of each of so many `units`, which are tiles.
        seed: word of `segments.seed_key`.
        *_T: the dtypes; an integer for copies that move bits.
        ALIGN: 1, or more where every source and destination has adjacent columns, addresses of whole 16 bytes, and
            row strides and columns that are multiples of it. LORA_ALIGN: likewise for the adapters.
        RANK_BLOCKS: blocks of BLOCK_K that hold the rank of every segment; 0 where none has an adapter.
        SCALED: whether every segment has a row scale; else none has.
        FORMAT, NESTED, BLOCK_SIZE: see `weights`.
        TILE_M, TILE_N: rows and columns of a tile.
        AHEAD: of the next tile every so many bytes are asked for while this one is computed; 0: nothing is.
    """
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        ahead(table, unit_segment, unit + tl.num_programs(0), units, SOURCE_T, ALIGN, TILE_M, TILE_N, AHEAD)
        segment, row, column = corner(table, unit_segment, unit, TILE_M, TILE_N)
        i, j = row.to(tl.int64) + tl.arange(0, TILE_M), column + tl.arange(0, TILE_N)
        mask = (i < tl.load(segment + ROWS))[:, None] & (j < extent(segment + COLS, ALIGN))[None, :]
        destination = pointers(segment + DESTINATION, segment + DESTINATION_STRIDE, i, j, DESTINATION_T, ALIGN)
        weight = weights(segment, i, j, mask, SOURCE_T, ALIGN, FORMAT, NESTED, BLOCK_SIZE)
        if SOURCE_T.is_int():
            out = weight
        else:
            total = float32(weight)
            if RANK_BLOCKS > 0:
                product = products(segment, i, j, LORA_A_T, LORA_B_T, LORA_ALIGN, RANK_BLOCKS, TILE_M, TILE_N, BLOCK_K)
                total = tl.fma(product, scaling_of(segment), total)
            if SCALED:
                row_scale = tl.load(segment + ROW_SCALE).to(tl.pointer_type(tl.float32))
                total *= tl.load(row_scale + i, i < tl.load(segment + ROWS), other=1.0)[:, None]
            if STOCHASTIC and DESTINATION_T != tl.float32:
                index = tl.load(segment + FIRST) + i[:, None] * tl.load(segment + PITCH)
                index += j[None, :] * tl.load(segment + PITCH + 1)
                out = _round_stochastic(total, _random_bits(tl.load(segment + KEY) ^ seed, index), DESTINATION_T)
            else:
                out = nearest(total, DESTINATION_T)
        tl.store(destination, out, mask, eviction_policy="evict_first")


@triton.jit
def row_norms(
    table, unit_segment, out,
    SOURCE_T: tl.constexpr, LORA_A_T: tl.constexpr, LORA_B_T: tl.constexpr, ALIGN: tl.constexpr,
    LORA_ALIGN: tl.constexpr, RANK_BLOCKS: tl.constexpr, FORMAT: tl.constexpr, NESTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute squared norms of a block of rows, all columns in order; UNITS_ACROSS says where a segment's begin."""
    unit = tl.program_id(0)
    segment = table + tl.load(unit_segment + unit).to(tl.int64) * WORDS
    i = (unit - tl.load(segment + UNIT_BEGIN)) * TILE_M + tl.arange(0, TILE_M)
    rows, cols = tl.load(segment + ROWS), extent(segment + COLS, ALIGN)
    norms = tl.zeros([TILE_M], tl.float64)
    begin = tl.zeros([], tl.int64)
    while begin < cols:
        j = begin + tl.arange(0, TILE_N)
        mask = (i < rows)[:, None] & (j < cols)[None, :]
        total = float32(weights(segment, i, j, mask, SOURCE_T, ALIGN, FORMAT, NESTED, BLOCK_SIZE))
        if RANK_BLOCKS > 0:
            product = products(segment, i, j, LORA_A_T, LORA_B_T, LORA_ALIGN, RANK_BLOCKS, TILE_M, TILE_N, BLOCK_K)
            total = tl.fma(product, scaling_of(segment), total)
        norms += tl.sum(total.to(tl.float64) * total.to(tl.float64), axis=1)
        begin += TILE_N
    tl.store(out + tl.load(segment + UNITS_ACROSS) + i, norms, i < rows)


# ---- the base -------------------------------------------------------------------------------------------------------


@triton.jit
def weights(
    segment, i, j, mask,
    SOURCE_T: tl.constexpr, ALIGN: tl.constexpr, FORMAT: tl.constexpr, NESTED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Return elements (i, j) of the source, or what its codes stand for (packed.py); zeros outside of the mask.

    Args:
        FORMAT: code of the source's format, as in `layout.FORMATS`.
        NESTED: whether absmax is bytes that stand for others.
        BLOCK_SIZE: codes that share an absmax; 0: the segment says how many; -1: those of a row.
    """
    if FORMAT == 0:
        source = pointers(segment + SOURCE, segment + SOURCE_STRIDE, i, j, SOURCE_T, ALIGN)
        return tl.load(source, mask, other=0, eviction_policy="evict_first")
    else:
        first, stride = tl.load(segment + PLACE), segment + SOURCE_STRIDE
        place = first + i[:, None] * tl.load(stride) + j[None, :] * tl.load(stride + 1)
        if BLOCK_SIZE > 0:
            block = place // BLOCK_SIZE
        elif BLOCK_SIZE < 0:
            block = first // tl.load(segment + BLOCK) + i[:, None] + j[None, :] * 0
        else:
            block = place // tl.load(segment + BLOCK)
        if NESTED:
            byte = tl.load(tl.load(segment + ABSMAX).to(tl.pointer_type(tl.uint8)) + block, mask, other=0)
            scale = tl.load(tl.load(segment + ABSMAX_CODE).to(tl.pointer_type(tl.float32)) + byte.to(tl.int32))
            outer = block // tl.load(segment + ABSMAX_BLOCK)
            scale *= tl.load(tl.load(segment + ABSMAX_SCALE).to(tl.pointer_type(tl.float32)) + outer, mask, other=0)
            scale += tl.load(tl.load(segment + ABSMAX_OFFSET).to(tl.pointer_type(tl.float32)))
        else:
            scale = tl.load(tl.load(segment + ABSMAX).to(tl.pointer_type(tl.float32)) + block, mask, other=0)
        if FORMAT == INT8:
            codes = tl.load(tl.load(segment + SOURCE).to(tl.pointer_type(tl.int8)) + place, mask, other=0)
            value = codes.to(tl.float32) * scale * INT8_STEP
        else:
            byte = tl.load(tl.load(segment + SOURCE).to(tl.pointer_type(tl.uint8)) + (place >> 1), mask, other=0)
            codes = (byte.to(tl.int32) >> ((place & 1) ^ 1).to(tl.int32) * 4) & 15
            value = tl.load(tl.load(segment + CODE).to(tl.pointer_type(tl.float32)) + codes) * scale
        return nearest(tl.where(mask, value, 0.0), SOURCE_T)


# ---- addresses -------------------------------------------------------------------------------------------------------


@triton.jit
def corner(table, unit_segment, unit, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Return a unit's segment, and the first row and column (int64: a run of bytes is one long row) of its tile."""
    segment = table + tl.load(unit_segment + unit).to(tl.int64) * WORDS
    local = (unit - tl.load(segment + UNIT_BEGIN)).to(tl.int32)
    across = tl.load(segment + UNITS_ACROSS).to(tl.int32)
    return segment, local // across * TILE_M, (local % across).to(tl.int64) * TILE_N


@triton.jit
def ahead(
    table, unit_segment, unit, units,
    DTYPE: tl.constexpr, ALIGN: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Ask for a tile's weights, if there is such a unit."""
    if AHEAD > 0 and ALIGN > 1:  # noqa: SIM102  the compiler knows this, and the GPU the next
        if unit < units:
            segment, row, column = corner(table, unit_segment, unit, TILE_M, TILE_N)
            ask(segment, row, column, DTYPE, ALIGN, TILE_M, TILE_N, AHEAD)


@triton.jit
def ask(
    segment, row, column,
    DTYPE: tl.constexpr, ALIGN: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Ask for a tile's weights."""
    if AHEAD > 0 and ALIGN > 1:
        STEP: tl.constexpr = AHEAD * 8 // DTYPE.primitive_bitwidth
        part = tl.arange(0, TILE_M * TILE_N // STEP)
        i = tl.minimum(row + part // (TILE_N // STEP), tl.load(segment + ROWS) - 1).to(tl.int64)
        j = tl.minimum(column + part % (TILE_N // STEP) * STEP, tl.load(segment + COLS) - 1)
        prefetch(tl.load(segment + SOURCE).to(tl.pointer_type(DTYPE)) + i * tl.load(segment + SOURCE_STRIDE) + j)


@triton.jit
def prefetch(at):
    """Ask for what pointers point to: it comes into the L2 cache, and takes no register."""
    if PTX and not INTERPRETED:
        asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(asm, "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def extent(word, ALIGN: tl.constexpr):
    """Return a number of the table, known to the compiler as a multiple of ALIGN."""
    return tl.multiple_of(tl.load(word), ALIGN)


@triton.jit
def pointers(address, strides, i, j, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    """Return pointers to elements (i, j) of a view."""
    base = tl.load(address).to(tl.pointer_type(DTYPE))
    if ALIGN > 1:
        return tl.multiple_of(base, 16) + i[:, None] * extent(strides, ALIGN) + j[None, :]
    return base + i[:, None] * tl.load(strides) + j[None, :] * tl.load(strides + 1)


# ---- products --------------------------------------------------------------------------------------------------------


@triton.jit
def scaling_of(segment):
    return tl.load(segment + SCALING).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def products(
    segment, i, j,
    A_T: tl.constexpr, B_T: tl.constexpr, ALIGN: tl.constexpr, BLOCKS: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return float32 `lora_B[i] @ lora_A[:, j]`."""
    total = _block(segment, i, j, 0, A_T, B_T, ALIGN, TILE_M, TILE_N, BLOCK_K)
    for block in range(1, BLOCKS):
        # fma, not an addition: that would be drawn into the matrix unit's own sum.
        total = tl.fma(_block(segment, i, j, block, A_T, B_T, ALIGN, TILE_M, TILE_N, BLOCK_K), 1.0, total)
    return total


@triton.jit
def _block(
    segment, i, j, block,
    A_T: tl.constexpr, B_T: tl.constexpr, ALIGN: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the same over one block of the rank."""
    rank = extent(segment + RANK, ALIGN)
    k = block * BLOCK_K + tl.arange(0, BLOCK_K)
    in_rows, in_cols = i < tl.load(segment + ROWS), j < extent(segment + COLS, ALIGN)
    a_tile = pointers(segment + LORA_A, segment + LORA_A_STRIDE, k, j, A_T, ALIGN)
    b_tile = pointers(segment + LORA_B, segment + LORA_B_STRIDE, i, k, B_T, ALIGN)
    a = tl.load(a_tile, (k < rank)[:, None] & in_cols[None, :], other=0)
    b = tl.load(b_tile, in_rows[:, None] & (k < rank)[None, :], other=0)
    return _product(b, a, TILE_M, TILE_N)


@triton.jit
def _product(b, a, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Return float32 `b @ a`."""
    large = tl.zeros([TILE_M, TILE_N], tl.float32)
    if a.dtype == b.dtype and a.dtype != tl.float32:
        return _dot(b, a, large, a.dtype)
    else:
        # The matrix unit cuts what it adds, so small products do not join the large sum there. Sums of their own for
        # both sides, or it would show where lora_A and lora_B are in each other's place, as in a turned weight.
        below, above = tl.zeros([TILE_M, TILE_N], tl.float32), tl.zeros([TILE_M, TILE_N], tl.float32)
        a_parts, b_parts = _split(a), _split(b)
        for order in tl.static_range(2, 0, -1):
            for part in tl.static_range(0, order + 1):
                if order - part < len(a_parts) and part < len(b_parts):
                    if part < order - part:
                        below = _dot(b_parts[part], a_parts[order - part], below, tl.bfloat16)
                    elif part > order - part:
                        above = _dot(b_parts[part], a_parts[order - part], above, tl.bfloat16)
                    else:
                        large = _dot(b_parts[part], a_parts[part], large, tl.bfloat16)
        large = _dot(b_parts[0], a_parts[0], large, tl.bfloat16)
        return tl.fma(tl.fma(below, 1.0, above), 1.0, large)


@triton.jit
def _split(x):
    """Return up to three values of 8 bits each that add up to a tile exactly (to NaN for infinity)."""
    if x.dtype == tl.bfloat16:
        return (x,)
    else:
        whole = x.to(tl.float32)
        high = (whole.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
        rest = whole - high
        if x.dtype == tl.float16:
            return (high, rest)
        else:
            # Rounded, so that what is left has either sign; it also keeps NaN.
            middle = ((rest.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
            return (high, middle, rest - middle)


# ---- what Triton's interpreter gets wrong ----------------------------------------------------------------------------
# It keeps bf16 as words, which it truncates to and multiplies as integers; its matrix product is that of a BLAS, whose
# order of summation changes along the rows.


@triton.jit
def _dot(b, a, total, DTYPE: tl.constexpr):
    """Return `total + b @ a` of values that DTYPE holds."""
    if INTERPRETED:
        return total + tl.sum(float32(b)[:, :, None] * float32(a)[None, :, :], axis=1)
    else:
        return tl.dot(b.to(DTYPE), a.to(DTYPE), total)


@triton.jit
def float32(x):
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def nearest(x, DTYPE: tl.constexpr):
    """Return float32 to nearest, ties to even."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        word = x.to(tl.uint32, bitcast=True)
        rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, (word >> 16) | 0x40).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


# ---- stochastic rounding: kernels/reference.py, word for word --------------------------------------------------------


@triton.jit
def _random_bits(key, index):
    h = _avalanche((index ^ key).to(tl.uint32))
    return _avalanche(h ^ ((index ^ key) >> 32).to(tl.uint32))


@triton.jit
def _avalanche(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _round_stochastic(x, bits, DTYPE: tl.constexpr):
    """Round up in magnitude with the probability of the part that is cut off; to infinity where `nearest` does."""
    word = x.to(tl.uint32, bitcast=True)
    size = word & 0x7FFFFFFF
    if DTYPE == tl.bfloat16:
        kept = tl.minimum((size + (bits >> 16)) >> 16, 0x7F7F)
        infinite = size >= 0x7F7F8000
    else:
        # fp16: 13 bits fall off a normal number, more below 2^-14, where the step stays 2^-24. Where more than 31 do,
        # the first of them are cut: the probability is a multiple of 2^-31.
        exponent = (size >> 23).to(tl.int32)
        significand = tl.where(exponent > 0, (word & 0x7FFFFF) | 0x800000, word & 0x7FFFFF)
        falls = 13 + tl.maximum(113 - exponent, 0)
        shift = tl.minimum(falls, 31).to(tl.uint32)
        known = significand >> tl.minimum(tl.maximum(falls - 31, 0), 31).to(tl.uint32)
        kept = (known + (bits & ((tl.full(shift.shape, 1, tl.uint32) << shift) - 1))) >> shift
        kept += tl.maximum(exponent - 113, 0).to(tl.uint32) << 10
        kept = tl.minimum(kept, 0x7BFF)
        infinite = size >= 0x477FF000
    kept = kept | ((word >> 31) << 15)
    return tl.where(infinite, nearest(x, DTYPE), kept.to(tl.uint16).to(DTYPE, bitcast=True))
