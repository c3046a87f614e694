"""Launches of the CUDA kernel whose results have 8 bits and share scales (`csrc/cuda/scaled.cuh`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from . import next_after, operators
from .cuda_kernel import Units, Work, deal, tensors
from .cuda_launch import Portable, before
from .cuda_repack import repack
from .cuda_table import BlockShape, no_room
from .layout import SCALED_BLOCK, SCALED_COL_WARPS, SCALED_CONVERT, SCALED_MEASURE, SCALED_WHOLE
from .scaled import Placed, Scales, by_weight
from .segments import pack
from .streams import Streams


@dataclass(eq=False, kw_only=True)
class _Part(Portable):
    """The kernel whose results have 8 bits: one part of what that takes."""

    part: int
    operator = staticmethod(operators.launch_scaled)
    col_warps = SCALED_COL_WARPS

    def units(self, work: Work, shape: BlockShape) -> Units:
        return super().units(work, shape)._replace(rows=SCALED_BLOCK)

    def beside(self, work: Work, table: np.ndarray, device: torch.device) -> Sequence[Tensor | int]:
        return torch.from_numpy(work.words).to(device), self.part


MEASURE, CONVERT, WHOLE = (_Part(part=part) for part in (SCALED_MEASURE, SCALED_CONVERT, SCALED_WHOLE))


class CudaScaled(Scales):
    """See `Launch`: one pass for blocks that are whole; for others one that finds scales and one that uses them.

    Args:
        placed: what is written; whole groups.
        table: its segments, packed.
        rest: what is written elsewhere.
    """

    def __init__(
        self, placed: Sequence[Placed], table: np.ndarray, device: torch.device, rest: Sequence[Placed]
    ) -> None:
        measured = [p for p in placed if not p.whole]
        sizes = [0, *(s.grid[0] * s.grid[1] for s, _ in by_weight(measured))]
        self._largest = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        begins = dict(
            zip((s.weight.data_ptr() for s, _ in by_weight(measured)), np.cumsum(sizes[:-1]).tolist(), strict=True)
        )
        made = repack(table, device, (WHOLE,))
        words = np.array([_words(p, self._largest, begins) for p in placed], dtype=np.int64)
        whole = np.array([p.whole for p in placed], dtype=bool)
        found = before(made, device, max(2 * len(placed), 1))
        for part, some in ((MEASURE, ~whole), (CONVERT, ~whole), (WHOLE, whole)):
            found += [part.launch(work) for _, work in deal(made.table[some], (part,), device, words[some])]
        self._streams = Streams(device, [self._largest, made.memory, *tensors(found)])
        self.launches: list[Callable[[bool, int], None]] = [*found]
        if rest:
            reason = no_room([p.segment for p in rest], device)
            self.launches.append(next_after("cuda", device, reason).prepare_scaled(rest, device))

    def __call__(self, stochastic: bool, seed: int) -> None:
        self._streams.join()
        if self._largest.numel():
            self._largest.zero_()
        for launch in self.launches:
            launch(stochastic, seed)


def prepare_scaled(placed: Sequence[Placed], device: torch.device) -> CudaScaled:
    """Lay out the work of checked segments; weights with a segment that the kernel does not serve go elsewhere."""
    placed = [p for _, some in by_weight(placed) for p in some]
    table, weights = pack([p.segment for p in placed]), np.array([p.scaled.weight.data_ptr() for p in placed])
    here = ~np.isin(weights, weights[~WHOLE.serves(table, device)])
    return CudaScaled(list(compress(placed, here)), table[here], device, list(compress(placed, ~here)))


def _words(p: Placed, largest: Tensor, begins: dict[int, int]) -> list[int]:
    begin = begins.get(p.scaled.weight.data_ptr())
    at = 0 if p.whole or begin is None else largest.data_ptr() + 4 * begin
    return [p.scaled.scales.data_ptr(), at, p.scaled.code, p.row, p.col, p.scaled.grid[1]]
