"""Launches of the CUDA kernel for compute capability 9 (`csrc/cuda/hopper.cuh`): which segments it serves, and how.

Its results are those of the kernel for any GPU bit for bit, so a segment goes wherever it is faster: this one reaches
the speed of a copy at ranks and adapter dtypes where the other one is bound by its products. It moves tiles by tensor
maps, which ask for rows of whole 16-byte vectors.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import native, operators
from .cuda_table import memory, planes, products
from .layout import CHUNK, HOPPER_COLS, MAX_RANK, PAIRS
from .segments import (
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

RANKS = 8
"""Of a 16-bit adapter: a multiple of so many."""


class HopperVariant(NamedTuple):
    """One launch: the arguments of `launch_hopper` that stay the same from run to run."""

    table: Tensor
    unit_segment: Tensor
    maps: Tensor
    counter: Tensor
    device: int
    dtype: int
    adapters: int
    n_units: int
    n_raw_units: int
    rows_per_unit: int
    strip_cols: int
    held: int
    stages: int
    max_rank: int

    def __call__(self, stochastic: bool, seed: int) -> None:
        operators.launch_hopper(*self, stochastic, seed)


def serves(table: np.ndarray, device: torch.device, beside: int = 0) -> np.ndarray:
    """Which segments of a packed table go to this kernel, bool `[segments]`. `beside`: bytes that a launch wants in
    shared memory for each box of a tile."""
    there = np.where(products(table) == PAIRS, table[:, PARTS_A] != 0, reads_lora_A(table) & reads_lora_B(table))
    return could_serve(table, device, beside) & there.astype(bool)


def could_serve(table: np.ndarray, device: torch.device, beside: int = 0) -> np.ndarray:
    """Find the segments that this kernel would serve if their adapters had a layout that it can read."""
    dtype, rank, adapters = table[:, DTYPES] & 0xFF, table[:, RANK], products(table)
    fits = (dtype == table[:, DTYPES] >> 8 & 0xFF) & ((dtype == BF16) | (dtype == FP16)) & (rank > 0)
    fits &= (table[:, COLS] <= HOPPER_COLS) & (table[:, DTYPES] >> 32 == FORMATS["Plain"])
    for address, stride in ((SOURCE, SOURCE_STRIDE), (DESTINATION, DESTINATION_STRIDE)):
        fits &= _rows_of_vectors(table, address, stride, 2, table[:, ROWS])
    in_parts = (adapters == FP32) | (adapters == PAIRS)
    fits &= ~(in_parts & _turned(table))  # parts of float32 adapters are summed in one order here
    if not _available(device):
        return fits & False
    room = memory(device).per_block
    most = {code: _most_rank(planes(code), beside, room) for code in (BF16, FP32, PAIRS)}
    return fits & (rank <= np.select([adapters == FP32, adapters == PAIRS], [most[FP32], most[PAIRS]], most[BF16]))


def reads_lora_A(table: np.ndarray) -> np.ndarray:
    """Of which segments without pairs this kernel can read lora_A where it lies: of the products' dtype, rows of whole
    vectors."""
    return _reads(table, 16) & _rows_of_vectors(table, LORA_A, LORA_A_STRIDE, _size(table), table[:, RANK])


def reads_lora_B(table: np.ndarray) -> np.ndarray:
    """The same of lora_B."""
    return _reads(table, 24) & _rows_of_vectors(table, LORA_B, LORA_B_STRIDE, _size(table), table[:, ROWS])


def _reads(table: np.ndarray, shift: int) -> np.ndarray:
    """Ranks of 16 bits come eight at a time: their map takes them apart."""
    dtype = products(table)
    return (table[:, DTYPES] >> shift & 0xFF == dtype) & ((dtype == FP32) | (table[:, RANK] % RANKS == 0))


def _size(table: np.ndarray) -> np.ndarray:
    return np.where(products(table) == FP32, 4, 2)


class Tiles(NamedTuple):
    """How a block works: `HopperLaunch` in csrc/cuda/launch.h."""

    strip_cols: int
    held: int
    stages: int


def tiles(max_rank: int, adapters: int, device: torch.device, beside: int = 0) -> Tiles:
    """Of a launch that `serves` chose."""
    found = room_for(max_rank, adapters, device, beside)
    assert found is not None, (max_rank, adapters, beside)
    return found


def room_for(max_rank: int, adapters: int, device: torch.device, beside: int = 0) -> Tiles | None:
    """Of a launch with so many ranks, of all its adapters; None where they leave no room."""
    return None if max_rank > MAX_RANK else _tiles(max_rank, planes(adapters), beside, memory(device).per_block)


def unit_rows(max_rank: int, adapters: int, large: bool) -> int:
    """Rows of a unit at the most, as measured: few, so that blocks that share rows stay side by side; more where there
    is much of lora_A to bring, or where the next unit is mostly of another segment: its tensor maps take time, too."""
    chunks = -(-max_rank // CHUNK) * planes(adapters)
    if chunks > 4:
        return 512
    return 128 if large and chunks <= 2 else 256


def are_large(table: np.ndarray, processors: int) -> bool:
    """Whether most elements lie in segments that have several units of 128 rows for each block."""
    elements = (table[:, ROWS] * table[:, COLS]).astype(float)
    return bool((elements**2).sum() >= elements.sum() * 128 * 256 * 8 * processors)


def maps(table: np.ndarray, adapters: int, device: torch.device) -> Tensor:
    """The tensor maps of a cut table, uint8 `[segments, 512]`, on the device or, of a small table, on the CPU."""
    return operators.tensor_maps(torch.from_numpy(table), adapters).to(device)


def _turned(table: np.ndarray) -> np.ndarray:
    """As `turned` in csrc/segments.h."""
    row, col = table[:, PITCH], table[:, PITCH + 1]
    return (row < col) | ((row == col) & (table[:, ROWS] < table[:, COLS]))


def _rows_of_vectors(
    table: np.ndarray, address: int, stride: int, size: np.ndarray | int, rows: np.ndarray
) -> np.ndarray:
    """Whether rows are runs of elements that start at whole 16-byte vectors."""
    row, col = table[:, stride], table[:, stride + 1]
    starts = (table[:, address] % 16 == 0) & ((row * size % 16 == 0) & (row > 0) | (rows == 1))
    return starts & (col == 1)


@cache
def _tiles(max_rank: int, planes: int, beside: int, per_block: int) -> Tiles | None:
    """Chosen where launches check it: csrc/cuda/shapes.h. None if the rank leaves no room."""
    numbers = native.compiled.hopper_tiles(max_rank, planes, beside, per_block)
    return Tiles(*numbers) if numbers else None


@cache
def _most_rank(planes: int, beside: int, per_block: int) -> int:
    ranks = range(CHUNK, MAX_RANK + 1, CHUNK)
    return max((r for r in ranks if _tiles(r, planes, beside, per_block) is not None), default=0)


def _available(device: torch.device) -> bool:
    """Whether the device is of this kind, and the extension was compiled for it (for sm_90a, not only for sm_80)."""
    return torch.cuda.get_device_capability(device) == (9, 0) and "90a" in native.architectures()
