"""The compiled CUDA kernels (`csrc/cuda`): one launch for each combination of dtypes in a table
and for each of the two kernels that run it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import BackendUnavailable
from . import cuda_hopper as hopper
from . import native
from .cuda_hopper import HopperVariant
from .fused import Fused
from .segments import BF16, COLS, DTYPES, FP32, RANK, RAW, ROWS, UNIT_BEGIN, UNITS_ACROSS, Segment, pack

# The same numbers as in csrc/cuda/launch.h.
INLINE_SEGMENTS = 8
NORM_ROWS, WARP_COLS, MAX_UNIT_ROWS = 64, 64, 512
RAW_ROWS, RAW_COLS, RAW_COLS_1 = 64, 2048, 128 * 1024
CHUNK, VECTOR = 32, 256 * 16
DEALT = 1024
"""Units that a small table deals round the blocks; more are handed out by a counter, which takes an allocation, because
blocks do not run at one pace."""
RESERVED = 1024
"""Shared memory that the system takes of every block."""

Whole = TypeVar("Whole", int, np.ndarray)

FIRST_RAW = min(RAW.values())
HOPPER = 1 << 16
"""Of a group: the kernel for compute capability 9 runs it."""


def unavailable(device: torch.device) -> str | None:
    """Why the CUDA kernels cannot run on `device`; None if they can."""
    if device.type != "cuda":
        return "it needs CUDA tensors"
    if native.load_error() is not None:
        return native.load_error()
    if not native.has_cuda():
        return f"the compiled extension was built without nvcc; {native.BUILD_HINT} and nvcc"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"it needs compute capability 8.0 or later, this GPU has {major}.{minor}"


class _Shape(NamedTuple):
    """How a block works, see `Launch` in csrc/cuda/launch.h."""

    col_warps: int
    deep: int
    staged_B: bool
    margin: int


class _Variant(NamedTuple):
    """One launch of the kernel for any GPU: the arguments of `launch_cuda` that stay the same from run to run."""

    table: Tensor
    unit_segment: Tensor
    counter: Tensor
    device: int
    source_dtype: int
    destination_dtype: int
    wide: bool
    n_units: int
    n_raw_units: int
    rows_per_unit: int
    col_warps: int
    deep: int
    staged_B: bool
    margin: int
    max_rank: int

    def __call__(self, stochastic: bool, seed: int) -> None:
        torch.ops.lora_merge_native.launch_cuda(*self, stochastic, seed)


class _Launch:
    def __init__(self, table: np.ndarray, device: torch.device) -> None:
        self.table, self.device = table, device
        with torch.cuda.device(device):
            # A replay would copy a table from memory of the host that is gone by then; a graph keeps arguments.
            most = INLINE_SEGMENTS if torch.cuda.is_current_stream_capturing() else max(len(table), 1)
        pieces = [table[begin : begin + most] for begin in range(0, len(table), most)]
        self.variants = [variant for piece in pieces for variant in _variants(piece, device)]

    def __call__(self, stochastic: bool, seed: int) -> None:
        for variant in self.variants:
            variant(stochastic, seed)

    def row_norms(self, out: Tensor) -> None:
        """One launch for each source dtype."""
        for source_dtype, table, unit_segment, n_units, max_rank in self._norm_tables:
            torch.ops.lora_merge_native.row_norms_cuda(table, unit_segment, source_dtype, n_units, max_rank, out)

    @cached_property
    def _norm_tables(self) -> list[tuple[int, Tensor, Tensor, int, int]]:
        source = self.table[:, DTYPES] & 0xFF
        first_row = np.cumsum(self.table[:, ROWS]) - self.table[:, ROWS]
        tables = []
        for dtype in np.unique(source):
            table = self.table[source == dtype]
            units = _ceil(table[:, ROWS], NORM_ROWS)
            table[:, UNIT_BEGIN] = np.cumsum(units) - units
            table[:, UNITS_ACROSS] = first_row[source == dtype]  # where the segment's rows begin in the result
            counts = int(units.sum()), int(table[:, RANK].max())
            tables.append((int(dtype), *_place(table, units, self.device), *counts))
        return tables


def prepare(segments: Sequence[Segment], device: torch.device) -> _Launch:
    """Sort the table by launch, cut it into units of work, and put it on the device."""
    return _Launch(pack(segments), device)


def prepare_tracked(segments: Sequence[Segment], device: torch.device) -> Fused:
    """One pass each way."""
    from .cuda_tracked import CudaTracked  # it places tables as this module does

    return Fused(CudaTracked(segments, device))


def _variants(table: np.ndarray, device: torch.device) -> list[_Variant | HopperVariant]:
    """Group segments by (kernel, source, destination, wide); raw copies ride along with the largest group."""
    source, destination = table[:, DTYPES] & 0xFF, table[:, DTYPES] >> 8 & 0xFF
    raw = source >= FIRST_RAW
    wide = _wide(table)
    group = np.where(raw, -1, hopper.serves(table, wide, device) * HOPPER | source << 9 | destination << 1 | wide)
    size = {int(g): int((table[group == g, ROWS] * table[group == g, COLS]).sum()) for g in np.unique(group[~raw])}
    order = sorted(size, key=size.__getitem__, reverse=True) or [BF16 << 9 | BF16 << 1]
    copies = table[raw]
    variants: list[_Variant | HopperVariant] = []
    for key in order:
        variants.append(_variant(table[group == key], copies, key, device))
        copies = copies[:0]
    return variants


def _variant(merges: np.ndarray, copies: np.ndarray, key: int, device: torch.device) -> _Variant | HopperVariant:
    max_rank, source, destination = int(merges[:, RANK].max(initial=0)), key >> 9 & 0x7F, key >> 1 & 0xFF
    wide = bool(key & 1)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if key & HOPPER:
        tiles = hopper.shape(max_rank, wide, device)
        rows = hopper.unit_rows(max_rank, wide, hopper.are_large(merges, processors))
        cut = _cut(merges, copies, tiles.strip_cols, rows, processors, device)
        maps = hopper.maps(cut.host_table, wide, cut.table.device)
        return HopperVariant(
            cut.table, cut.unit_segment, maps, cut.counter, cut.device, source, wide, cut.n_units, cut.n_raw_units,
            cut.rows_per_unit, *tiles, max_rank,
        )  # fmt: skip
    shape = _shape(max_rank, wide, 4 if FP32 in (source, destination) else 2, _widest(merges), device)
    cut = _cut(merges, copies, WARP_COLS * shape.col_warps, MAX_UNIT_ROWS, 2 * processors, device)
    return _Variant(
        cut.table, cut.unit_segment, cut.counter, cut.device, source, destination, wide, cut.n_units, cut.n_raw_units,
        cut.rows_per_unit, *shape, max_rank,
    )  # fmt: skip


class _Cut(NamedTuple):
    """A table, cut into units of work."""

    host_table: np.ndarray
    table: Tensor
    unit_segment: Tensor
    counter: Tensor
    device: int
    n_units: int
    n_raw_units: int
    rows_per_unit: int


def _cut(
    merges: np.ndarray, copies: np.ndarray, strip: int, most: int, blocks: int, device: torch.device, rows: int = 64
) -> _Cut:
    """Units of `strip` columns and up to `most` rows, a multiple of `rows`, for so many blocks at a time."""
    rows_per_unit = _ceil(_rows_per_unit(merges, strip, most, blocks), rows) * rows
    merge_across = _ceil(merges[:, COLS], strip)
    copy_across = _ceil(copies[:, COLS], np.where(copies[:, ROWS] == 1, RAW_COLS_1, RAW_COLS))
    merge_units = merge_across * _ceil(merges[:, ROWS], rows_per_unit)
    copy_units = copy_across * _ceil(copies[:, ROWS], RAW_ROWS)
    table, units = np.concatenate([merges, copies]), np.concatenate([merge_units, copy_units])
    table[:, UNIT_BEGIN] = np.cumsum(units) - units
    table[:, UNITS_ACROSS] = np.concatenate([merge_across, copy_across])
    counted = len(table) > INLINE_SEGMENTS or units.sum() > DEALT
    counter = torch.zeros(2 if counted else 0, dtype=torch.int32, device=device if counted else "cpu")
    number = torch.cuda.current_device() if device.index is None else device.index
    return _Cut(
        table, *_place(table, units, device), counter, number, int(merge_units.sum()), int(copy_units.sum()),
        rows_per_unit,
    )  # fmt: skip


def _shape(max_rank: int, wide: bool, element_bytes: int, widest: int, device: torch.device) -> _Shape:
    """(col_warps, deep, staged_B, margin) of a launch, by the shared memory that they take.

    The wider the strip, the more warps share rows of lora_B; the deeper, the more of memory's latency is hidden; and
    two blocks on a multiprocessor hide each other's pauses. Tried in this order of merit.
    """
    chunks = _ceil(max_rank, CHUNK)

    def shared(col_warps: int, deep: int, staged_B: bool, margin: int) -> int:
        vectors = element_bytes + (chunks * (2 if wide else 1) if staged_B else 0)
        strip = chunks * CHUNK * (WARP_COLS * col_warps + margin) * 2 * (3 if wide else 1)
        return deep * vectors * VECTOR + strip

    properties = torch.cuda.get_device_properties(device)
    half = properties.shared_memory_per_multiprocessor // 2 - RESERVED
    whole: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    shapes = [_Shape(n, deep, True, 8) for deep in (4, 2) for n in (4, 2, 1) if n <= widest]
    for shape in shapes:
        if shared(*shape) <= half:
            return shape
    for shape in [*shapes, _Shape(1, 2, False, 8), _Shape(1, 2, False, 0)]:
        if shared(*shape) <= whole:
            return shape
    raise BackendUnavailable(
        f"adapters of rank {max_rank} that are not bf16 need more shared memory than the {whole >> 10} KiB that a "
        f"block has on this {properties.name}; set LORA_MERGE_BACKEND=triton"
    )


def _wide(table: np.ndarray) -> np.ndarray:
    """Which segments have adapters that are not both bf16, and so wide products, bool `[segments]`."""
    return (table[:, RANK] > 0) & ((table[:, DTYPES] >> 16 & 0xFFFF) != (BF16 | BF16 << 8))


def _widest(merges: np.ndarray) -> int:
    """The widest strip, in warps, of which less than an eighth would lie beyond the last columns."""
    real = (merges[:, ROWS] * merges[:, COLS]).sum()

    def covered(n: int) -> int:
        return int((merges[:, ROWS] * _ceil(merges[:, COLS], WARP_COLS * n)).sum()) * WARP_COLS * n

    return next((n for n in (4, 2) if covered(n) * 7 <= real * 8), 1)


def _rows_per_unit(merges: np.ndarray, strip: int, most: int, blocks: int) -> int:
    """Rows that a block walks down with one strip of A: many, but enough units for an even load."""
    strips = int((_ceil(merges[:, COLS], strip) * _ceil(merges[:, ROWS], 64)).sum())
    return 64 * min(most // 64, max(1, strips // (16 * blocks)))


def _place(table: np.ndarray, units: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """The table and the segment of every unit: on the device, or a small table on the CPU (a kernel argument)."""
    if len(table) <= INLINE_SEGMENTS:
        return torch.from_numpy(table), torch.empty(0, dtype=torch.int32)
    unit_segment = np.repeat(np.arange(len(table), dtype=np.int32), units)
    return torch.from_numpy(table).to(device), torch.from_numpy(unit_segment).to(device)


def _ceil(x: Whole, y: Whole | int) -> Whole:
    return -(-x // y)
