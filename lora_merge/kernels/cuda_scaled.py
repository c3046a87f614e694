"""Launches of the CUDA kernel that makes 8 bits of 16 (`csrc/cuda/scale.cu`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from . import operators
from .cuda_table import index_of
from .layout import GROUPS, INLINE_ROUNDED, SCALE_CONVERT, SCALE_MEASURE
from .scaled import Rounded, Scales
from .segments import FLOATS
from .streams import Streams


class CudaScale(Scales):
    """See `Launch`: a pass over blocks and rows, two over tensors. The jobs travel as arguments.

    Args:
        jobs: sources of 16 bits.
    """

    def __init__(self, jobs: Sequence[Rounded], device: torch.device) -> None:
        measured = sum(job.scaled.group == "tensor" for job in jobs)
        self._largest = torch.zeros(measured, dtype=torch.int32, device=device)
        self._streams = Streams(device, [self._largest])
        found: dict[tuple[int, int], list[list[int]]] = {}
        at = self._largest.data_ptr()
        for job in jobs:
            kind = FLOATS.index(job.source.dtype), job.scaled.code
            found.setdefault(kind, []).append(_words(job, at))
            at += 4 * (job.scaled.group == "tensor")
        self.launches: list[partial[None]] = []
        for (dtype, group), rows in found.items():
            for begin in range(0, len(rows), INLINE_ROUNDED):
                table = torch.tensor(rows[begin : begin + INLINE_ROUNDED], dtype=torch.int64, device="cpu")
                launch = partial(operators.scale_cuda, table, dtype, group, device=index_of(device))
                if group == GROUPS["Tensor"]:
                    self.launches.append(partial(launch, part=SCALE_MEASURE))
                self.launches.append(partial(launch, part=SCALE_CONVERT))

    def __call__(self, stochastic: bool, seed: int) -> None:
        self._streams.join()
        if self._largest.numel():
            self._largest.zero_()
        for launch in self.launches:
            launch()


def _words(job: Rounded, largest: int) -> list[int]:
    """`layout.ROUNDED`."""
    scaled, (rows, cols) = job.scaled, job.source.shape
    return [
        job.source.data_ptr(), job.destination.data_ptr(), job.scales.data_ptr(),
        largest if scaled.group == "tensor" else 0, rows, cols, job.source.stride(0), job.destination.stride(0),
        scaled.grid[1], 0,
    ]  # fmt: skip
