"""The compiled CUDA kernels (`csrc/cuda`): one launch for each combination of dtypes in a table
and for each of the two kernels that run it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import Launch, Tracked, native, next_after, operators
from . import cuda_hopper as hopper
from .cuda_hopper import HopperVariant
from .cuda_table import (
    BLOCKS,
    HOPPER,
    MAX_UNIT_ROWS,
    block_shape,
    ceil,
    cut,
    has_room,
    no_room,
    place,
    wide_products,
)
from .cuda_tracked import CudaTracked
from .fused import Fused
from .layout import INLINE_SEGMENTS, NORM_ROWS, WARP_COLS
from .segments import BF16, COLS, DTYPES, FP32, RANK, RAW, ROWS, UNIT_BEGIN, UNITS_ACROSS, Segment, pack
from .streams import Streams
from .together import Together

FIRST_RAW = min(RAW.values())


def unavailable(device: torch.device) -> str | None:
    """Why the CUDA kernels cannot run on `device`; None if they can."""
    if device.type != "cuda":
        return "it needs CUDA tensors"
    if native.load_error() is not None:
        return native.load_error()
    if not native.has_cuda():
        return f"the compiled extension was built without nvcc; {native.BUILD_HINT} and nvcc"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"it needs compute capability 8.0 or later, this GPU has {major}.{minor}"
    return native.no_image((major, minor)) or native.cuda_problem()


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
    stages: int
    staged_B: bool
    pad: int
    max_rank: int

    def __call__(self, stochastic: bool, seed: int) -> None:
        operators.launch_cuda(*self, stochastic, seed)


class _NormTable(NamedTuple):
    """One launch of the row norms, likewise."""

    table: Tensor
    unit_segment: Tensor
    source_dtype: int
    n_units: int
    max_rank: int


class _Launch:
    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.table, self.device = pack(segments), device
        rest = [s for s in segments if not has_room(s, device)]
        here = pack([s for s in segments if has_room(s, device)]) if rest else self.table
        with torch.cuda.device(device):
            # A replay would copy a table from memory of the host that is gone by then; a graph keeps arguments.
            most = INLINE_SEGMENTS if torch.cuda.is_current_stream_capturing() else max(len(here), 1)
        pieces = [here[begin : begin + most] for begin in range(0, len(here), most)]
        self.variants = [variant for piece in pieces for variant in _variants(piece, device)]
        self._streams = Streams(device, [t for v in self.variants for t in v if isinstance(t, Tensor)])
        self._elsewhere: Launch | None = None
        if rest:
            self._elsewhere = next_after("cuda", device, no_room(rest, device)).prepare(rest, device)

    def __call__(self, stochastic: bool, seed: int) -> None:
        self._streams.join()
        for variant in self.variants:
            variant(stochastic, seed)
        if self._elsewhere is not None:
            self._elsewhere(stochastic, seed)

    def row_norms(self, out: Tensor) -> None:
        """One launch for each source dtype; any rank, as lora_A is brought part by part."""
        tables, streams = self._norm_tables
        streams.join()
        for table in tables:
            operators.row_norms_cuda(*table, out)

    @cached_property
    def _norm_tables(self) -> tuple[list[_NormTable], Streams]:
        source = self.table[:, DTYPES] & 0xFF
        first_row = np.cumsum(self.table[:, ROWS]) - self.table[:, ROWS]
        tables = []
        for dtype in np.unique(source):
            table = self.table[source == dtype]
            units = ceil(table[:, ROWS], NORM_ROWS)
            table[:, UNIT_BEGIN] = np.cumsum(units) - units
            table[:, UNITS_ACROSS] = first_row[source == dtype]  # where the segment's rows begin in the result
            counts = int(units.sum()), int(table[:, RANK].max())
            tables.append(_NormTable(*place(table, units, self.device), int(dtype), *counts))
        return tables, Streams(self.device, [t for table in tables for t in table[:2]])


def prepare(segments: Sequence[Segment], device: torch.device) -> _Launch:
    """Sort the table by launch, cut it into units of work, and put it on the device."""
    return _Launch(segments, device)


def prepare_tracked(segments: Sequence[Segment], device: torch.device) -> Tracked:
    """One pass each way."""
    here = [s for s in segments if has_room(s, device)]
    rest = [s for s in segments if not has_room(s, device)]
    parts: list[Tracked] = [Fused(CudaTracked(here, device))] if here else []
    if rest:
        parts.append(next_after("cuda", device, no_room(rest, device)).prepare_tracked(rest, device))
    return parts[0] if len(parts) == 1 else Together(parts)


def _variants(table: np.ndarray, device: torch.device) -> list[_Variant | HopperVariant]:
    """Group segments by (kernel, source, destination, wide); raw copies ride along with the largest group."""
    source, destination = table[:, DTYPES] & 0xFF, table[:, DTYPES] >> 8 & 0xFF
    raw = source >= FIRST_RAW
    wide = wide_products(table)
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
        tiles = hopper.tiles(max_rank, wide, device)
        rows = hopper.unit_rows(max_rank, wide, hopper.are_large(merges, processors))
        made = cut(merges, copies, tiles.strip_cols, rows, processors, device)
        maps = hopper.maps(made.host_table, wide, made.table.device)
        return HopperVariant(
            made.table, made.unit_segment, maps, made.counter, made.device, source, wide, made.n_units,
            made.n_raw_units, made.rows_per_unit, *tiles, max_rank,
        )  # fmt: skip
    shape = block_shape(max_rank, wide, 4 if FP32 in (source, destination) else 2, merges, device)
    made = cut(merges, copies, WARP_COLS * shape.col_warps, MAX_UNIT_ROWS, BLOCKS * processors, device)
    return _Variant(
        made.table, made.unit_segment, made.counter, made.device, source, destination, wide, made.n_units,
        made.n_raw_units, made.rows_per_unit, *shape, max_rank,
    )  # fmt: skip
