"""Bases in FP8 with a scale for each block, as DeepSeek-V3 and Qwen3's FP8 checkpoints have it.

    P.weight               float8_e4m3fn [out, in]
    P.weight_scale_inv     float32, bfloat16 or float16 [blocks of rows, blocks of columns]

    value = float32(weight) * float32(scale of its block), in float32

config.json says `quantization_config: {"quant_method": "fp8", "weight_block_size": [128, 128]}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ..errors import InvalidInput
from ..kernels.segments import FLOATS
from ..models.plain import remedy
from .checkpoint import Checkpoint
from .chunks import Buffer, Rows, Take
from .decoded import QUANTIZED, Coded, Decoded, decoded, dtype_of_rest

_SCALE = "_scale_inv"
_INPUTS = (".activation_scale", ".input_scale")


def read(raw: Checkpoint) -> Decoded:
    """Return the plain checkpoint that a base of FP8 blocks stands for.

    Raises:
        InvalidInput: it is FP8 of another kind, or the scales of a weight are missing or of another size; names it.
    """
    block = _block(raw)
    coded: dict[str, Coded] = {}
    beside = {name for name in raw.tensors if name.endswith(f".weight{_SCALE}")}
    for name in sorted(beside):
        if name.removesuffix(_SCALE) not in raw.tensors:
            _refuse(raw, name.removesuffix(_SCALE), f"{name} scales its blocks, and it is not there")
    codes = [n for n, s in raw.tensors.items() if s.dtype.itemsize == 1 and s.dtype.is_floating_point]
    rest = [stored for name, stored in raw.tensors.items() if name not in beside and name not in codes]
    dtype = dtype_of_rest(raw.config, rest)
    for name in codes:
        coded[name] = _coded(raw, name, block, dtype)
    return decoded(raw, coded, beside, f"fp8 in blocks of {block[0]}x{block[1]}")


def _refuse(raw: Checkpoint, name: str, why: str) -> NoReturn:
    raise InvalidInput(f"{raw.folder}: {name}, in FP8: {why}; fetch the base again")


def _block(raw: Checkpoint) -> tuple[int, int]:
    said: Any = raw.config[QUANTIZED]
    size = said.get("weight_block_size")
    whole = isinstance(size, Sequence) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)
    inputs = next((name for name in raw.tensors if name.endswith(_INPUTS)), None)
    if not whole or inputs is not None or said.get("activation_scheme", "dynamic") != "dynamic":
        why = f"weight_block_size: {size}" if not whole else f"fixed scales of activations ({inputs or 'static'})"
        raise InvalidInput(
            f"{raw.folder}: the base is quantised (config.json says {QUANTIZED}: fp8) with {why}: of FP8, bases with a "
            f"scale for each block of a weight are read, and none for activations; {remedy('fp8')}"
        )
    return int(size[0]), int(size[1])


@dataclass(eq=False, kw_only=True)
class _Blocks(Coded):
    """A weight of FP8.

    Args:
        scales: name of its blocks' scales.
        block: rows and columns of a block.
    """

    scales: str
    block: tuple[int, int]

    def chunk(self, raw: Checkpoint, rows: Rows, take: Take) -> Buffer:
        cols = self.shape[1]
        high, wide = self.block
        codes = torch.empty(rows.end - rows.begin, cols, dtype=self.stored.dtype, device="cpu")
        raw.read(self.stored.name, rows.begin * cols, codes)
        buffer = take((rows.end - rows.begin, cols), torch.float32)
        values = buffer.tensor.copy_(codes)
        held = raw.tensors[self.scales]
        first, last = rows.begin // high, -(-rows.end // high)
        scales = torch.empty(last - first, held.shape[1], dtype=held.dtype, device="cpu")
        raw.read(self.scales, first * held.shape[1] * held.dtype.itemsize, scales)
        across = scales.float().repeat_interleave(wide, dim=1)[:, :cols]
        for number, scale in enumerate(across, start=first):
            begin, end = max(number * high, rows.begin), min((number + 1) * high, rows.end)
            values[begin - rows.begin : end - rows.begin].mul_(scale)
        return buffer

    def turn(self) -> None:
        """Do nothing: FP8 is that of linear layers as they are; there is no transposed one."""


def _coded(raw: Checkpoint, name: str, block: tuple[int, int], dtype: torch.dtype) -> _Blocks:
    stored, scales = raw.tensors[name], raw.tensors.get(f"{name}{_SCALE}")
    if stored.dtype != torch.float8_e4m3fn or len(stored.shape) != 2:
        _refuse(raw, name, f"it is {stored.dtype} {list(stored.shape)}, expected float8_e4m3fn [out, in]")
    wanted = tuple(-(-n // size) for n, size in zip(stored.shape, block, strict=True))
    if scales is None:
        _refuse(raw, name, f"{name}{_SCALE} is missing, expected float32 {list(wanted)}")
    if scales.dtype not in FLOATS or scales.shape != wanted:
        got = f"{scales.dtype} {list(scales.shape)}"
        _refuse(raw, name, f"{scales.name} is {got}, expected float32, bfloat16 or float16 {list(wanted)}")
    return _Blocks(stored, stored.shape, dtype, scales=scales.name, block=block)
