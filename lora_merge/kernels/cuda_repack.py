"""Adapters laid out as the CUDA kernels read them, in front of a merge: bytes of the adapter, not of the weights.

Float32 adapters (and those whose halves have two dtypes) of 16-bit weights become pairs of fp16 for either kernel, as
`csrc/parts.h` says. The kernel for compute capability 9 brings 16-bit adapters by tensor maps, which ask for rows of
whole 16-byte vectors: lora_B `[rows, 1]` of a rank-1 adapter, or both halves of rank 12, have none, and are copied with
room between the rows. Ranks that are added are zeros, so the bits stay the same.
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
from .layout import PAIRS, WORDS
from .segments import (
    COLS,
    DESTINATION,
    DESTINATION_STRIDE,
    DTYPES,
    KEY,
    LORA_A,
    LORA_A_STRIDE,
    LORA_B,
    LORA_B_STRIDE,
    PARTS_A,
    PARTS_B,
    RANK,
    RAW,
    ROWS,
    SOURCE,
    SOURCE_STRIDE,
)

WORTH = 16
"""A 16-bit adapter is copied where it is less than one part in so many of the weight."""
VECTOR = 8
"""Elements of 16 bits that tensor maps align."""
FACTORS = 64
"""Columns of lora_A, and factors of either half, are filled up to a multiple of so many: csrc/parts.h."""
FACTOR_WORDS = FACTORS + 4
"""Of so many factors, with what they have in common."""
ALIGNED = 256
"""Bytes at a multiple of which each half begins."""


class Repacked(NamedTuple):
    """A table whose adapters lie well.

    Attributes:
        table: segments as before, but for where their adapters lie, and for ranks of zeros.
        splits: halves of adapters that become pairs, a segment each (`launch_parts` in csrc/cuda/launch.h).
        copies: segments of rank 0 that copy halves.
        memory: where both go; zeros where nothing does. Kept as long as the table is used.

    Splits and copies run before each merge.
    """

    table: np.ndarray
    splits: np.ndarray
    copies: np.ndarray
    memory: Tensor


class _Half(NamedTuple):
    """One half of an adapter, as a matrix of a row for each rank; strides in elements."""

    word: int  # LORA_A or LORA_B
    address: int
    dtype: int
    rank: int
    length: int  # columns of lora_A, rows of lora_B
    row: int
    col: int
    pairs: bool

    @property
    def pitch(self) -> int:
        """Elements of 16 bits from one rank of lora_A to the next, or from one row of lora_B."""
        if self.word == LORA_B:
            return _up(self.rank, RANKS)
        return _up(self.length, FACTORS if self.pairs else VECTOR)

    @property
    def nbytes(self) -> int:
        plane = 2 * self.pitch * (self.length if self.word == LORA_B else _up(self.rank, RANKS))
        return 2 * plane + 4 * FACTOR_WORDS * ceil(self.length, FACTORS) if self.pairs else plane

    def split(self, to: int) -> list[int]:
        """The segment that makes pairs of it at an address."""
        words = [0] * WORDS
        words[SOURCE], words[DESTINATION], words[ROWS], words[COLS] = self.address, to, self.length, self.rank
        words[SOURCE_STRIDE : SOURCE_STRIDE + 2] = self.col, self.row
        words[DTYPES], words[KEY] = self.dtype | self.dtype << 8, int(self.word == LORA_B)
        return words

    def copy(self, to: int) -> list[int]:
        """The segment that copies it to an address: runs of bytes where columns lie together on both sides, several
        ranks as one number where they do, else element by element."""
        rows, cols, row, col, unit = self.rank, self.length, self.row, self.col, 1
        to_row, to_col = (self.pitch, 1) if self.word == LORA_A else (1, self.pitch)
        if col == to_col == 1:
            cols, row, to_row, code = cols * 2, row * 2, to_row * 2, RAW[1]
        else:
            if row == to_row == 1 and self.address % 2 == 0:
                unit = math.gcd(rows, col, to_col, self.address // 2, 4)
            rows, col, to_col, code = rows // unit, col // unit, to_col // unit, RAW[unit * 2]
        words = [0] * WORDS
        words[SOURCE], words[DESTINATION], words[ROWS], words[COLS] = self.address, to, rows, cols
        words[SOURCE_STRIDE : SOURCE_STRIDE + 2] = row, col
        words[DESTINATION_STRIDE : DESTINATION_STRIDE + 2] = to_row, to_col
        words[DTYPES] = code | code << 8
        return words


def repack(table: np.ndarray, device: torch.device, beside: int = 0) -> Repacked:
    """Lay out what the kernels cannot read where it lies.

    Args:
        table: packed segments.
        device: of the tensors.
        beside: as of `cuda_hopper.serves`.
    """
    pairs = products(table) == PAIRS
    padded = hopper.could_serve(table, device, beside) & _small(table) & ~pairs
    halves: list[tuple[int, _Half]] = []
    for word, reads in ((LORA_A, hopper.reads_lora_A), (LORA_B, hopper.reads_lora_B)):
        moved = pairs | padded & ~reads(table)
        halves += [(int(i), _half(table[i], word, bool(pairs[i]))) for i in np.flatnonzero(moved)]
    places: dict[_Half, int] = {}  # pieces of one weight share a half
    size = 0
    for _, half in halves:
        if half not in places:
            places[half] = size
            size += _up(half.nbytes, ALIGNED)
    memory = torch.zeros(size + ALIGNED if size else 0, dtype=torch.uint8, device=device if size else "cpu")
    made, begin = table.copy(), _up(memory.data_ptr(), ALIGNED)
    for i, half in halves:
        to = begin + places[half]
        if half.pairs:
            made[i, PARTS_A if half.word == LORA_A else PARTS_B] = to
            continue
        stride = LORA_A_STRIDE if half.word == LORA_A else LORA_B_STRIDE
        made[i, half.word] = to
        made[i, stride : stride + 2] = half.pitch, 1
        made[i, RANK] = _up(half.rank, RANKS)
    splits = [half.split(begin + offset) for half, offset in places.items() if half.pairs]
    copies = [half.copy(begin + offset) for half, offset in places.items() if not half.pairs]
    return Repacked(made, _table(splits), _table(copies), memory)


def _half(words: np.ndarray, word: int, pairs: bool) -> _Half:
    """lora_A or lora_B of a segment."""
    if word == LORA_A:
        row, col = map(int, words[LORA_A_STRIDE : LORA_A_STRIDE + 2])
        length, shift = int(words[COLS]), 16
    else:
        col, row = map(int, words[LORA_B_STRIDE : LORA_B_STRIDE + 2])
        length, shift = int(words[ROWS]), 24
    dtype = int(words[DTYPES]) >> shift & 0xFF
    return _Half(word, int(words[word]), dtype, int(words[RANK]), length, row, col, pairs)


def _small(table: np.ndarray) -> np.ndarray:
    rows, cols, rank = (table[:, word].astype(float) for word in (ROWS, COLS, RANK))
    return np.maximum(rank, RANKS) * (rows + cols) * WORTH <= rows * cols


def _table(rows: list[list[int]]) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(len(rows), WORDS)


def _up(x: int, multiple: int) -> int:
    return ceil(x, multiple) * multiple
