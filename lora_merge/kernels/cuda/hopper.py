"""Launches of the CUDA kernel for compute capability 9 (`csrc/cuda/sm90/merge.cuh`): which segments it serves, and how.

Its results are those of the kernel for any GPU bit for bit, so a segment goes wherever it is faster: this one reaches
the speed of a copy at ranks and adapter dtypes where the other one is bound by its products. It moves tiles by tensor
maps, which ask for rows of whole 16-byte vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..bindings import native, operators
from ..bindings.layout import CHUNK, HOPPER_COLS, MAX_RANK, PAIRS
from ..segments import (
    BF16,
    COLS,
    DESTINATION,
    DESTINATION_STRIDE,
    DTYPES,
    FORMATS,
    FP16,
    FP32,
    LORA_A,
    LORA_A_STRIDE,
    LORA_B,
    LORA_B_STRIDE,
    PARTS_A,
    PITCH,
    RANK,
    ROWS,
    SOURCE,
    SOURCE_STRIDE,
)
from .kernel import Kernel, Units, Work
from .table import memory, planes, products

VECTOR = 16
"""Bytes of what tensor maps align, and write at once."""
RANKS = 8
"""Of a 16-bit adapter: a multiple of so many."""
HALVES = {LORA_A: (LORA_A_STRIDE, 16), LORA_B: (LORA_B_STRIDE, 24)}
"""Of each half of an adapter, by the word of its address: that of its strides, and where its dtype is in `DTYPES`."""


class Tiles(NamedTuple):
    """How a block works: `HopperLaunch` in csrc/cuda/launch.h."""

    strip_cols: int
    held: int
    stages: int


class Hopper(Kernel[Tiles]):
    """The kernel for compute capability 9."""

    name = "kernel for compute capability 9 (tensor maps, wgmma)"
    operator = operators.launch_hopper
    blocks = 1
    extra_box = 0
    """Bytes of shared memory that a launch wants for each box of a tile: the epilogue's `kExtraBox`."""
    result_bytes = 2
    """Bytes of an element of the result."""
    narrowest = 0
    """Columns of the least strip that a launch takes."""
    ahead = False
    """Whether lora_A of the next unit is loaded as early as there is room for it, and float32 lora_A split ahead
    (csrc/cuda/sm90/merge.cuh: `kAhead`). Else blocks that wait for it stay side by side, and share reads."""

    def serves(self, table: np.ndarray, device: torch.device) -> np.ndarray:
        there = np.where(products(table) == PAIRS, table[:, PARTS_A] != 0, reads(table, LORA_A) & reads(table, LORA_B))
        return self.could_serve(table, device) & there.astype(bool)

    def could_serve(self, table: np.ndarray, device: torch.device) -> np.ndarray:
        dtype, rank, adapters = table[:, DTYPES] & 0xFF, table[:, RANK], products(table)
        fits = (dtype == table[:, DTYPES] >> 8 & 0xFF) & ((dtype == BF16) | (dtype == FP16)) & (rank > 0)
        fits &= (table[:, COLS] <= HOPPER_COLS) & (table[:, DTYPES] >> 32 == FORMATS["Plain"])
        for address, stride, size in ((SOURCE, SOURCE_STRIDE, 2), (DESTINATION, DESTINATION_STRIDE, self.result_bytes)):
            fits &= _rows_of_vectors(table, address, stride, size, table[:, ROWS])
        # Tensor maps write whole vectors: up to the end of the last one, zeros follow a row's last column. Counted.
        fits &= table[:, COLS] * self.result_bytes % VECTOR == 0
        in_parts = (adapters == FP32) | (adapters == PAIRS)
        fits &= ~(in_parts & _turned(table))  # parts of float32 adapters are summed in one order here
        if not _available(device):
            return fits & False
        extra = self.extra_box, memory(device).per_block, self.ahead
        most = np.array([_most_rank(planes(code), *extra, self.narrowest) for code in range(PAIRS + 1)])
        return fits & (rank <= most[adapters])

    def kinds(self, table: np.ndarray) -> Sequence[np.ndarray]:
        return table[:, DTYPES] & 0xFF, products(table)

    def shape(self, work: Work, like: Tiles | None = None) -> Tiles | None:
        if work.max_rank > MAX_RANK:
            return None
        room = memory(work.device).per_block
        return _tiles(work.max_rank, planes(work.kind[-1]), self.extra_box, room, self.ahead)

    def units(self, work: Work, shape: Tiles) -> Units:
        """Cut units of few rows, so that blocks that share rows stay side by side; more where there is much of lora_A
        to load, or where the next unit is mostly of another segment: its tensor maps take time, too. As measured."""
        chunks = -(-work.max_rank // CHUNK) * planes(work.kind[-1])
        short = chunks <= 2 and self.are_large(work)
        return Units(shape.strip_cols, 512 if chunks > 4 else 128 if short else 256)

    def are_large(self, work: Work) -> bool:
        """Return True if most elements lie in segments that have several units of 128 rows for each block."""
        elements = (work.merges[:, ROWS] * work.merges[:, COLS]).astype(float)
        return bool((elements**2).sum() >= elements.sum() * 128 * 256 * 8 * work.processors)

    def maps(self, work: Work, table: np.ndarray, device: torch.device) -> Tensor:
        return operators.tensor_maps(torch.from_numpy(table), work.kind[-1]).to(device)


def reads(table: np.ndarray, half: int) -> np.ndarray:
    """Return which segments without pairs have a half of an adapter that this kernel reads where it lies: of the
    products' dtype, rows of whole vectors. Ranks of 16 bits come in eights: their map takes them apart.

    Args:
        half: LORA_A or LORA_B.
    """
    stride, shift, dtype = *HALVES[half], products(table)
    fits = (table[:, DTYPES] >> shift & 0xFF == dtype) & ((dtype == FP32) | (table[:, RANK] % RANKS == 0))
    rows = table[:, RANK if half == LORA_A else ROWS]
    return fits & _rows_of_vectors(table, half, stride, np.where(dtype == FP32, 4, 2), rows)


def _turned(table: np.ndarray) -> np.ndarray:
    """Do `turned` of csrc/segments.h."""
    row, col = table[:, PITCH], table[:, PITCH + 1]
    return (row < col) | ((row == col) & (table[:, ROWS] < table[:, COLS]))


def _rows_of_vectors(
    table: np.ndarray, address: int, stride: int, size: np.ndarray | int, rows: np.ndarray
) -> np.ndarray:
    """Return which segments have rows of adjacent elements that start at whole 16-byte vectors."""
    row, col = table[:, stride], table[:, stride + 1]
    starts = (table[:, address] % 16 == 0) & ((row * size % 16 == 0) & (row > 0) | (rows == 1))
    return starts & (col == 1)


@cache
def _tiles(max_rank: int, planes: int, extra: int, per_block: int, ahead: bool) -> Tiles | None:
    """Return the best tiles (csrc/cuda/shapes.h, where launches check them); None if the rank leaves no room."""
    numbers = native.compiled.hopper_tiles(max_rank, planes, extra, per_block, ahead)
    return Tiles(*numbers) if numbers else None


@cache
def _most_rank(planes: int, extra: int, per_block: int, ahead: bool, narrowest: int) -> int:
    def fits(tiles: Tiles | None) -> bool:
        return tiles is not None and tiles.strip_cols >= narrowest

    ranks = range(CHUNK, MAX_RANK + 1, CHUNK)
    return max((r for r in ranks if fits(_tiles(r, planes, extra, per_block, ahead))), default=0)


def _available(device: torch.device) -> bool:
    """Return True if the device has compute capability 9.0 and the extension code for sm_90a."""
    return torch.cuda.get_device_capability(device) == (9, 0) and "90a" in native.architectures()
