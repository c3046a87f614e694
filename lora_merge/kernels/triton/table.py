"""Tables of segments for the Triton kernels: sorted by launch, cut into tiles, put on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..segments import (
    ABSMAX_CODE,
    BLOCK,
    COLS,
    DESTINATION,
    DESTINATION_STRIDE,
    DTYPES,
    FORMATS,
    LORA_A,
    LORA_A_STRIDE,
    LORA_B,
    LORA_B_STRIDE,
    RANK,
    RAW,
    ROW_SCALE,
    ROWS,
    SOURCE,
    SOURCE_STRIDE,
    UNIT_BEGIN,
    UNITS_ACROSS,
)
from ..streams import Streams


class Shape(NamedTuple):
    """How a kernel is launched; no bit of a result depends on it.

    Args:
        rows, cols: of a tile. 64 rows and a multiple of four warps are what Hopper's matrix unit takes; the codes of
            tracked merges want columns in multiples of 64.
        warps: of a program.
        programs: on a multiprocessor at most, each of which goes from tile to tile.
        registers: of a thread at most; 0: as many as the compiler wants.
        ahead: of the next tile every so many bytes are asked for early; 0: nothing is.
        stages: in which adapters are loaded ahead, where a program goes through several of their blocks.
    """

    rows: int
    cols: int
    warps: int
    programs: int
    registers: int
    ahead: int
    stages: int

    @property
    def compiled(self) -> dict[str, Any]:
        """Constants. Nothing is contracted but what says `fma`: two kernels that must agree to the bit do."""
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False}
        options |= {"maxnreg": self.registers} if self.registers else {}
        return {"TILE_M": self.rows, "TILE_N": self.cols, "AHEAD": self.ahead, **options}

    def grid(self, units: int, device: torch.device) -> tuple[int]:
        """Return how many programs run."""
        cuda = device.type == "cuda"
        processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1
        return (min(units, self.programs * processors),)


ONE_A_TILE = 2**20
"""Programs: as many as there are tiles."""
MERGE = Shape(64, 128, 4, 3, 168, 128, 2)
"""Of adapters of 16 bits and up to `RANK_BLOCK` ranks, as measured on an H200 (docs/performance_merges.md)."""
MERGE_LONG = Shape(64, 128, 4, ONE_A_TILE, 0, 0, 2)
"""Of all others: a program that goes from tile to tile has no registers for more."""
TRACKED = Shape(64, 64, 4, 4, 128, 64, 1)
TRACKED_WIDE = Shape(64, 64, 4, 3, 168, 128, 1)
"""Of the same tile, as all tiles of a journal are. Wide adapters are split into parts, which takes registers."""
NORMS = Shape(64, 128, 4, ONE_A_TILE, 0, 0, 2)
COPY = Shape(1, 16384, 4, ONE_A_TILE, 0, 0, 2)
"""Of bytes: one row, as a run has."""
RANK_BLOCK = 32
"""Ranks that are multiplied at a time. Bits of results depend on it."""


class Variant(NamedTuple):
    """One launch: tiles of the segments that one compiled kernel fits."""

    table: Tensor
    unit_segment: Tensor
    options: dict[str, Any]
    grid: tuple[int]


def groups(table: np.ndarray) -> list[tuple[np.ndarray, dict[str, Any]]]:
    """Return parts of a table that one compiled kernel runs, and the constants it is compiled for."""
    import triton.language as tl

    dtypes = (tl.bfloat16, tl.float16, tl.float32, tl.int8, tl.int16, tl.int32, tl.int64)
    one_row = table[:, ROWS] == 1
    table[one_row, SOURCE_STRIDE] = table[one_row, DESTINATION_STRIDE] = 0  # unused: then they are aligned
    blocks = _ceil(table[:, RANK], RANK_BLOCK)
    align, lora_align = _alignment(table)
    scaled, nested = table[:, ROW_SCALE] != 0, table[:, ABSMAX_CODE] != 0
    words = np.stack([table[:, DTYPES], blocks, align, lora_align, scaled, nested, _block_size(table)])
    keys, group_of = np.unique(words, axis=1, return_inverse=True)
    found = []
    for group, (codes, rank_blocks, a, b, scaled, nested, block) in enumerate(keys.T.tolist()):
        labels = ("SOURCE_T", "DESTINATION_T", "LORA_A_T", "LORA_B_T")
        constants = {
            **{label: dtypes[codes >> 8 * i & 0xFF] for i, label in enumerate(labels)},
            "ALIGN": a,
            "LORA_ALIGN": b,
            "RANK_BLOCKS": rank_blocks,
            "BLOCK_K": RANK_BLOCK,
            "SCALED": bool(scaled),
            "FORMAT": codes >> 32,
            "NESTED": bool(nested),
            "BLOCK_SIZE": block,
        }
        found.append((table[group_of.reshape(-1) == group], constants))
    return found


def _block_size(table: np.ndarray) -> np.ndarray:
    """Return `BLOCK_SIZE` of each segment: see `weights` in `merge_kernels.py`."""
    block = table[:, BLOCK]
    by_row = (table[:, SOURCE_STRIDE] == block) & (table[:, SOURCE_STRIDE + 1] == 1) & (table[:, ROWS] > 1)
    size = np.where(by_row, -1, np.where(block & (block - 1) == 0, block, 0))
    return np.where(table[:, DTYPES] >> 32 == FORMATS["Plain"], 0, size)


def _alignment(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what each segment's row strides and columns are multiples of where 16-byte accesses fit; 1 where not.

    The first array speaks of source and destination, the second of the adapters.
    """

    def fits(address: int, stride: int) -> np.ndarray:
        return (table[:, address] % 16 == 0) & (table[:, stride + 1] == 1) & (table[:, stride] % elements == 0)

    raw = (table[:, DTYPES] & 0xFF) >= min(RAW.values())
    elements = np.where(raw, 16, 8)
    cols = table[:, COLS] % elements == 0
    packed = table[:, DTYPES] >> 32 != FORMATS["Plain"]
    weights = cols & (packed | fits(SOURCE, SOURCE_STRIDE)) & fits(DESTINATION, DESTINATION_STRIDE)
    ranks = (table[:, RANK] > 0) & (table[:, RANK] % elements == 0)
    adapters = cols & ranks & fits(LORA_A, LORA_A_STRIDE) & fits(LORA_B, LORA_B_STRIDE)
    return np.where(weights, elements, 1), np.where(adapters, elements, 1)


