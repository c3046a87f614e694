"""Launches of the compiled merge kernels: the kernel for any GPU, and which kernels segments are assigned to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ..bindings import operators
from ..bindings.layout import PACKED_SOURCE, PART_VECTORS, WARP_COLS
from ..segments import BF16, COLS, DTYPES, FORMATS, FP32, RANK, RAW, ROWS, UNIT_BEGIN
from .hopper import Hopper
from .kernel import Kernel, Launch, Units, Work, assign
from .repack import Repacked
from .table import BlockShape, block_shape, ceil, index_of, most_ranks, place, products, widest

MAX_UNIT_ROWS = 512


@dataclass(eq=False)
class Portable(Kernel[BlockShape]):
    """The kernel for any GPU, with one loader of weights.

    Args:
        formats: of the sources that it reads.
        source: what its operator adds to the code of their dtype.
    """

    name: str = "portable kernel (cp.async, mma)"
    formats: tuple[int, ...] = (FORMATS["Plain"],)
    source: int = 0
    operator = operators.launch_cuda
    blocks = 2

    def serves(self, table: np.ndarray, device: torch.device) -> np.ndarray:
        *dtypes, adapters = self.kinds(table)
        wide = np.any([dtype & 0xFF == FP32 for dtype in dtypes], axis=0)
        most = most_ranks(1, device)[adapters, wide.astype(int)]
        return self.reads(table) & (table[:, RANK] <= most)

    def reads(self, table: np.ndarray) -> np.ndarray:
        """Return which sources it can read."""
        return np.isin(table[:, DTYPES] >> 32, self.formats)

    def kinds(self, table: np.ndarray) -> Sequence[np.ndarray]:
        return table[:, DTYPES] & 0xFF | self.source, table[:, DTYPES] >> 8 & 0xFF, products(table)

    def shape(self, work: Work, like: BlockShape | None = None) -> BlockShape | None:
        warps = (like.col_warps, like.col_warps) if like else (1, widest(work.merges))
        element_bytes = 4 if FP32 in (work.kind[0] & 0xFF, *work.kind[1:-1]) else 2
        return block_shape(work.max_rank, work.kind[-1], element_bytes, *warps, work.device)

    def units(self, work: Work, shape: BlockShape) -> Units:
        return Units(WARP_COLS * shape.col_warps, MAX_UNIT_ROWS)


PLAIN_LOADS = (
    Portable(),
    Portable("portable kernel (decodes as it merges)", (FORMATS["Codes4"], FORMATS["Int8"]), PACKED_SOURCE),
)
"""Those that read weights by plain loads, in the memory of another GPU too: at the speed of the link."""
MERGES: Sequence[Kernel[Any]] = (*PLAIN_LOADS, Hopper())


def launches(made: Repacked, device: torch.device, most: int, kernels: Sequence[Kernel[Any]] = MERGES) -> list[Launch]:
    """Return the launches of a table, of up to `most` segments each."""
    found = before(made, device, most)
    for begin in range(0, len(made.table), most):
        found += merges(made.table[begin : begin + most], device, kernels)
    return found


def before(made: Repacked, device: torch.device, most: int) -> list[Launch]:
    """Return the launches that lay out its adapters."""
    found: list[Launch] = []
    for begin in range(0, len(made.splits), most):
        found.append(_split(made.splits[begin : begin + most], device))
    for begin in range(0, len(made.copies), most):
        found += merges(made.copies[begin : begin + most], device)
    return found


def _split(table: np.ndarray, device: torch.device) -> Launch:
    """Return the launch that makes pairs of fp16 of float32 adapters."""
    units = ceil(table[:, ROWS], PART_VECTORS)
    table[:, UNIT_BEGIN] = np.cumsum(units) - units
    return partial(operators.split_adapters, *place(table, units, device), index_of(device), int(units.sum()))


def merges(table: np.ndarray, device: torch.device, kernels: Sequence[Kernel[Any]] = MERGES) -> list[Launch]:
    """Return a launch for each kind of segment, the largest first; raw copies ride along with it."""
    raw = table[:, DTYPES] & 0xFF >= min(RAW.values())
    found, copies = assign(table[~raw], kernels, device), table[raw]
    found.sort(key=lambda pair: -int((pair[1].merges[:, ROWS] * pair[1].merges[:, COLS]).sum()))
    if not found and len(copies):
        found.append((PLAIN_LOADS[0], Work((BF16, BF16, BF16), copies[:0], 0, device)))
    return [kernel.launch(work if i else work._replace(copies=copies)) for i, (kernel, work) in enumerate(found)]
