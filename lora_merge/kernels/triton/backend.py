"""The Triton kernels (`merge_kernels.py`): one launch for each combination of dtypes and alignment in a table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from ..scaled.two_step import ByOperations, TwoStepScaled
from ..segments import ROWS, UNITS_ACROSS, Segment, pack
from ..streams import Streams
from ..tracked.one_pass import OnePassTracked
from .table import Variant, groups, merge_variant, norm_variant, streams_of
from .tracked import TritonTracked


def unavailable(device: torch.device) -> str | None:
    """Return why the Triton kernels cannot run on `device`; None if they can."""
    if device.type not in ("cuda", "cpu"):
        return "it needs CUDA tensors"
    if find_spec("triton") is None:
        return "triton is not installed"
    from . import merge_kernels

    interpreted = bool(merge_kernels.INTERPRETED.value)
    if device.type == "cpu":
        return None if interpreted else "on CPU tensors it needs TRITON_INTERPRET=1, set before triton is imported"
    if interpreted:
        return "TRITON_INTERPRET=1 is set, so that it reads CPU tensors only"
    if torch.version.hip is not None:
        return None  # compiled for AMD's data centre GPUs in a test, run on none
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"it needs compute capability 8.0 or later, this GPU has {major}.{minor}"


class _Launch:
    def __init__(self, table: np.ndarray, device: torch.device) -> None:
        self.table, self.device = table, device
        self.variants = [merge_variant(*group, device) for group in groups(table)]
        self._streams = streams_of(self.variants, device)

    def __call__(self, stochastic: bool, seed: int) -> None:
        from .merge_kernels import run_table

        self._streams.join()
        for table, unit_segment, options, grid in self.variants:
            with torch.cuda.device_of(table):
                run_table[grid](table, unit_segment, len(unit_segment), seed, STOCHASTIC=stochastic, **options)

    def row_norms(self, out: Tensor) -> None:
        from .merge_kernels import row_norms

        variants, streams = self._norm_variants
        streams.join()
        for table, unit_segment, options, grid in variants:
            with torch.cuda.device_of(table):
                row_norms[grid](table, unit_segment, out, **options)

    @cached_property
    def _norm_variants(self) -> tuple[list[Variant], Streams]:
        table = self.table.copy()
        table[:, UNITS_ACROSS] = np.cumsum(table[:, ROWS]) - table[:, ROWS]
        variants = [norm_variant(*group, self.device) for group in groups(table)]
        return variants, streams_of(variants, self.device)


def prepare(segments: Sequence[Segment], device: torch.device) -> _Launch:
    """Sort the table by launch, cut it into units of work, and put it on the device."""
    return _Launch(pack(segments), device)


prepare_scaled = partial(TwoStepScaled, prepare, ByOperations)
"""Merges by launches of `prepare`, then scales by tensor operations."""


def prepare_tracked(segments: Sequence[Segment], device: torch.device) -> OnePassTracked:
    """Lay out one pass each way."""
    return OnePassTracked(TritonTracked(segments, device))
