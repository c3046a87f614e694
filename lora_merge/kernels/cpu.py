"""The compiled CPU kernels (`csrc/cpu`): multi-threaded; AVX2, AVX-512, AMX or NEON chosen at run time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..errors import BackendUnavailable
from .backend import Moves
from .bindings import native, operators
from .scaled.two_step import ByOperations, TwoStepScaled
from .segments import DESTINATION, SOURCE, Segment, pack, same_weights
from .tracked.one_pass import Journal, Kernels, OnePassTracked

_ISA = "LORA_MERGE_CPU_ISA"


def unavailable(device: torch.device) -> str | None:
    """Return why the CPU kernels cannot run on `device`; None if they can.

    Raises:
        BackendUnavailable: `LORA_MERGE_CPU_ISA` names instructions that this machine does not run.
    """
    reason = "it needs CPU tensors" if device.type != "cpu" else native.load_error()
    if reason is None and (forced := os.environ.get(_ISA)) and forced not in (isas := native.compiled.cpu_isas()):
        raise BackendUnavailable(f"{_ISA}={forced}: expected one of those that this machine runs: {', '.join(isas)}")
    return reason


class _Launch:
    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(self, stochastic: bool, seed: int) -> bool:
        return operators.launch_cpu(self.table, stochastic, seed)

    def row_norms(self, out: Tensor) -> None:
        operators.row_norms_cpu(self.table, out)


def prepare(segments: Sequence[Segment], device: torch.device) -> _Launch:
    """Pack the table; C++ cuts units of work at each launch."""
    return _Launch(torch.from_numpy(pack(segments)))


prepare_scaled = partial(TwoStepScaled, prepare, ByOperations)
"""Merges by launches of `prepare`, then scales by tensor operations."""


class _Tracked(Kernels):
    """See `Kernels`. A unit takes the room that it needs."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        super().__init__(segments, device)
        self.table = torch.from_numpy(pack(segments))
        first, self.code_bytes = operators.tracked_sizes_cpu(self.table)
        self.units, self._first, self._names = int(first[-1]), [first.numpy()], [s.name for s in segments]

    def track(self, j: Journal) -> None:
        operators.track_cpu(self.table, j.codes, j.records, j.arena, j.mark, j.counter)

    def untrack(self, j: Journal) -> None:
        operators.untrack_cpu(self.table, j.codes, j.records, j.arena, j.mark, j.counter)

    def follows(self, before: Kernels) -> bool:
        return isinstance(before, _Tracked) and same_weights(self.table.numpy(), before.table.numpy())

    def retrack(self, before: Kernels, old: Journal, j: Journal) -> None:
        assert isinstance(before, _Tracked)
        operators.retrack_cpu(self.table, before.table, j.codes, j.records, j.arena, j.mark, j.counter, old.arena)

    def moved(self, moves: Moves) -> bool:
        table, to = self.table.numpy(), self.table.numpy().copy()
        for addresses, further in moves:
            for word in (SOURCE, DESTINATION):
                there = (table[:, word] >= addresses.start) & (table[:, word] < addresses.stop)
                to[there, word] = table[there, word] + further  # once, though weights share memory that moved
        table[:] = to
        return True


def prepare_tracked(segments: Sequence[Segment], device: torch.device) -> OnePassTracked:
    """Lay out one pass each way."""
    return OnePassTracked(_Tracked(segments, device))
