"""Lays adapters out as the CUDA kernels read them, in front of a merge: bytes of the adapter, not of the weights.

Float32 adapters of high rank, of 16-bit weights, become pairs of fp16 for either kernel, as `csrc/parts.h` says.

The kernel for compute capability 9 brings all others by tensor maps, which ask for rows of whole 16-byte vectors, so
lora_B `[rows, 1]` of a rank-1 adapter, or lora_A and lora_B of rank 12, have none. They are copied to memory of the
plan, with room between the rows. Ranks that are added are zeros, so the bits stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..bindings.layout import PAIRS, WORDS
from ..segments import (
    COLS,
    DESTINATION,
    DESTINATION_STRIDE,
    DTYPES,
    FLOATS,
    FP32,
    KEY,
    LORA_A,
    LORA_B,
    PARTS_A,
    PARTS_B,
    RANK,
    RAW,
    ROWS,
    SOURCE,
    SOURCE_STRIDE,
)
from .hopper import HALVES, RANKS, VECTOR, reads
from .kernel import Kernel
from .table import ceil, products

WORTH = 16
"""An adapter is copied where it is less than one part in so many of the weight."""
FACTORS = 64
"""Columns of lora_A as pairs, and factors of either half, are filled up to a multiple of so many: csrc/parts.h."""
FACTOR_WORDS = FACTORS + 4
"""Of so many factors, with what they have in common."""
ALIGNED = 256
"""Bytes at a multiple of which each half begins."""


class Repacked(NamedTuple):
    """A table whose adapters have a layout that the kernel can read.

    Attributes:
        table: segments as before, but for where lora_A and lora_B lie, their strides and dtypes, and ranks of zeros.
        splits: halves of adapters that become pairs, a segment each (`launch_parts` in csrc/cuda/launch.h).
        copies: segments of rank 0 that bring other halves there.
        memory: where both go; zeros where nothing does. Kept as long as the table is used.

    Splits and copies run before each merge. Empty if there are none.
    """

    table: np.ndarray
    splits: np.ndarray
    copies: np.ndarray
    memory: Tensor


class _Half(NamedTuple):
    """One half of an adapter as a matrix of `rank` rows, and the one that it becomes; strides in elements."""

    address: int
    rank: int
    length: int  # columns of lora_A, rows of lora_B
    source_dtype: int
    source: tuple[int, int]
    dtype: int
    destination: tuple[int, int]

    @property
    def pitch(self) -> int:
        """Elements from one row of vectors to the next."""
        return max(self.destination)

    @property
    def nbytes(self) -> int:
        size = FLOATS[self.dtype].itemsize
        if self.destination[0] == 1:  # lora_B
            return self.length * self.pitch * size
        return (_up(self.rank, RANKS) if size == 2 else self.rank) * self.pitch * size

    def job(self, to: int) -> list[int]:
        """Return the segment that lays it out at an address: runs of bytes where columns lie together on both sides,
        several ranks as one number where they do, else element by element."""
        (row, col), (to_row, to_col), size = self.source, self.destination, FLOATS[self.dtype].itemsize
        rows, cols, code = self.rank, self.length, self.source_dtype | self.dtype << 8
        if self.source_dtype == self.dtype and col == to_col == 1:
            cols, row, to_row, code = cols * size, row * size, to_row * size, RAW[1] | RAW[1] << 8
        elif self.source_dtype == self.dtype:
            unit = 1
            if row == to_row == 1 and self.address % size == 0:
                unit = math.gcd(rows, col, to_col, self.address // size, 8 // size)
                rows, col, to_col = rows // unit, col // unit, to_col // unit
            code = RAW[unit * size] | RAW[unit * size] << 8
        words = [0] * WORDS
        words[SOURCE], words[DESTINATION], words[ROWS], words[COLS], words[DTYPES] = self.address, to, rows, cols, code
        words[SOURCE_STRIDE : SOURCE_STRIDE + 2] = row, col
        words[DESTINATION_STRIDE : DESTINATION_STRIDE + 2] = to_row, to_col
        return words


class _Pairs(NamedTuple):
    """One half of an adapter that becomes pairs: vectors over the ranks, columns of lora_A or rows of lora_B; strides
    in elements, from vector to vector and from rank to rank."""

    word: int  # LORA_A or LORA_B
    address: int
    dtype: int
    rank: int
    length: int
    strides: tuple[int, int]

    @property
    def nbytes(self) -> int:
        vectors = self.length if self.word == LORA_B else _up(self.length, FACTORS)
        return 2 * 2 * _up(self.rank, RANKS) * vectors + 4 * FACTOR_WORDS * ceil(self.length, FACTORS)

    def job(self, to: int) -> list[int]:
        """Return the segment that makes them at an address."""
        words = [0] * WORDS
        words[SOURCE], words[DESTINATION], words[ROWS], words[COLS] = self.address, to, self.length, self.rank
        words[SOURCE_STRIDE : SOURCE_STRIDE + 2] = self.strides
        words[DTYPES], words[KEY] = self.dtype | self.dtype << 8, int(self.word == LORA_B)
        return words


def repack(table: np.ndarray, device: torch.device, kernels: Sequence[Kernel[Any]]) -> Repacked:
    """Lay out what the kernels cannot read where it lies.

    Args:
        table: packed segments.
        kernels: that the table is assigned to.
    """
    dtype = products(table)
    pairs = dtype == PAIRS
    moved = np.any([kernel.could_serve(table, device) for kernel in kernels], axis=0) & _small(table) & ~pairs
    halves: list[tuple[int, int, _Half | _Pairs]] = []
    for word in HALVES:
        stays = reads(table, word)
        halves += [(int(i), word, _half(table[i], word, int(dtype[i]))) for i in np.flatnonzero(moved & ~stays)]
        halves += [(int(i), word, _pairs(table[i], word)) for i in np.flatnonzero(pairs)]
    places: dict[_Half | _Pairs, int] = {}  # pieces of one weight share a half
    size = 0
    for _, _, half in halves:
        if half not in places:
            places[half] = size
            size += _up(half.nbytes, ALIGNED)
    memory = torch.zeros(size + ALIGNED if size else 0, dtype=torch.uint8, device=device if size else "cpu")
    made, begin = table.copy(), _up(memory.data_ptr(), ALIGNED)
    for i, word, half in halves:
        to = begin + places[half]
        if isinstance(half, _Pairs):
            made[i, PARTS_A if word == LORA_A else PARTS_B] = to
            continue
        stride, shift = HALVES[word]
        made[i, word] = to
        made[i, stride : stride + 2] = half.pitch, 1
        made[i, DTYPES] += (half.dtype - half.source_dtype) << shift
        if half.dtype != FP32:
            made[i, RANK] = _up(half.rank, RANKS)
    jobs = [(half, half.job(begin + offset)) for half, offset in places.items()]
    splits, copies = ([job for half, job in jobs if isinstance(half, kind)] for kind in (_Pairs, _Half))
    return Repacked(made, _table(splits), _table(copies), memory)


def _pairs(words: np.ndarray, word: int) -> _Pairs:
    """Return lora_A or lora_B of a segment."""
    dtype, length, (of_rank, of_vector) = _matrix(words, word)
    return _Pairs(word, int(words[word]), dtype, int(words[RANK]), length, (of_vector, of_rank))


def _half(words: np.ndarray, word: int, dtype: int) -> _Half:
    """Return lora_A or lora_B of a segment, as it is and as it will be in this dtype."""
    source_dtype, length, strides = _matrix(words, word)
    rank, vector = int(words[RANK]), VECTOR // FLOATS[dtype].itemsize
    to = (_up(length, vector), 1) if word == LORA_A else (1, _up(rank, vector))
    return _Half(int(words[word]), rank, length, source_dtype, strides, dtype, to)


def _matrix(words: np.ndarray, word: int) -> tuple[int, int, tuple[int, int]]:
    """Return of lora_A or lora_B the dtype, the columns or rows, and the strides from rank to rank and along these."""
    stride, shift = HALVES[word]
    first, second = map(int, words[stride : stride + 2])
    dtype = int(words[DTYPES]) >> shift & 0xFF
    return (dtype, int(words[COLS]), (first, second)) if word == LORA_A else (dtype, int(words[ROWS]), (second, first))


def _small(table: np.ndarray) -> np.ndarray:
    rows, cols, rank = (table[:, word].astype(float) for word in (ROWS, COLS, RANK))
    return np.maximum(rank, RANKS) * (rows + cols) * WORTH <= rows * cols


def _table(rows: list[list[int]]) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(len(rows), WORDS)


def _up(x: int, multiple: int) -> int:
    return ceil(x, multiple) * multiple
