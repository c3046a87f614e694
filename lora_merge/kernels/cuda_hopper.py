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

from ..segments import (
    BF16,
    DESTINATION,
    DESTINATION_STRIDE,
    DTYPES,
    FP16,
    FP32,
    LORA_B,
    LORA_B_STRIDE,
    RANK,
    ROWS,
    SOURCE,
    SOURCE_STRIDE,
)

# The same numbers as in csrc/cuda.
CHUNK, TILE_ROWS, BOX_COLS, BOX_BYTES, MAX_STAGES = 32, 64, 64, 8192, 8
RESERVED = 5120
"""Shared memory for barriers and segments, and what is lost in front of the first stage."""


class HopperVariant(NamedTuple):
    """One launch: the arguments of `launch_hopper` that stay the same from run to run."""

    table: Tensor
    unit_segment: Tensor
    maps: Tensor
    counter: Tensor
    device: int
    dtype: int
    wide: bool
    n_units: int
    n_raw_units: int
    rows_per_unit: int
    strip_cols: int
    stages: int
    max_rank: int

    def __call__(self, stochastic: bool, seed: int) -> None:
        torch.ops.lora_merge_native.launch_hopper(*self, stochastic, seed)


def serves(table: np.ndarray, wide: np.ndarray, device: torch.device, beside: int = 0) -> np.ndarray:
    """Which segments of a packed table go to this kernel, bool `[segments]`. `beside`: bytes that a launch wants in
    shared memory for each box of a tile."""
    dtype, rank = table[:, DTYPES] & 0xFF, table[:, RANK]
    fits = (dtype == table[:, DTYPES] >> 8 & 0xFF) & ((dtype == BF16) | (dtype == FP16)) & (rank > 0)
    for address, stride in ((SOURCE, SOURCE_STRIDE), (DESTINATION, DESTINATION_STRIDE)):
        fits &= _rows_of_vectors(table, address, stride, 2)
    fits &= (table[:, DTYPES] >> 24 & 0xFF) == np.where(wide, FP32, BF16)
    fits &= _rows_of_vectors(table, LORA_B, LORA_B_STRIDE, np.where(wide, 4, 2))
    if not _available(device):
        return fits & False
    return fits & (rank <= np.where(wide, _most_rank(True, device, beside), _most_rank(False, device, beside)))


def shape(max_rank: int, wide: bool, device: torch.device, beside: int = 0) -> tuple[int, int]:
    """(columns of a strip, stages) of a launch that `serves` chose."""
    found = _shape(max_rank, wide, device, beside)
    assert found is not None
    return found


def unit_rows(max_rank: int, wide: bool) -> int:
    """Rows of a unit at the most: few, so that blocks stay side by side in memory, unless lora_A takes long to bring
    (measured: 256, 512, 1024 and 2048 are best for one, two, three and from four planes of a chunk on)."""
    planes = -(-max_rank // CHUNK) * (3 if wide else 1)
    return min(2048, max(256, 128 * planes**2 // 512 * 512))


def maps(table: np.ndarray, wide: bool, device: torch.device) -> Tensor:
    """The tensor maps of a cut table, uint8 `[segments, 384]`, on the device or, of a small table, on the CPU."""
    return torch.ops.lora_merge_native.tensor_maps(torch.from_numpy(table), wide).to(device)


def _rows_of_vectors(table: np.ndarray, address: int, stride: int, size: np.ndarray | int) -> np.ndarray:
    """Whether rows are runs of elements that start at whole 16-byte vectors."""
    row, col = table[:, stride], table[:, stride + 1]
    starts = (table[:, address] % 16 == 0) & ((row * size % 16 == 0) & (row > 0) | (table[:, ROWS] == 1))
    return starts & (col == 1)


def _shape(max_rank: int, wide: bool, device: torch.device, beside: int) -> tuple[int, int] | None:
    """Wide strips read lora_B less often; stages hide the latency of memory. None if the rank leaves no room."""
    properties = torch.cuda.get_device_properties(device)
    room: int = properties.shared_memory_per_block_optin - RESERVED  # type: ignore[attr-defined]
    chunks = -(-max_rank // CHUNK)
    for strip in (256, 128):
        stage = strip // BOX_COLS * (BOX_BYTES + beside) + chunks * TILE_ROWS * CHUNK * (4 if wide else 2)
        stage = -(-stage // 1024) * 1024
        stages = (room - chunks * CHUNK * strip * (6 if wide else 2)) // stage
        if stages >= 2:
            return strip, min(stages, MAX_STAGES)
    return None


@cache
def _most_rank(wide: bool, device: torch.device, beside: int) -> int:
    rank = 0
    while _shape(rank + CHUNK, wide, device, beside) is not None:
        rank += CHUNK
    return rank


@cache
def _available(device: torch.device) -> bool:
    """Whether the device is of this kind, and the extension was compiled for it (for sm_90a, not only for sm_80)."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    with torch.cuda.device(device):
        return bool(torch.ops.lora_merge_native.has_hopper())
