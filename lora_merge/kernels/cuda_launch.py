"""Launches of the compiled merge kernels: one for each combination of dtypes in a table, and for each of the two that
run it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import cuda_hopper as hopper
from . import operators
from .cuda_hopper import HopperVariant
from .cuda_repack import Repacked
from .cuda_table import BLOCKS, MAX_UNIT_ROWS, block_shape, ceil, cut, index_of, place, products, sources
from .layout import PART_VECTORS, WARP_COLS
from .segments import BF16, COLS, DTYPES, FP32, RANK, RAW, ROWS, UNIT_BEGIN

FIRST_RAW = min(RAW.values())


class Variant(NamedTuple):
    """One launch of the kernel for any GPU: the arguments of `launch_cuda` that stay the same from run to run."""

    table: Tensor
    unit_segment: Tensor
    counter: Tensor
    device: int
    source_dtype: int
    destination_dtype: int
    adapters: int
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


class Split(NamedTuple):
    """One launch that makes pairs of fp16 of float32 adapters: the arguments of `split_adapters`."""

    table: Tensor
    unit_segment: Tensor
    device: int
    n_units: int

    def __call__(self, stochastic: bool, seed: int) -> None:
        operators.split_adapters(*self)


AnyLaunch = Split | Variant | HopperVariant


class _Kind(NamedTuple):
    """What segments of one launch have in common: which kernel runs them, `sources`, dtype codes of their results and
    products."""

    hopper: bool
    source: int
    destination: int
    adapters: int


def launches(made: Repacked, device: torch.device, most: int, *, peer: bool = False) -> list[AnyLaunch]:
    """All that a table takes, one after the other, of up to so many segments each. `peer`: as of `variants`."""
    found = before(made, device, most)
    for begin in range(0, len(made.table), most):
        found += variants(made.table[begin : begin + most], device, peer=peer)
    return found


def before(made: Repacked, device: torch.device, most: int) -> list[AnyLaunch]:
    """Those that lay out its adapters."""
    found: list[AnyLaunch] = []
    for begin in range(0, len(made.splits), most):
        found.append(_split(made.splits[begin : begin + most], device))
    for begin in range(0, len(made.copies), most):
        found += variants(made.copies[begin : begin + most], device)
    return found


def _split(table: np.ndarray, device: torch.device) -> Split:
    units = ceil(table[:, ROWS], PART_VECTORS)
    table[:, UNIT_BEGIN] = np.cumsum(units) - units
    return Split(*place(table, units, device), index_of(device), int(units.sum()))


def variants(table: np.ndarray, device: torch.device, *, peer: bool = False) -> list[Variant | HopperVariant]:
    """A launch for each kind of segment, the largest first; raw copies ride along with it.

    Args:
        peer: sources lie in the memory of another GPU, which only the kernel for any GPU reads.
    """
    source, destination = sources(table), table[:, DTYPES] >> 8 & 0xFF
    raw = table[:, DTYPES] & 0xFF >= FIRST_RAW
    merges, copies = table[~raw], table[raw]
    serves = np.zeros(len(table), dtype=bool) if peer else hopper.serves(table, device)
    kinds = np.stack([serves, source, destination, products(table)], axis=1)[~raw]
    found, kind_of = np.unique(kinds, axis=0, return_inverse=True)
    size = np.bincount(kind_of.reshape(-1), weights=merges[:, ROWS] * merges[:, COLS], minlength=len(found))
    made: list[Variant | HopperVariant] = []
    for i in np.argsort(-size, kind="stable") if len(found) else []:
        kind = _Kind(bool(found[i, 0]), *map(int, found[i, 1:]))
        made.append(_variant(merges[kind_of.reshape(-1) == i], copies, kind, device))
        copies = copies[:0]
    if len(copies):
        made.append(_variant(merges, copies, _Kind(False, BF16, BF16, BF16), device))
    return made


def _variant(merges: np.ndarray, copies: np.ndarray, kind: _Kind, device: torch.device) -> Variant | HopperVariant:
    max_rank = int(merges[:, RANK].max(initial=0))
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if kind.hopper:
        tiles = hopper.tiles(max_rank, kind.adapters, device)
        rows = hopper.unit_rows(max_rank, kind.adapters, hopper.are_large(merges, processors))
        made = cut(merges, copies, tiles.strip_cols, rows, processors, device)
        maps = hopper.maps(made.host_table, kind.adapters, made.table.device)
        return HopperVariant(
            made.table, made.unit_segment, maps, made.counter, made.device, kind.source, kind.adapters, made.n_units,
            made.n_raw_units, made.rows_per_unit, *tiles, max_rank,
        )  # fmt: skip
    element_bytes = 4 if FP32 in (kind.source & 0xFF, kind.destination) else 2
    shape = block_shape(max_rank, kind.adapters, element_bytes, merges, device)
    made = cut(merges, copies, WARP_COLS * shape.col_warps, MAX_UNIT_ROWS, BLOCKS * processors, device)
    return Variant(
        made.table, made.unit_segment, made.counter, made.device, kind.source, kind.destination, kind.adapters,
        made.n_units, made.n_raw_units, made.rows_per_unit, *shape, max_rank,
    )  # fmt: skip
