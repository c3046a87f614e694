"""Tables of the compiled CUDA kernels: which shape a launch has, how its segments are cut into units of work, and where
the table lies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from . import native
from .layout import CHUNK, INLINE_SEGMENTS, MAX_RANK, PACKED_SOURCE, PAIRS, RAW_COLS, RAW_COLS_1, RAW_ROWS, WARP_COLS
from .segments import BF16, COLS, DTYPES, FLOATS, FORMATS, FP16, FP32, RANK, ROWS, UNIT_BEGIN, UNITS_ACROSS, Segment

PARTS_RANK = 32
"""Float32 adapters up to this rank are split while they are merged, which hides behind memory; above it pairs save more
than it takes to make them in front of a merge (H200: rank 32 1.05 copies, with pairs 1.21; rank 64 1.77 and 1.53)."""
MAX_UNIT_ROWS = 512
UNITS_DEALT = 1024
"""Units that a small table deals round the blocks; more are handed out by a counter, which takes an allocation, because
blocks do not run at one pace."""
BLOCKS = 2
"""That share a multiprocessor, of the kernel for any GPU."""

Whole = TypeVar("Whole", int, np.ndarray)
Codes = int | np.ndarray


class BlockShape(NamedTuple):
    """How a block of the kernel for any GPU works: `Launch` in csrc/cuda/launch.h."""

    col_warps: int
    stages: int
    staged_B: bool
    pad: int


class Cut(NamedTuple):
    """A table, cut into units of work."""

    host_table: np.ndarray
    table: Tensor
    unit_segment: Tensor
    counter: Tensor
    device: int
    n_units: int
    n_raw_units: int
    rows_per_unit: int


def cut(
    merges: np.ndarray,
    copies: np.ndarray,
    strip: int,
    most: int,
    blocks: int,
    device: torch.device,
    rows: int = 64,
    behind: np.ndarray | None = None,
) -> Cut:
    """Units of `strip` columns and up to `most` rows, a multiple of `rows`, for so many blocks at a time. Segments
    `behind` the others have no units."""
    rows_per_unit = ceil(_rows_per_unit(merges, strip, most, blocks), rows) * rows
    merge_across = ceil(merges[:, COLS], strip)
    copy_across = ceil(copies[:, COLS], np.where(copies[:, ROWS] == 1, RAW_COLS_1, RAW_COLS))
    merge_units = merge_across * ceil(merges[:, ROWS], rows_per_unit)
    copy_units = copy_across * ceil(copies[:, ROWS], RAW_ROWS)
    behind = copies[:0] if behind is None else behind
    table, none = np.concatenate([merges, copies, behind]), np.zeros(len(behind), dtype=np.int64)
    units = np.concatenate([merge_units, copy_units, none])
    table[:, UNIT_BEGIN] = np.cumsum(units) - units
    table[:, UNITS_ACROSS] = np.concatenate([merge_across, copy_across, none])
    counted = len(table) > INLINE_SEGMENTS or units.sum() > UNITS_DEALT
    counter = torch.zeros(2 if counted else 0, dtype=torch.int32, device=device if counted else "cpu")
    return Cut(
        table, *place(table, units, device), counter, index_of(device), int(merge_units.sum()), int(copy_units.sum()),
        rows_per_unit,
    )  # fmt: skip


def index_of(device: torch.device) -> int:
    """The number of a GPU; "cuda" alone is the current one."""
    return torch.cuda.current_device() if device.index is None else device.index


def place(table: np.ndarray, units: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """The table and the segment of every unit: on the device, or a small table on the CPU (a kernel argument)."""
    if len(table) <= INLINE_SEGMENTS:
        return torch.from_numpy(table), torch.empty(0, dtype=torch.int32, device="cpu")
    unit_segment = np.repeat(np.arange(len(table), dtype=np.int32), units)
    return torch.from_numpy(table).to(device), torch.from_numpy(unit_segment).to(device)


class Memory(NamedTuple):
    """Shared memory of a GPU, in bytes: what a block may have, and what blocks on a multiprocessor share."""

    per_block: int
    per_processor: int


def memory(device: torch.device) -> Memory:
    properties = torch.cuda.get_device_properties(device)
    per_block: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Memory(per_block, properties.shared_memory_per_multiprocessor)


def block_shape(
    max_rank: int, adapters: int, element_bytes: int, merges: np.ndarray, device: torch.device
) -> BlockShape:
    """The best one for segments that `has_room` of; `element_bytes`: of the larger one of W and the result."""
    found = _shape(max_rank, planes(adapters), element_bytes, 1, _widest(merges), memory(device))
    assert found is not None, (max_rank, adapters, element_bytes)
    return found


def shape_as_wide(
    col_warps: int, max_rank: int, adapters: int, element_bytes: int, device: torch.device
) -> BlockShape | None:
    """The best one of so many warps side by side; None where there is no room for so many ranks."""
    if max_rank > MAX_RANK:
        return None
    return _shape(max_rank, planes(adapters), element_bytes, col_warps, col_warps, memory(device))


def has_room(s: Segment, device: torch.device) -> bool:
    """Whether the columns of lora_A that a block works on fit into its shared memory."""
    if s.lora_A is None or s.lora_B is None:
        return True
    dtypes = (FLOATS.index(t.dtype) for t in (s.source, s.destination, s.lora_A, s.lora_B))
    adapters = int(_products(s.rank, *dtypes))
    element_bytes = max(s.source.element_size(), s.destination.element_size())
    return s.rank <= _most_rank(planes(adapters), element_bytes, memory(device))


def no_room(rest: Sequence[Segment], device: torch.device) -> str:
    """Why segments run elsewhere."""
    ranks = ", ".join(map(str, sorted({s.rank for s in rest})))
    return (
        f"adapters of rank {ranks} that are not bf16 take more shared memory than the "
        f"{memory(device).per_block >> 10} KiB that a block has on this {torch.cuda.get_device_properties(device).name}"
    )


def sources(table: np.ndarray) -> np.ndarray:
    """What each segment reads, `[segments]`: a dtype code, with PACKED_SOURCE beside it where that is what codes stand
    for."""
    return (table[:, DTYPES] & 0xFF) | np.where(table[:, DTYPES] >> 32 != FORMATS["Plain"], PACKED_SOURCE, 0)


def products(table: np.ndarray) -> np.ndarray:
    """What the products of each segment are made of, `[segments]`: BF16 where both halves of the adapter are, FP16
    where all is fp16; for other adapters PAIRS (of fp16) above rank `PARTS_RANK` where weights and results have 16
    bits, else FP32 (three bf16 parts); BF16 where there is none."""
    dtypes = (table[:, DTYPES] >> shift & 0xFF for shift in (0, 8, 16, 24))
    return np.where(table[:, RANK] == 0, BF16, _products(table[:, RANK], *dtypes))


def _products(rank: Codes, source: Codes, destination: Codes, lora_A: Codes, lora_B: Codes) -> np.ndarray:
    bf16 = np.equal(lora_A, BF16) & np.equal(lora_B, BF16)
    fp16 = np.equal(source, FP16) & np.equal(destination, FP16) & np.equal(lora_A, FP16) & np.equal(lora_B, FP16)
    parts = np.equal(source, FP32) | np.equal(destination, FP32) | np.less_equal(rank, PARTS_RANK)
    wide = np.where(parts, FP32, PAIRS)
    return np.where(bf16, BF16, np.where(fp16, FP16, wide))


def planes(adapters: int) -> int:
    """16-bit parts of each number that products are made of."""
    return {FP32: 3, PAIRS: 2}.get(adapters, 1)


def ceil(x: Whole, y: Whole | int) -> Whole:
    return -(-x // y)


@cache
def _shape(
    max_rank: int, planes: int, element_bytes: int, narrowest: int, widest: int, room: Memory
) -> BlockShape | None:
    """Chosen where launches check it: csrc/cuda/shapes.h. None if the rank leaves no room."""
    numbers = native.compiled.merge_shape(max_rank, planes, element_bytes, narrowest, widest, *room)
    return BlockShape(numbers[0], numbers[1], bool(numbers[2]), numbers[3]) if numbers else None


@cache
def _most_rank(planes: int, element_bytes: int, room: Memory) -> int:
    ranks = range(CHUNK, MAX_RANK + 1, CHUNK)
    return max((r for r in ranks if _shape(r, planes, element_bytes, 1, 1, room) is not None), default=0)


def _widest(merges: np.ndarray) -> int:
    """The widest strip, in warps, of which less than an eighth would lie beyond the last columns."""
    real = (merges[:, ROWS] * merges[:, COLS]).sum()

    def covered(n: int) -> int:
        return int((merges[:, ROWS] * ceil(merges[:, COLS], WARP_COLS * n)).sum()) * WARP_COLS * n

    return next((n for n in (4, 2) if covered(n) * 7 <= real * 8), 1)


def _rows_per_unit(merges: np.ndarray, strip: int, most: int, blocks: int) -> int:
    """Rows that a block walks down with one strip of A: many, but enough units for an even load."""
    strips = int((ceil(merges[:, COLS], strip) * ceil(merges[:, ROWS], 64)).sum())
    return 64 * min(most // 64, max(1, strips // (16 * blocks)))
