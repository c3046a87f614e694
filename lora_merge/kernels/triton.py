"""The Triton kernels (`triton_device.py`): one launch for each combination of dtypes and alignment in a table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .composed import Composed
from .segments import (
    COLS,
    DESTINATION,
    DESTINATION_STRIDE,
    DTYPES,
    LORA_A,
    LORA_A_STRIDE,
    LORA_B,
    LORA_B_STRIDE,
    RANK,
    RAW,
    ROWS,
    SOURCE,
    SOURCE_STRIDE,
    UNIT_BEGIN,
    UNITS_ACROSS,
    Segment,
    pack,
)
from .streams import Streams

TILE_ROWS, TILE_COLS = 64, 128
RANK_BLOCK = 32
COPY_BYTES = 16384
"""A tile of a byte copy, which has one row."""
COMPILED_WITH = {"num_warps": 4, "num_stages": 2}


def unavailable(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run on `device`; None if they can."""
    if device.type not in ("cuda", "cpu"):
        return "it needs CUDA tensors"
    if find_spec("triton") is None:
        return "triton is not installed"
    from . import triton_device

    interpreted = bool(triton_device.INTERPRETED.value)
    if device.type == "cpu":
        return None if interpreted else "on CPU tensors it needs TRITON_INTERPRET=1, set before triton is imported"
    if interpreted:
        return "TRITON_INTERPRET=1 is set, so that it reads CPU tensors only"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"it needs compute capability 8.0 or later, this GPU has {major}.{minor}"


class _Variant(NamedTuple):
    """One launch: a grid of units over the segments that one compiled kernel fits."""

    table: Tensor
    unit_segment: Tensor
    options: dict[str, Any]


class _Launch:
    def __init__(self, table: np.ndarray, device: torch.device) -> None:
        self.table, self.device = table, device
        self.variants = [_merge_variant(*group, device) for group in _groups(table)]
        self._streams = _streams(self.variants, device)

    def __call__(self, stochastic: bool, seed: int) -> None:
        from .triton_device import run_table

        self._streams.join()
        for table, unit_segment, options in self.variants:
            with torch.cuda.device_of(table):
                run_table[(len(unit_segment),)](table, unit_segment, seed, STOCHASTIC=stochastic, **options)

    def row_norms(self, out: Tensor) -> None:
        from .triton_device import row_norms

        variants, streams = self._norm_variants
        streams.join()
        for table, unit_segment, options in variants:
            with torch.cuda.device_of(table):
                row_norms[(len(unit_segment),)](table, unit_segment, out, **options)

    @cached_property
    def _norm_variants(self) -> tuple[list[_Variant], Streams]:
        table = self.table.copy()
        table[:, UNITS_ACROSS] = np.cumsum(table[:, ROWS]) - table[:, ROWS]
        variants = [_norm_variant(*group, self.device) for group in _groups(table)]
        return variants, _streams(variants, self.device)


def prepare(segments: Sequence[Segment], device: torch.device) -> _Launch:
    """Sort the table by launch, cut it into units of work, and put it on the device."""
    return _Launch(pack(segments), device)


def prepare_tracked(segments: Sequence[Segment], device: torch.device) -> Composed:
    """Block by block, by launches of `prepare`."""
    return Composed(prepare, segments)


