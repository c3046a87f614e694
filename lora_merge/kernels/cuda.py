"""The compiled CUDA kernels (`csrc/cuda`) as a backend: plans, and row norms."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import Launch, Tracked, native, next_after, operators
from .cuda_launch import launches
from .cuda_repack import repack
from .cuda_scaled import prepare_scaled as prepare_scaled
from .cuda_table import ceil, has_room, no_room, place, sources
from .cuda_tracked import CudaTracked
from .fused import Fused
from .layout import INLINE_SEGMENTS, NORM_ROWS
from .segments import RANK, ROWS, UNIT_BEGIN, UNITS_ACROSS, Segment, pack
from .streams import Streams
from .together import Together


def unavailable(device: torch.device) -> str | None:
    """Why the CUDA kernels cannot run on `device`; None if they can."""
    if device.type != "cuda":
        return "it needs CUDA tensors"
    if torch.version.hip is not None:  # whose numbers of compute capability mean other GPUs
        return "it is for NVIDIA GPUs, and this torch for AMD's, where Triton's kernels compile but have not run yet"
    if native.load_error() is not None:
        return native.load_error()
    if not native.has_cuda():
        return f"the compiled extension was built without nvcc; {native.BUILD_HINT} and nvcc"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"it needs compute capability 8.0 or later, this GPU has {major}.{minor}"
    return native.no_image((major, minor)) or native.cuda_problem()


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
        here = [s for s in segments if has_room(s, device)] if rest else segments
        peers = pack([s for s in here if s.peer])
        near = pack([s for s in here if not s.peer]) if rest or len(peers) else self.table
        with torch.cuda.device(device):
            # A replay would copy a table from memory of the host that is gone by then; a graph keeps arguments.
            capturing = torch.cuda.is_current_stream_capturing()
            most = INLINE_SEGMENTS if capturing else max(2 * len(here), 1)
        made, far = repack(near, device), repack(peers, device, by_map=False)
        self.variants = launches(made, device, most) + launches(far, device, most, peer=True)
        tensors = [t for v in self.variants for t in v if isinstance(t, Tensor)]
        self._streams = Streams(device, [made.memory, far.memory, *tensors])
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
        source = sources(self.table)
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
