"""The compiled CUDA kernels (`csrc/cuda`) as a backend: plans, and row norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from ..backend import Tracked, next_after
from ..bindings import native, operators
from ..bindings.layout import INLINE_SEGMENTS, NORM_ROWS
from ..scaled.two_step import TwoStepScaled
from ..scaled.weights import Both, Placed, Scales
from ..segments import ROWS, UNIT_BEGIN, UNITS_ACROSS, Segment, folded, pack
from ..streams import Streams
from ..tracked.one_pass import OnePassTracked
from ..tracked.split import SplitTracked
from .kernel import Work, assign, serves, tensors
from .merge import MERGES, PLAIN_LOADS, Portable, launches
from .repack import repack
from .scaled import CudaScale, MergedAtOnce, separate
from .table import BlockShape, ceil, no_room, place
from .tracked import CudaTracked


def unavailable(device: torch.device) -> str | None:
    """Return why the CUDA kernels cannot run on `device`; None if they can."""
    if device.type != "cuda":
        return "it needs CUDA tensors"
    if torch.version.hip is not None:  # whose numbers of compute capability mean other GPUs
        return "it is for NVIDIA GPUs, and this torch for AMD's, where Triton's kernels compile but have not run yet"
    if native.load_error() is not None:
        return native.load_error()
    if not native.has_cuda():
        return f"the compiled extension was built for CPUs alone; {native.BUILD_HINT} and nvcc"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"it needs compute capability 8.0 or later, this GPU has {major}.{minor}"
    return native.no_image((major, minor)) or native.cuda_problem()


class _Norms(Portable):
    """Squared norms of rows, of any rank and any result: lora_A is loaded part by part."""

    def serves(self, table: np.ndarray, device: torch.device) -> np.ndarray:
        return self.reads(table)

    def kinds(self, table: np.ndarray) -> Sequence[np.ndarray]:
        return super().kinds(table)[:1]

    def launch(self, work: Work, shape: BlockShape | None = None) -> partial[None]:
        units = ceil(work.merges[:, ROWS], NORM_ROWS)
        work.merges[:, UNIT_BEGIN] = np.cumsum(units) - units
        table, unit_segment = place(work.merges, units, work.device)
        (dtype,) = work.kind
        return partial(operators.row_norms_cuda, table, unit_segment, dtype, int(units.sum()), work.max_rank)


_NORMS = tuple(_Norms(kernel.name, kernel.formats, kernel.source) for kernel in PLAIN_LOADS)


class _Launch:
    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.table, self.device = pack(segments), device
        here, rest = _separate(segments, self.table, device)
        peers = pack([s for s in here if s.peer])
        near = pack([s for s in here if not s.peer]) if rest or len(peers) else self.table
        with torch.cuda.device(device):
            # A replay would copy a table from memory of the host that is gone by then; a graph keeps arguments.
            capturing = torch.cuda.is_current_stream_capturing()
            most = INLINE_SEGMENTS if capturing else max(2 * len(here), 1)
        made, far = repack(near, device, MERGES), repack(peers, device, PLAIN_LOADS)
        found = launches(made, device, most) + launches(far, device, most, PLAIN_LOADS)
        self._streams = Streams(device, [made.memory, far.memory, *tensors(found)])
        self.launches: list[Callable[[bool, int], object]] = [*found]
        if rest:
            self.launches.append(next_after("cuda", device, no_room(rest, device)).prepare(rest, device))

    def __call__(self, stochastic: bool, seed: int) -> None:
        self._streams.join()
        for launch in self.launches:
            launch(stochastic, seed)

    def row_norms(self, out: Tensor) -> None:
        found, streams = self._norms
        streams.join()
        for launch in found:
            launch(out)

    @cached_property
    def _norms(self) -> tuple[list[partial[None]], Streams]:
        table = self.table.copy()
        table[:, UNITS_ACROSS] = np.cumsum(table[:, ROWS]) - table[:, ROWS]  # where its rows begin in the result
        found = [kernel.launch(work) for kernel, work in assign(table, _NORMS, self.device)]
        return found, Streams(self.device, tensors(found))


def prepare(segments: Sequence[Segment], device: torch.device) -> _Launch:
    """Sort the table by launch, cut it into units of work, and put it on the device."""
    return _Launch(segments, device)


def prepare_scaled(placed: Sequence[Placed], device: torch.device) -> Scales:
    """Merge, scale and convert by one kernel where one serves; else merge by launches of `prepare` and scale from
    there."""
    here, rest = separate(placed, device)
    parts: list[Scales] = [MergedAtOnce(here, device)] if here else []
    if rest:
        parts.append(TwoStepScaled(prepare, CudaScale, rest, device))
    return parts[0] if len(parts) == 1 else Both(parts)


def prepare_tracked(segments: Sequence[Segment], device: torch.device) -> Tracked:
    """Lay out one pass each way."""
    table = pack(segments)
    here, rest = _separate(segments, table, device)
    parts: list[Tracked] = [OnePassTracked(CudaTracked(here, pack(here) if rest else table, device))] if here else []
    if rest:
        parts.append(next_after("cuda", device, no_room(rest, device)).prepare_tracked(rest, device))
    return parts[0] if len(parts) == 1 else SplitTracked(parts)


def _separate(
    segments: Sequence[Segment], table: np.ndarray, device: torch.device
) -> tuple[Sequence[Segment], Sequence[Segment]]:
    """Return the segments whose adapters have room in shared memory, and the rest; `table` is all of them packed."""
    served = serves(PLAIN_LOADS, table, device)
    if served.all():
        return segments, []
    number, room = np.repeat(np.arange(len(segments)), [len(folded(s)) for s in segments]), np.full(len(segments), True)
    room[number[~served]] = False
    return list(compress(segments, room)), list(compress(segments, ~room))