def _groups(table: np.ndarray) -> list[tuple[np.ndarray, dict[str, Any]]]:
    """Parts of a table that one compiled kernel runs, and the constants it is compiled for."""
    import triton.language as tl

    dtypes = (tl.bfloat16, tl.float16, tl.float32, tl.int8, tl.int16, tl.int32, tl.int64)
    one_row = table[:, ROWS] == 1
    table[one_row, SOURCE_STRIDE] = table[one_row, DESTINATION_STRIDE] = 0  # unused: then they are aligned
    blocks = _ceil(table[:, RANK], RANK_BLOCK)
    align, lora_align = _alignment(table)
    keys, group_of = np.unique(np.stack([table[:, DTYPES], blocks, align, lora_align]), axis=1, return_inverse=True)
    groups = []
    for group, (codes, rank_blocks, a, b) in enumerate(keys.T.tolist()):
        labels = ("SOURCE_T", "DESTINATION_T", "LORA_A_T", "LORA_B_T")
        constants = {
            **{label: dtypes[codes >> 8 * i & 0xFF] for i, label in enumerate(labels)},
            "ALIGN": a,
            "LORA_ALIGN": b,
            "RANK_BLOCKS": rank_blocks,
            "BLOCK_K": RANK_BLOCK,
            **COMPILED_WITH,
        }
        groups.append((table[group_of.reshape(-1) == group], constants))
    return groups


def _alignment(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What each segment's row strides and columns are multiples of where 16-byte accesses fit; 1 where not.

    The first array speaks of source and destination, the second of the adapters.
    """

    def fits(address: int, stride: int) -> np.ndarray:
        return (table[:, address] % 16 == 0) & (table[:, stride + 1] == 1) & (table[:, stride] % elements == 0)

    raw = (table[:, DTYPES] & 0xFF) >= min(RAW.values())
    elements = np.where(raw, 16, 8)
    cols = table[:, COLS] % elements == 0
    weights = cols & fits(SOURCE, SOURCE_STRIDE) & fits(DESTINATION, DESTINATION_STRIDE)
    ranks = (table[:, RANK] > 0) & (table[:, RANK] % elements == 0)
    adapters = cols & ranks & fits(LORA_A, LORA_A_STRIDE) & fits(LORA_B, LORA_B_STRIDE)
    return np.where(weights, elements, 1), np.where(adapters, elements, 1)


def _merge_variant(table: np.ndarray, constants: dict[str, Any], device: torch.device) -> _Variant:
    bytewise = (int(table[0, DTYPES]) & 0xFF) == RAW[1]
    rows, cols = (1, COPY_BYTES) if bytewise else (TILE_ROWS, TILE_COLS)
    table[:, UNITS_ACROSS] = _ceil(table[:, COLS], cols)
    units = table[:, UNITS_ACROSS] * _ceil(table[:, ROWS], rows)
    return _place(table, units, {**constants, "TILE_M": rows, "TILE_N": cols}, device)


def _norm_variant(table: np.ndarray, constants: dict[str, Any], device: torch.device) -> _Variant:
    options = {**constants, "TILE_M": TILE_ROWS, "TILE_N": TILE_COLS}
    del options["DESTINATION_T"]
    return _place(table, _ceil(table[:, ROWS], TILE_ROWS), options, device)


def _place(table: np.ndarray, units: np.ndarray, options: dict[str, Any], device: torch.device) -> _Variant:
    table[:, UNIT_BEGIN] = np.cumsum(units) - units
    if not _capturing(device):
        unit_segment = torch.from_numpy(np.repeat(np.arange(len(table), dtype=np.int32), units))
        return _Variant(torch.from_numpy(table).to(device), unit_segment.to(device), options)
    # A copy captured in a CUDA graph would read memory of the host that is gone at the replay. Arguments stay.
    words = torch.empty(table.shape, dtype=torch.int64, device=device)
    for cell, word in zip(words.view(-1), table.reshape(-1).tolist(), strict=True):
        cell.fill_(word)
    unit_segment = torch.zeros(int(units.sum()), dtype=torch.int32, device=device)
    for segment, begin in enumerate(table[:, UNIT_BEGIN].tolist()):
        unit_segment[begin:].fill_(segment)
    return _Variant(words, unit_segment, options)


def _streams(variants: Sequence[_Variant], device: torch.device) -> Streams:
    return Streams(device, [t for v in variants for t in (v.table, v.unit_segment)])


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _ceil(x: np.ndarray, y: int) -> np.ndarray:
    return -(-x // y)
