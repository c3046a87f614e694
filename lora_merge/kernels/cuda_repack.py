"""Copies adapters that the kernel for compute capability 9 cannot read in place into a layout that it can read.

Tensor maps ask for rows of whole 16-byte vectors, so lora_B `[rows, 1]` of a rank-1 adapter, or lora_A and lora_B of
rank 12, have none. In front of such a merge they are copied to memory of the plan, with room between the rows: bytes of
the adapter, not of the weights, and the merge then runs at the speed of a copy. Its bits stay the same: ranks that are
added are zeros.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import cuda_hopper as hopper
from .cuda_hopper import RANKS
from .cuda_table import ceil, products
from .layout import WORDS
from .segments import (
    COLS,
    DESTINATION,
    DESTINATION_STRIDE,
    DTYPES,
    FLOATS,
    FP32,
    LORA_A,
    LORA_A_STRIDE,
    LORA_B,
    LORA_B_STRIDE,
    RANK,
    RAW,
    ROWS,
    SOURCE,
    SOURCE_STRIDE,
)

WORTH = 16
"""An adapter is copied where it is less than one part in so many of the weight."""
VECTOR = 16
"""Bytes of what tensor maps align."""


class Repacked(NamedTuple):
    """A table whose adapters have a layout that the kernel can read.

    Attributes:
        table: segments as before, but for where lora_A and lora_B lie, their strides and dtypes, and ranks of zeros.
        copies: segments that bring them there, of rank 0; run before each merge. Empty if there are none.
        memory: where that is; zeros where nothing is copied. Kept as long as the table is used.
    """

    table: np.ndarray
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

    def copy(self, to: int) -> list[int]:
        """The segment that lays it out at an address: runs of bytes where columns lie together on both sides, several
        ranks as one number where they do, else element by element."""
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


def repack(table: np.ndarray, device: torch.device, beside: int = 0) -> Repacked:
    """Move the adapters of segments that the kernel would serve, were it not for how these lie.

    Args:
        beside: as of `cuda_hopper.serves`.
    """
    dtype = products(table)
    moved = hopper.could_serve(table, device, beside) & _small(table)
    halves: list[tuple[int, int, _Half]] = []
    for word, stays in ((LORA_A, hopper.reads_lora_A(table)), (LORA_B, hopper.reads_lora_B(table))):
        halves += [(int(i), word, _half(table[i], word, int(dtype[i]))) for i in np.flatnonzero(moved & ~stays)]
    places: dict[_Half, int] = {}  # pieces of one weight share a half
    size = 0
    for _, _, half in halves:
        if half not in places:
            places[half] = size
            size += _up(half.nbytes, VECTOR)
    memory = torch.zeros(size, dtype=torch.uint8, device=device if size else "cpu")
    made, begin = table.copy(), memory.data_ptr()
    for i, word, half in halves:
        stride, shift = (LORA_A_STRIDE, 16) if word == LORA_A else (LORA_B_STRIDE, 24)
        made[i, word] = begin + places[half]
        made[i, stride : stride + 2] = half.pitch, 1
        made[i, DTYPES] += (half.dtype - half.source_dtype) << shift
        if half.dtype != FP32:
            made[i, RANK] = _up(half.rank, RANKS)
    copies = [half.copy(begin + offset) for half, offset in places.items()]
    return Repacked(made, np.array(copies, dtype=np.int64).reshape(len(copies), WORDS), memory)


def _half(words: np.ndarray, word: int, dtype: int) -> _Half:
    """lora_A or lora_B of a segment, as it is and as it will be in this dtype."""
    rank, size = int(words[RANK]), FLOATS[dtype].itemsize
    if word == LORA_A:
        row, col = map(int, words[LORA_A_STRIDE : LORA_A_STRIDE + 2])
        length, shift, to = int(words[COLS]), 16, (_up(int(words[COLS]), VECTOR // size), 1)
    else:
        col, row = map(int, words[LORA_B_STRIDE : LORA_B_STRIDE + 2])
        length, shift, to = int(words[ROWS]), 24, (1, _up(rank, VECTOR // size))
    return _Half(int(words[word]), rank, length, int(words[DTYPES]) >> shift & 0xFF, (row, col), dtype, to)


def _small(table: np.ndarray) -> np.ndarray:
    rows, cols, rank = (table[:, word].astype(float) for word in (ROWS, COLS, RANK))
    return np.maximum(rank, RANKS) * (rows + cols) * WORTH <= rows * cols


def _up(x: int, multiple: int) -> int:
    return ceil(x, multiple) * multiple
