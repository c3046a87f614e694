"""The Triton kernels of tracked merges: one pass there, one pass back.

A unit of the journal is a tile. Codes say bits(W) - bits(estimate): -1, 0 or 1 as 0, 1 or 2, or 3, an escape. A word of
codes is what a thread of the matrix unit has of a row of 64 columns: pairs of neighbours, eight columns apart. So its
sums are never moved, but W is, twice, at half the bytes; and a thread has two words or four, which cost little. What
escapes lies in the arena in order of words. Turn by turn, each word has its next escapes moved, from memory to memory:
W is still there on the way out, and on the way back all else has been written by then. Most tiles take one to three
turns.

A block's threads wait for each other whenever something goes from one to another, and with few blocks on a
multiprocessor that is what a tile's time goes to. So words are in the order of threads (`_by_word`), weights and
products are moved to the same threads once (`_same_threads`), and a tile's sums are made in one go (`_totals`).

The compiled kernels have another order of codes, that of their own threads, and keep escapes in order of warps: Triton
does not say which thread has what, and has no votes. Records, arena, room taken by the chunk and who asks for more are
theirs (`one_pass.py`, `tracked.cuh`).

Both kernels compute the same estimate: `enable_fp_fusion` is off, so nothing is contracted in one of them only, and a
NaN that a GPU computes has the same bits each time. In the interpreter it is an escape.
"""

# ruff: noqa: ANN001, ANN201, ANN202, SIM300
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from .merge_kernels import (
    COLS,
    INTERPRETED,
    ROW_SCALE,
    ROWS,
    SOURCE,
    SOURCE_STRIDE,
    ask,
    corner,
    extent,
    nearest,
    pointers,
    prefetch,
    products,
    scaling_of,
)

NEVER = ["units", "first", "room", "chunk"]
"""Arguments that no kernel is compiled anew for."""