def merge_variant(table: np.ndarray, constants: dict[str, Any], device: torch.device) -> Variant:
    """Return a launch over all tiles of a table, those of a row of tiles one after the other."""
    bytewise = (int(table[0, DTYPES]) & 0xFF) == RAW[1]
    long = _wide(constants) or constants["RANK_BLOCKS"] > 1 or constants["FORMAT"]
    merges = MERGE_LONG if long else MERGE
    return _tiled(table, constants, COPY if bytewise else merges, device)


def tracked_variant(table: np.ndarray, constants: dict[str, Any], device: torch.device) -> Variant:
    """Return the same for a tracked merge."""
    constants = {name: value for name, value in constants.items() if name not in ("FORMAT", "NESTED", "BLOCK_SIZE")}
    return _tiled(table, constants, TRACKED_WIDE if _wide(constants) else TRACKED, device)


def _wide(constants: dict[str, Any]) -> bool:
    a, b = constants["LORA_A_T"], constants["LORA_B_T"]
    return bool(constants["RANK_BLOCKS"] and (a != b or a.primitive_bitwidth == 32))


def _tiled(table: np.ndarray, constants: dict[str, Any], shape: Shape, device: torch.device) -> Variant:
    table[:, UNITS_ACROSS] = _ceil(table[:, COLS], shape.cols)
    units = table[:, UNITS_ACROSS] * _ceil(table[:, ROWS], shape.rows)
    return _place(table, units, constants, shape, device)


def norm_variant(table: np.ndarray, constants: dict[str, Any], device: torch.device) -> Variant:
    """Return a launch in which a program takes a block of rows."""
    options = {name: value for name, value in constants.items() if name not in ("DESTINATION_T", "SCALED")}
    variant = _place(table, _ceil(table[:, ROWS], NORMS.rows), options, NORMS, device)
    del variant.options["AHEAD"]
    return variant


def _place(
    table: np.ndarray, units: np.ndarray, constants: dict[str, Any], shape: Shape, device: torch.device
) -> Variant:
    table[:, UNIT_BEGIN] = np.cumsum(units) - units
    options, grid = constants | shape.compiled, shape.grid(int(units.sum()), device)
    if not _capturing(device):
        unit_segment = torch.from_numpy(np.repeat(np.arange(len(table), dtype=np.int32), units))
        return Variant(torch.from_numpy(table).to(device), unit_segment.to(device), options, grid)
    # A copy captured in a CUDA graph would read memory of the host that is gone at the replay. Arguments stay.
    words = torch.empty(table.shape, dtype=torch.int64, device=device)
    for cell, word in zip(words.view(-1), table.reshape(-1).tolist(), strict=True):
        cell.fill_(word)
    unit_segment = torch.zeros(int(units.sum()), dtype=torch.int32, device=device)
    for segment, begin in enumerate(table[:, UNIT_BEGIN].tolist()):
        unit_segment[begin:].fill_(segment)
    return Variant(words, unit_segment, options, grid)


def streams_of(variants: Sequence[Variant], device: torch.device) -> Streams:
    return Streams(device, [t for v in variants for t in (v.table, v.unit_segment)])


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _ceil(x: np.ndarray, y: int) -> np.ndarray:
    return -(-x // y)
