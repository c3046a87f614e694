"""Launches that make results of 8 bits: merged, scaled and converted by the kernel for compute capability 9
(`csrc/cuda/sm90/scaled.cu`), or made of 16 bits that are there (`csrc/cuda/scale.cu`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from ..bindings import operators
from ..bindings.layout import (
    GROUPS,
    INLINE_ROUNDED,
    INLINE_SEGMENTS,
    SCALE_CONVERT,
    SCALE_MEASURE,
    SCALE_WHOLE,
    SCALED_BLOCK,
)
from ..scaled.weights import Placed, Rounded, Scales, by_weight
from ..segments import COLS, FLOATS, LARGEST, SCALE, SCALES_ACROSS, pack
from ..streams import Streams
from .hopper import Hopper, Tiles
from .kernel import Units, Work, tensors
from .merge import before, merges
from .repack import Repacked, repack
from .table import index_of


class HopperScaled(Hopper):
    """The kernel for compute capability 9, whose results become 8 bits on the chip.

    Args:
        group: code of what shares a scale.
        part: `layout.SCALE_MEASURE` and what follows it.
    """

    name = "kernel for compute capability 9 (results of 8 bits)"
    operator = operators.launch_hopper_scaled
    result_bytes = 1
    narrowest = 2 * SCALED_BLOCK
    ahead = True

    def __init__(self, group: int = 0, part: int = SCALE_MEASURE) -> None:
        self.options = (group, part)

    def could_serve(self, table: np.ndarray, device: torch.device) -> np.ndarray:
        return super().could_serve(table, device) & (table[:, COLS] % 16 == 0)

    def units(self, work: Work, shape: Tiles) -> Units:
        """Cut units of whole blocks and many rows, as each waits for its lora_A. As measured."""
        return Units(shape.strip_cols, 8 * SCALED_BLOCK, SCALED_BLOCK)


class _Launches(Scales):
    """Launches in order, which find their largest magnitudes at zero."""

    launches: Sequence[partial[None]]
    _largest: Tensor
    _streams: Streams

    def __call__(self, stochastic: bool, seed: int) -> None:
        self._streams.join()
        if self._largest.numel():
            self._largest.zero_()
        for launch in self.launches:
            launch(stochastic, seed)


class MergedAtOnce(_Launches):
    """See `Launch`: a pass over weights that are scaled by blocks; over others two, as their scales are those of more
    than a block of threads has.

    Args:
        placed: those that `separate` gave it.
    """

    def __init__(self, placed: Sequence[Placed], device: torch.device) -> None:
        with torch.cuda.device(device):
            capturing = torch.cuda.is_current_stream_capturing()
        most = INLINE_SEGMENTS if capturing else max(2 * len(placed), 1)
        self._largest, made = _laid_out(placed, device)
        group_of = np.array([p.scaled.code for p in placed])
        found = before(made, device, most)
        for part in (SCALE_MEASURE, SCALE_CONVERT, SCALE_WHOLE):
            for group in np.unique(group_of).tolist():
                if (part == SCALE_WHOLE) == _is_block(group):
                    table, kernel = made.table[group_of == group], HopperScaled(group, part)
                    for begin in range(0, len(table), most):
                        found += merges(table[begin : begin + most], device, [kernel])
        self.launches = found
        self._streams = Streams(device, [self._largest, made.memory, *tensors(found)])


def separate(placed: Sequence[Placed], device: torch.device) -> tuple[list[Placed], list[Placed]]:
    """Return what `MergedAtOnce` takes, weight by weight, and the rest."""
    kernel, found = HopperScaled(), [p for p in placed if _fits(p)]
    found = list(compress(found, kernel.could_serve(_table(found), device)))
    served = kernel.serves(repack(_table(found), device, [kernel]).table, device)
    taken = set(map(id, compress(found, served)))
    here: list[Placed] = []
    rest: list[Placed] = []
    for _, some in by_weight(placed):
        (here if all(id(p) in taken for p in some) else rest).extend(some)
    return here, rest


def _is_block(group: int) -> bool:
    return group in (GROUPS["Block"], GROUPS["Compiled"])


def _fits(p: Placed) -> bool:
    """Return True if nothing that the packed table does not show bars a segment: it has whole blocks where these share
    scales, and is no column, which the table may hold as a row with other scales."""
    s = p.segment
    if s.rank == 0 or s.peer or s.source.dtype != p.scaled.dtype or s.source.shape[1] == 1:
        return False
    return p.whole or not _is_block(p.scaled.code)


def _table(placed: Sequence[Placed]) -> np.ndarray:
    """Pack segments; the dtype of a result is the one to which it is rounded before it is scaled."""
    return pack([p.segment for p in placed])


def _laid_out(placed: Sequence[Placed], device: torch.device) -> tuple[Tensor, Repacked]:
    """Return the table that launches take, and its memory for largest magnitudes."""
    table, size, begins = _table(placed), 0, {}
    for scaled, _ in by_weight(placed):
        if not _is_block(scaled.code):
            begins[scaled.weight.data_ptr()] = size
            size += scaled.grid[0]
    largest = _magnitudes(size, device)
    for row, p in zip(table, placed, strict=True):
        down, across = p.scaled.sizes
        first = p.row // down * p.scaled.grid[1] + p.col // across
        row[SCALE], row[SCALES_ACROSS] = p.scaled.scales.data_ptr() + 4 * first, p.scaled.grid[1]
        if (begin := begins.get(p.scaled.weight.data_ptr())) is not None:
            row[LARGEST] = largest.data_ptr() + 4 * (begin + first)
    return largest, repack(table, device, [HopperScaled()])


class CudaScale(_Launches):
    """See `Launch`: a pass over blocks and rows, two over tensors. The jobs travel as arguments.

    Args:
        jobs: sources of 16 bits.
    """

    def __init__(self, jobs: Sequence[Rounded], device: torch.device) -> None:
        measured = sum(job.scaled.group == "tensor" for job in jobs)
        self._largest = _magnitudes(measured, device)
        self._streams = Streams(device, [self._largest])
        found: dict[tuple[int, int], list[list[int]]] = {}
        at = self._largest.data_ptr()
        for job in jobs:
            kind = FLOATS.index(job.source.dtype), job.scaled.code
            found.setdefault(kind, []).append(_words(job, at))
            at += 4 * (job.scaled.group == "tensor")
        self.launches = []
        for (dtype, group), rows in found.items():
            parts = (SCALE_MEASURE, SCALE_CONVERT) if group == GROUPS["Tensor"] else (SCALE_CONVERT,)
            for begin in range(0, len(rows), INLINE_ROUNDED):
                table = torch.tensor(rows[begin : begin + INLINE_ROUNDED], dtype=torch.int64, device="cpu")
                for part in parts:
                    self.launches.append(partial(operators.scale_cuda, table, dtype, group, part, index_of(device)))


def _magnitudes(count: int, device: torch.device) -> Tensor:
    """Return memory for largest ones: no inference tensor, as each run zeroes it, in whatever mode."""
    with torch.inference_mode(False):
        return torch.zeros(count, dtype=torch.int32, device=device)


def _words(job: Rounded, largest: int) -> list[int]:
    """Return the words of `layout.ROUNDED`."""
    scaled, (rows, cols) = job.scaled, job.source.shape
    return [
        job.source.data_ptr(), job.destination.data_ptr(), job.scales.data_ptr(),
        largest if scaled.group == "tensor" else 0, rows, cols, job.source.stride(0), job.destination.stride(0),
        scaled.grid[1], 0,
    ]  # fmt: skip