@triton.jit(do_not_specialize=NEVER)
def track(
    table, unit_segment, codes, records, arena, counter, units: tl.int64, first: tl.int64, room: tl.int64,
    chunk: tl.int64,
    SOURCE_T: tl.constexpr, WORD_T: tl.constexpr, LORA_A_T: tl.constexpr, LORA_B_T: tl.constexpr, ALIGN: tl.constexpr,
    LORA_ALIGN: tl.constexpr, RANK_BLOCKS: tl.constexpr, SCALED: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Merge the tiles that have no place in the arena and find room there.

    Args:
        table, unit_segment: as for `run_table`; so are the constants.
        codes: int32 words, of a tile in the order of threads.
        records: int64 `[n, 2]`: place in bytes, negative if not merged; checksum.
        arena: elements of WORD_T, the integer of SOURCE_T's size.
        counter: int64: bytes of the arena asked for, bytes that units without room lack, units found changed.
        units: of this table; their numbers in the journal begin at `first`.
        room: bytes of the arena; chunk: what a program takes at a time, 0: what a tile needs.
    """
    SIZE: tl.constexpr = SOURCE_T.primitive_bitwidth // 8
    unit = tl.program_id(0).to(tl.int64)
    segment, row, column = corner(table, unit_segment, unit, TILE_M, TILE_N)
    place = tl.load(records + (first + unit) * 2)
    free = tl.zeros([], tl.int64)  # where the program's chunk goes on, and how much is left of it
    left = tl.zeros([], tl.int64)
    missing = tl.zeros([], tl.int64)
    closed = tl.zeros([], tl.int32)  # the arena had no more
    while unit < units:
        record = records + (first + unit) * 2
        following = tl.minimum(unit + tl.num_programs(0), units - 1)  # known one tile ahead, as it comes a long way
        next_segment, next_row, next_column = corner(table, unit_segment, following, TILE_M, TILE_N)
        next_place = tl.load(records + (first + following) * 2)
        column = tl.multiple_of(column, TILE_N)
        if place < 0:
            ask(next_segment, next_row, next_column, WORD_T, ALIGN, TILE_M, TILE_N, AHEAD)
            i, j = row.to(tl.int64) + tl.arange(0, TILE_M), column + tl.arange(0, TILE_N)
            rows, cols = tl.load(segment + ROWS), extent(segment + COLS, ALIGN)
            at = pointers(segment + SOURCE, segment + SOURCE_STRIDE, i, j, WORD_T, ALIGN)
            inside = (i < rows)[:, None] & (j < cols)[None, :]
            base = tl.load(at, inside, other=0, eviction_policy="evict_first")
            lifted = _lifted(base, SOURCE_T)
            if RANK_BLOCKS > 0:
                product = products(segment, i, j, LORA_A_T, LORA_B_T, LORA_ALIGN, RANK_BLOCKS, TILE_M, TILE_N, BLOCK_K)
                lifted, product = _same_threads(lifted, product)
            total = _value(lifted, SOURCE_T)
            if RANK_BLOCKS > 0:
                total = tl.fma(product, scaling_of(segment), total)
            if SCALED:
                total *= _row_scale(segment, i)[:, None]
            edge = (row + TILE_M > rows) | (column + TILE_N > cols)
            if edge:
                in_rows, in_cols = row + tl.arange(0, TILE_M) < rows, _columns(column, TILE_N) < cols
                total = tl.where(in_rows[:, None] & in_cols[None, :], total, 0.0)  # as it will be loaded again
            written = nearest(total, SOURCE_T).to(WORD_T, bitcast=True)
            merged = _value(_lifted(written, SOURCE_T), SOURCE_T)
            estimate = _unscaled(merged, segment, i, SCALED)
            if RANK_BLOCKS > 0:
                estimate = tl.fma(product, -scaling_of(segment), estimate)
            words_at = _codes_at(codes, first + unit, TILE_M, TILE_N)
            words = _pack(_encode(lifted, estimate, SOURCE_T), TILE_M, TILE_N)
            if edge:
                words &= _inside((rows - row).to(tl.int32), (cols - column).to(tl.int32), TILE_M, TILE_N)
            tl.store(words_at, words)
            checksums = _checksums(written, unit, TILE_M, TILE_N)
            escapes = words & (words >> 1) & 0x55555555  # bit 2 * t for an element t that escapes
            count = _ones(escapes)
            checksum, escaped, turns = tl.reduce((checksums, count, count), 0, _totals)
            need = (escaped * SIZE + 3).to(tl.int64) // 4 * 4
            room_at = free
            if need <= left:
                free += need
                left -= need
            else:
                room_at = tl.full([], -1, tl.int64)
                if closed == 0:
                    alone = need * 8 >= chunk  # else a chunk would be left with much of it unused
                    size = tl.where(alone, need, chunk)
                    begin = tl.atomic_add(counter, size, sem="relaxed")
                    if begin + need <= room:
                        room_at = begin
                        free = tl.where(alone, free, begin + need)
                        left = tl.where(alone, left, tl.minimum(begin + size, room) - (begin + need))
                    else:
                        closed = tl.full([], 1, tl.int32)
            if room_at < 0:
                missing += need
            else:
                source, step = _words_at(segment, row, column, WORD_T, ALIGN, TILE_M, TILE_N)
                to = arena + room_at // SIZE + (tl.cumsum(count, axis=0) - count)
                while turns > 0:  # two at a time, as what is loaded comes a long way
                    after = escapes & (escapes - 1)
                    one = tl.load(source + _next(escapes) * step, escapes != 0, other=0)
                    two = tl.load(source + _next(after) * step, after != 0, other=0)
                    tl.store(to, one, escapes != 0)
                    tl.store(to + 1, two, after != 0)
                    escapes = after & (after - 1)
                    to += 2
                    turns -= 2
                tl.debug_barrier()  # W was read by other threads than those that write it
                tl.store(at, written, inside, eviction_policy="evict_first")
                tl.store(record + 1, checksum)
                tl.store(record, room_at)
        unit += tl.num_programs(0)
        segment, row, column, place = next_segment, next_row, next_column, next_place
    if missing > 0:
        tl.atomic_add(counter + 1, missing, sem="relaxed")


@triton.jit(do_not_specialize=NEVER)
def untrack(
    table, unit_segment, codes, records, arena, counter, units: tl.int64, first: tl.int64, room: tl.int64,
    chunk: tl.int64,
    SOURCE_T: tl.constexpr, WORD_T: tl.constexpr, LORA_A_T: tl.constexpr, LORA_B_T: tl.constexpr, ALIGN: tl.constexpr,
    LORA_ALIGN: tl.constexpr, RANK_BLOCKS: tl.constexpr, SCALED: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Bring back the tiles that have a place and hold what was written. Arguments: as for `track`."""
    SIZE: tl.constexpr = SOURCE_T.primitive_bitwidth // 8
    unit = tl.program_id(0).to(tl.int64)
    segment, row, column = corner(table, unit_segment, unit, TILE_M, TILE_N)
    place = tl.load(records + (first + unit) * 2)
    while unit < units:
        record = records + (first + unit) * 2
        following = tl.minimum(unit + tl.num_programs(0), units - 1)
        next_segment, next_row, next_column = corner(table, unit_segment, following, TILE_M, TILE_N)
        next_place = tl.load(records + (first + following) * 2)
        column = tl.multiple_of(column, TILE_N)
        if place >= 0:
            ask(next_segment, next_row, next_column, WORD_T, ALIGN, TILE_M, TILE_N, AHEAD)
            if AHEAD > 0:
                sector = 8 * tl.arange(0, TILE_M * TILE_N // 128)
                prefetch(codes + (first + following) * (TILE_M * TILE_N // 16) + sector)
            i, j = row.to(tl.int64) + tl.arange(0, TILE_M), column + tl.arange(0, TILE_N)
            rows, cols = tl.load(segment + ROWS), extent(segment + COLS, ALIGN)
            at = pointers(segment + SOURCE, segment + SOURCE_STRIDE, i, j, WORD_T, ALIGN)
            inside = (i < rows)[:, None] & (j < cols)[None, :]
            words = tl.load(_codes_at(codes, first + unit, TILE_M, TILE_N))
            written = tl.load(at, inside, other=0, eviction_policy="evict_first")
            escapes = words & (words >> 1) & 0x55555555  # bit 2 * t for an element t that escapes
            count = _ones(escapes)
            escaped = arena + place // SIZE + (tl.cumsum(count, axis=0) - count)
            bits = tl.load(escaped, escapes != 0, other=0)  # early, as it comes a long way
            lifted = _lifted(written, SOURCE_T)
            if RANK_BLOCKS > 0:
                product = products(segment, i, j, LORA_A_T, LORA_B_T, LORA_ALIGN, RANK_BLOCKS, TILE_M, TILE_N, BLOCK_K)
                lifted, product = _same_threads(lifted, product)
            merged = _value(lifted, SOURCE_T)
            estimate = _unscaled(merged, segment, i, SCALED)
            if RANK_BLOCKS > 0:
                estimate = tl.fma(product, -scaling_of(segment), estimate)
            checksums = _checksums(_lowered(lifted, SOURCE_T), unit, TILE_M, TILE_N)
            checksum, _, turns = tl.reduce((checksums, count, count), 0, _totals)
            if checksum == tl.load(record + 1):
                base = _decode(estimate, _unpack(words, TILE_M, TILE_N), SOURCE_T).to(WORD_T)
                tl.store(at, base, inside, eviction_policy="evict_first")
                tl.debug_barrier()  # escapes go where other threads have written
                source, step = _words_at(segment, row, column, WORD_T, ALIGN, TILE_M, TILE_N)
                while turns > 0:
                    tl.store(source + _next(escapes) * step, bits, escapes != 0)
                    escapes &= escapes - 1
                    escaped += 1
                    bits = tl.load(escaped, escapes != 0, other=0)
                    turns -= 1
                tl.store(record, tl.full([], -1, tl.int64))
            else:
                tl.atomic_add(counter + 2, tl.full([], 1, tl.int64), sem="relaxed")
        unit += tl.num_programs(0)
        segment, row, column, place = next_segment, next_row, next_column, next_place


# ---- a tile ----------------------------------------------------------------------------------------------------------


@triton.jit
def _row_scale(segment, i):
    """Return float32; 1 beyond the last row."""
    row_scale = tl.load(segment + ROW_SCALE).to(tl.pointer_type(tl.float32))
    return tl.load(row_scale + i, i < tl.load(segment + ROWS), other=1.0)


@triton.jit
def _columns(column, TILE_N: tl.constexpr):
    """Return int32 `column + arange`, added so that constants come last: else each is kept in a register."""
    return tl.reshape((8 * tl.arange(0, TILE_N // 8))[:, None] + (column + tl.arange(0, 8))[None, :], [TILE_N])


@triton.jit
def _unscaled(merged, segment, i, SCALED: tl.constexpr):
    """Return `W' / row_scale`. A factor of zero leaves nothing of W: one estimate is as good as any."""
    if SCALED:
        scale = _row_scale(segment, i)
        inverse = tl.where(scale == 0, 0.0, 1.0 / tl.where(scale == 0, 1.0, scale))
        return merged * inverse[:, None]
    else:
        return merged


@triton.jit
def _checksums(written, unit, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Return int64 `[words]`, summands: all bits in words of 32, each times an odd number of 32 bits of its place.

    In 64 bits no such product is lost, so a single element that differs is always found. The numbers of a word of codes
    and of a place in it come together by xor: were it a sum, rows in each other's place could add up to nothing. With
    the unit's number in it the compiler cannot keep them all in registers.
    """
    bits = tl.reshape(written, [TILE_M, TILE_N // 64, 8, 4, 2])
    if written.dtype == tl.int16:
        shift = (16 * tl.arange(0, 2))[None, None, None, None, :]
        bits = tl.expand_dims(tl.sum((bits.to(tl.int32) & 0xFFFF) << shift, axis=4), 4)
    ALONE: tl.constexpr = bits.shape[4]
    word = tl.reshape(tl.arange(0, TILE_M * TILE_N // 16), [TILE_M, TILE_N // 64, 1, 4, 1])
    place = tl.reshape(tl.arange(0, 8 * ALONE), [1, 1, 8, 1, ALONE])
    factor = (_stir(unit.to(tl.int32) + word) | 1) ^ (_stir(place + 0x5BD1E995) << 1)
    terms = bits.to(tl.uint32, bitcast=True).to(tl.int64) * factor.to(tl.int64)
    return _by_word(terms, TILE_M, TILE_N)


@triton.jit
def _stir(x):
    x = x.to(tl.uint32) * 0x9E3779B1
    x ^= x >> 15
    return x * 0x85EBCA6B


# ---- elements --------------------------------------------------------------------------------------------------------


@triton.jit
def _lifted(word, SOURCE_T: tl.constexpr):
    """Return int32 of an element's bits: of bf16 those of its float32. All else begins here: tiles move once."""
    if SOURCE_T == tl.bfloat16:
        return word.to(tl.int32) << 16
    else:
        return word.to(tl.int32)


@triton.jit
def _lowered(lifted, SOURCE_T: tl.constexpr):
    """Undo `_lifted`."""
    if SOURCE_T == tl.bfloat16:
        return (lifted >> 16).to(tl.int16)
    elif SOURCE_T == tl.float16:
        return lifted.to(tl.int16)
    else:
        return lifted


@triton.jit
def _same_threads(lifted, product):
    """Return both as they are, but joined and split again, so that the compiler moves the weights to the threads that
    have the products, once, and not each thing that is computed of them to where it came from. Triton 3.9 sees
    through it."""
    lifted, bits = tl.split(tl.join(lifted, product.to(tl.int32, bitcast=True)))
    return lifted, bits.to(tl.float32, bitcast=True)


@triton.jit
def _value(lifted, SOURCE_T: tl.constexpr):
    """Return float32."""
    if SOURCE_T == tl.float16:
        return lifted.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return lifted.to(tl.float32, bitcast=True)


@triton.jit
def _encode(lifted, estimate, SOURCE_T: tl.constexpr):
    """Return int32, 0 to 3, of a base. For bf16 the estimate is not rounded: its distance is."""
    away = lifted - _bits(estimate, SOURCE_T) + (0x18000 if SOURCE_T == tl.bfloat16 else 1)
    away = away.to(tl.uint32, bitcast=True)
    if SOURCE_T == tl.bfloat16:
        away >>= 16
    if INTERPRETED:
        away = tl.where(estimate == estimate, away, 3)
    return tl.minimum(away, 3).to(tl.int32, bitcast=True)


@triton.jit
def _decode(estimate, code, SOURCE_T: tl.constexpr):
    """Return int32, with the bits of W in its low part, where it did not escape."""
    if SOURCE_T == tl.bfloat16:
        lifted = estimate.to(tl.int32, bitcast=True) + (code << 16) - 0x8001
        return (lifted.to(tl.uint32, bitcast=True) >> 16).to(tl.int32, bitcast=True)
    else:
        return _bits(estimate, SOURCE_T) + code - 1


@triton.jit
def _bits(estimate, SOURCE_T: tl.constexpr):
    """Return int32."""
    if SOURCE_T == tl.float16:
        return estimate.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    else:
        return estimate.to(tl.int32, bitcast=True)


# ---- words of codes: element t of 16 lies t // 2 * 8 + t % 2 columns after the first one -----------------------------


@triton.jit
def _pack(code, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Return int32 `[words of a tile]`."""
    shift = 4 * tl.arange(0, 8)[:, None, None] + 2 * tl.arange(0, 2)[None, None, :]
    shifted = tl.reshape(code, [TILE_M, TILE_N // 64, 8, 4, 2]) << shift[None, None, :, :, :]
    return _by_word(shifted, TILE_M, TILE_N)


@triton.jit
def _unpack(words, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Return int32 `[TILE_M, TILE_N]`, what `_pack` had."""
    shift = 4 * tl.arange(0, 8)[:, None, None] + 2 * tl.arange(0, 2)[None, None, :]
    words = tl.trans(tl.reshape(words, [2, TILE_N // 64, TILE_M // 16, 8, 4]), 2, 0, 3, 1, 4)
    words = tl.reshape(words, [TILE_M, TILE_N // 64, 1, 4, 1])
    return tl.reshape((words >> shift[None, None, :, :, :]) & 3, [TILE_M, TILE_N])


@triton.jit
def _by_word(elements, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Return `[words]` in the order of threads, sums over words of `[TILE_M, TILE_N // 64, 8, 4, 2 or 1]` elements.

    That is the order in which Triton gives a row to threads; by rows of the tile, all words would change threads. A
    warp of the matrix unit has 16 rows, a thread of it every eighth one.
    """
    sums = tl.reshape(tl.sum(tl.sum(elements, axis=4), axis=2), [TILE_M // 16, 2, 8, TILE_N // 64, 4])
    return tl.reshape(tl.trans(sums, 1, 3, 0, 2, 4), [TILE_M * TILE_N // 16])


@triton.jit
def _codes_at(codes, unit, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Return pointers. Were they known to be adjacent, a thread would have four words side by side here, and one each
    where escapes are moved, and between the two all would be exchanged at every turn."""
    word = tl.max_contiguous(tl.arange(0, TILE_M * TILE_N // 16), 1)
    return codes + unit * (TILE_M * TILE_N // 16) + word


@triton.jit
def _first_element(TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Return the row and the column in the tile of each word's first element."""
    word = tl.arange(0, TILE_M * TILE_N // 16)
    row = word // 32 % (TILE_M // 16) * 16 + word // (TILE_M * TILE_N // 32) * 8 + word // 4 % 8
    return row, word // (2 * TILE_M) % (TILE_N // 64) * 64 + word % 4 * 2


@triton.jit
def _words_at(
    segment, row, column, WORD_T: tl.constexpr, ALIGN: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr
):
    """Return pointers to the first element of each word, and how far apart columns are."""
    i, j = _first_element(TILE_M, TILE_N)
    base = tl.load(segment + SOURCE).to(tl.pointer_type(WORD_T))
    stride = tl.load(segment + SOURCE_STRIDE)
    step = 1 if ALIGN > 1 else tl.load(segment + SOURCE_STRIDE + 1)
    return base + (row + i) * stride + (column + j) * step, step


@triton.jit
def _inside(rows, cols, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Return masks of the codes inside: of so many rows and columns of the tile. Nothing else may escape."""
    i, j = _first_element(TILE_M, TILE_N)
    there = cols - j  # of its elements those before a certain one
    most = tl.minimum(tl.maximum((there + 7) // 8, 0), 8) + tl.minimum(tl.maximum((there + 6) // 8, 0), 8)
    return ((tl.full([], 1, tl.int64) << (2 * tl.where(i < rows, most, 0))) - 1).to(tl.int32)


@triton.jit
def _ones(escapes):
    """Count the bits that are set, of even ones."""
    fours = (escapes & 0x33333333) + ((escapes >> 2) & 0x33333333)
    bytes = (fours & 0x0F0F0F0F) + ((fours >> 4) & 0x0F0F0F0F)
    return (bytes * 0x01010101 >> 24) & 0x1F


@triton.jit
def _totals(checksum, count, most, other_checksum, other_count, other_most):
    """Return two words' sums of checksums and counts, and the larger count."""
    return checksum + other_checksum, count + other_count, tl.maximum(most, other_most)


@triton.jit
def _next(escapes):
    """Return how many columns on the first one lies that escapes: a power of two's exponent is exact."""
    bit = ((escapes & -escapes).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return ((bit & 28) << 1) | ((bit >> 1) & 1)
