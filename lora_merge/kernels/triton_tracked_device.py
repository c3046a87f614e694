"""The Triton kernels of tracked merges: one pass there, one pass back.

A unit of the journal is a tile. Its codes (-1, 0 or 1 as 0, 1 or 2, or 3: an escape) lie in words of GROUP adjacent
columns, row after row, in the same place whatever the segment's shape. What escapes lies in the arena in order of words,
and in a word in order of columns. The words of a tile are so few that what is done for escapes costs little: turn by
turn, each word has its next one moved, from memory to memory, as W is still there on the way out, and on the way back
all else has been written by then. Most tiles take one to three turns.

Programs go from tile to tile, and take room in the arena by the chunk, as the compiled kernels' warps do (`tracked.cuh`).

An estimate is exact arithmetic of its own: `fma` where the compiler could choose to contract, so that both kernels compute
the same one. A NaN escapes: its bits are nobody's promise.
"""

# ruff: noqa: ANN001, ANN201, ANN202, SIM300
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from .triton_device import (
    COLS,
    ROW_SCALE,
    ROWS,
    SOURCE,
    SOURCE_STRIDE,
    UNIT_BEGIN,
    UNITS_ACROSS,
    WORDS,
    extent,
    float32,
    nearest,
    pointers,
    update,
)

NEVER = ["units", "first", "room", "chunk"]
"""Arguments that no kernel is compiled anew for."""


@triton.jit(do_not_specialize=NEVER)
def track(
    table,
    unit_segment,
    codes,
    records,
    arena,
    counter,
    units: tl.int64,
    first: tl.int64,
    room: tl.int64,
    chunk: tl.int64,
    SOURCE_T: tl.constexpr,
    WORD_T: tl.constexpr,
    LORA_A_T: tl.constexpr,
    LORA_B_T: tl.constexpr,
    ALIGN: tl.constexpr,
    LORA_ALIGN: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Merge the tiles that have no place in the arena and find room there.

    Args:
        table, unit_segment: as for `run_table`; so are the constants.
        codes: words of 2 * GROUP bits.
        records: int64 `[n, 2]`: place in bytes, negative if not merged; checksum.
        arena: elements of WORD_T.
        counter: int64: bytes of the arena asked for, bytes that units without room lack, units found changed.
        units: of this table; their numbers in the journal begin at `first`.
        room: bytes of the arena; chunk: what a program takes at a time, 0: what a tile needs.
        WORD_T: the integer of SOURCE_T's size. GROUP: 16 bytes of it.
    """
    SIZE: tl.constexpr = SOURCE_T.primitive_bitwidth // 8
    unit = tl.program_id(0).to(tl.int64)
    free = tl.zeros([], tl.int64)  # where the program's chunk goes on, and how much is left of it
    left = tl.zeros([], tl.int64)
    missing = tl.zeros([], tl.int64)
    closed = tl.zeros([], tl.int32)  # the arena had no more
    while unit < units:
        record = records + (first + unit) * 2
        if tl.load(record) < 0:
            segment, i, j, column = _tile_of(table, unit_segment, unit, TILE_M, TILE_N)
            at = pointers(segment + SOURCE, segment + SOURCE_STRIDE, i, j, WORD_T, ALIGN)
            inside = (i < tl.load(segment + ROWS))[:, None] & (j < extent(segment + COLS, ALIGN))[None, :]
            base = tl.load(at, inside, other=0, eviction_policy="evict_first")
            delta = _delta(segment, i, j, LORA_A_T, LORA_B_T, LORA_ALIGN, RANK_BLOCKS, TILE_M, TILE_N, BLOCK_K)
            scale = _row_scale(segment, i)
            total = float32(base.to(SOURCE_T, bitcast=True)) + delta
            merged = nearest(total * scale[:, None], SOURCE_T)
            written = merged.to(WORD_T, bitcast=True)
            estimate = _estimate(merged, delta, scale)
            guess = nearest(estimate, SOURCE_T).to(WORD_T, bitcast=True)
            away = base.to(tl.int32) - guess.to(tl.int32) + 1
            near = (away.to(tl.uint32, bitcast=True) < 3) & (estimate == estimate)
            if ALIGN == 1:
                near |= inside == 0
            words = _pack(tl.where(near, away, 3), TILE_M, TILE_N, GROUP)
            columns = column + tl.arange(0, TILE_N // GROUP) * GROUP
            there = (i < tl.load(segment + ROWS))[:, None] & (columns < tl.load(segment + COLS))[None, :]
            escapes = tl.where(there, _escapes(words), 0)
            count = _ones(escapes)
            need = (tl.sum(tl.sum(count, axis=1), axis=0) * SIZE + 3).to(tl.int64) // 4 * 4
            place = free
            if need <= left:
                free += need
                left -= need
            else:
                place = tl.full([], -1, tl.int64)
                if closed == 0:
                    alone = need * 8 >= chunk  # else a chunk would be left with much of it unused
                    size = tl.where(alone, need, chunk)
                    begin = tl.atomic_add(counter, size, sem="relaxed")
                    if begin + need <= room:
                        place = begin
                        free = tl.where(alone, free, begin + need)
                        left = tl.where(alone, left, tl.minimum(begin + size, room) - (begin + need))
                    else:
                        closed = tl.full([], 1, tl.int32)
            if place < 0:
                missing += need
            else:
                checksum = _checksum(written, inside, there, ALIGN, TILE_M, TILE_N, GROUP)
                source = _groups_at(segment, i, columns, WORD_T)
                step = tl.load(segment + SOURCE_STRIDE + 1)
                number = _before(count, TILE_M, TILE_N, GROUP)
                most = tl.max(tl.max(count, axis=1), axis=0)
                while most > 0:
                    bits = tl.load(source + _lowest(escapes) * step, escapes != 0, other=0)
                    tl.store(arena + place // SIZE + number, bits, escapes != 0)
                    escapes &= escapes - 1
                    number += 1
                    most -= 1
                tl.debug_barrier()  # W was read by other threads than those that write it
                tl.store(at, written, inside, eviction_policy="evict_first")
                in_tile = _in_tile(TILE_M, TILE_N, GROUP)
                packed = codes + (first + unit) * (TILE_M * TILE_N // GROUP) + in_tile
                tl.store(packed, words.to(codes.dtype.element_ty), eviction_policy="evict_first")
                tl.store(record + 1, checksum)
                tl.store(record, place)
        unit += tl.num_programs(0)
    if missing > 0:
        tl.atomic_add(counter + 1, missing, sem="relaxed")


@triton.jit(do_not_specialize=NEVER)
def untrack(
    table,
    unit_segment,
    codes,
    records,
    arena,
    counter,
    units: tl.int64,
    first: tl.int64,
    room: tl.int64,
    chunk: tl.int64,
    SOURCE_T: tl.constexpr,
    WORD_T: tl.constexpr,
    LORA_A_T: tl.constexpr,
    LORA_B_T: tl.constexpr,
    ALIGN: tl.constexpr,
    LORA_ALIGN: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Bring back the tiles that have a place and hold what was written. Arguments: as for `track`."""
    SIZE: tl.constexpr = SOURCE_T.primitive_bitwidth // 8
    unit = tl.program_id(0).to(tl.int64)
    while unit < units:
        record = records + (first + unit) * 2
        place = tl.load(record)
        if place >= 0:
            segment, i, j, column = _tile_of(table, unit_segment, unit, TILE_M, TILE_N)
            at = pointers(segment + SOURCE, segment + SOURCE_STRIDE, i, j, WORD_T, ALIGN)
            inside = (i < tl.load(segment + ROWS))[:, None] & (j < extent(segment + COLS, ALIGN))[None, :]
            in_tile = _in_tile(TILE_M, TILE_N, GROUP)
            packed = codes + (first + unit) * (TILE_M * TILE_N // GROUP) + in_tile
            words = tl.load(packed, eviction_policy="evict_first").to(tl.int32)
            written = tl.load(at, inside, other=0, eviction_policy="evict_first")
            columns = column + tl.arange(0, TILE_N // GROUP) * GROUP
            there = (i < tl.load(segment + ROWS))[:, None] & (columns < tl.load(segment + COLS))[None, :]
            escapes = tl.where(there, _escapes(words), 0)
            count = _ones(escapes)
            number = _before(count, TILE_M, TILE_N, GROUP)
            bits = tl.load(arena + place // SIZE + number, escapes != 0, other=0)  # early: it comes a long way
            delta = _delta(segment, i, j, LORA_A_T, LORA_B_T, LORA_ALIGN, RANK_BLOCKS, TILE_M, TILE_N, BLOCK_K)
            checksum = _checksum(written, inside, there, ALIGN, TILE_M, TILE_N, GROUP)
            if checksum == tl.load(record + 1):
                estimate = _estimate(written.to(SOURCE_T, bitcast=True), delta, _row_scale(segment, i))
                guess = nearest(estimate, SOURCE_T).to(WORD_T, bitcast=True)
                base = guess.to(tl.int32) + _unpack(words, TILE_M, TILE_N, GROUP) - 1
                tl.store(at, base.to(WORD_T), inside, eviction_policy="evict_first")
                tl.debug_barrier()  # escapes go where other threads have written
                source = _groups_at(segment, i, columns, WORD_T)
                step = tl.load(segment + SOURCE_STRIDE + 1)
                most = tl.max(tl.max(count, axis=1), axis=0)
                while most > 0:
                    tl.store(source + _lowest(escapes) * step, bits, escapes != 0)
                    escapes &= escapes - 1
                    number += 1
                    bits = tl.load(arena + place // SIZE + number, escapes != 0, other=0)
                    most -= 1
                tl.store(record, tl.full([], -1, tl.int64))
            else:
                tl.atomic_add(counter + 2, tl.full([], 1, tl.int64), sem="relaxed")
        unit += tl.num_programs(0)


# ---- a tile ----------------------------------------------------------------------------------------------------------


@triton.jit
def _tile_of(table, unit_segment, unit, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """A unit's segment, its rows, its columns, and the first of these."""
    segment = table + tl.load(unit_segment + unit).to(tl.int64) * WORDS
    local = (unit - tl.load(segment + UNIT_BEGIN)).to(tl.int32)
    across = tl.load(segment + UNITS_ACROSS).to(tl.int32)
    i = (local // across).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    column = (local % across).to(tl.int64) * TILE_N
    return segment, i, column + tl.arange(0, TILE_N), column


@triton.jit
def _delta(
    segment,
    i,
    j,
    A_T: tl.constexpr,
    B_T: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """float32 D; zeros without an adapter."""
    if BLOCKS > 0:
        return update(segment, i, j, A_T, B_T, ALIGN, BLOCKS, TILE_M, TILE_N, BLOCK_K)
    else:
        return tl.zeros([TILE_M, TILE_N], tl.float32)


@triton.jit
def _row_scale(segment, i):
    """float32, 1 where there is none."""
    address = tl.load(segment + ROW_SCALE)
    rows = tl.where(address == 0, 0, tl.load(segment + ROWS))
    return tl.load(address.to(tl.pointer_type(tl.float32)) + i, i < rows, other=1.0)


@triton.jit
def _estimate(merged, delta, scale):
    """float32 `W' / row_scale - D`; a factor of zero leaves nothing of W, and -D is as good as any."""
    inverse = tl.where(scale == 0, 0.0, 1.0 / tl.where(scale == 0, 1.0, scale))
    inverse = tl.broadcast_to(inverse[:, None], delta.shape)
    return tl.fma(float32(merged), inverse, -delta)


@triton.jit
def _checksum(
    written,
    inside,
    there,
    ALIGN: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """32 bits, in an int64.

    Each step but the sum can be undone, so a single element that differs is always found. Elements are stirred first, so that
    signs which all change, or rows in each other's place, do not add up to nothing.
    """
    rows, cols = _stir(tl.arange(0, TILE_M)), _stir(tl.arange(0, TILE_N) + TILE_M)
    factor = (rows[:, None] << 1) + (cols[None, :] | 1)
    element = _stir(written.to(tl.int32)) * factor
    if ALIGN == 1:
        element = tl.where(inside, element, 0)
    groups = tl.sum(tl.reshape(element, [TILE_M, TILE_N // GROUP, GROUP]), axis=2)
    return tl.sum(tl.sum(tl.where(there, groups, 0), axis=1), axis=0).to(tl.int64)


@triton.jit
def _stir(x):
    """uint32, one to one."""
    x = x.to(tl.uint32, bitcast=True) * 0x9E3779B1
    return x ^ (x >> 15)


# ---- words of codes --------------------------------------------------------------------------------------------------


@triton.jit
def _pack(code, TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr):
    shifted = tl.reshape(code, [TILE_M, TILE_N // GROUP, GROUP]) << (2 * tl.arange(0, GROUP))[None, None, :]
    return tl.sum(shifted, axis=2)


@triton.jit
def _unpack(words, TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr):
    codes = (words[:, :, None] >> (2 * tl.arange(0, GROUP))[None, None, :]) & 3
    return tl.reshape(codes, [TILE_M, TILE_N])


@triton.jit
def _in_tile(TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr):
    """Where the words of a tile lie in the codes."""
    return tl.arange(0, TILE_M)[:, None] * (TILE_N // GROUP) + tl.arange(0, TILE_N // GROUP)[None, :]


@triton.jit
def _groups_at(segment, i, columns, WORD_T: tl.constexpr):
    """Pointers to the first element of each group."""
    base = tl.load(segment + SOURCE).to(tl.pointer_type(WORD_T))
    stride = segment + SOURCE_STRIDE
    return base + i[:, None] * tl.load(stride) + columns[None, :] * tl.load(stride + 1)


@triton.jit
def _escapes(words):
    """Bit 2 * k for element k of a group."""
    return words & (words >> 1) & 0x5555


@triton.jit
def _ones(escapes):
    """How many bits are set, of eight even ones."""
    pairs = (escapes & 0x3333) + ((escapes >> 2) & 0x3333)
    return (pairs * 0x1111 >> 12) & 0xF


@triton.jit
def _lowest(escapes):
    """The first element of a group that escapes: a power of two's exponent is exact."""
    exponent = (escapes & -escapes).to(tl.float32).to(tl.int32, bitcast=True) >> 23
    return (exponent - 127) >> 1


@triton.jit
def _before(count, TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr):
    """How many elements escape in the groups of a tile before each."""
    of_rows = tl.sum(count, axis=1)
    rows = tl.cumsum(of_rows, axis=0) - of_rows
    return rows[:, None] + tl.cumsum(count, axis=1) - count
