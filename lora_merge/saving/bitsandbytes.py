"""Bases that transformers has saved with bitsandbytes: weights in codes of 4 bits (NF4, FP4), or of 8 (LLM.int8).

    X                      codes, two a byte, as [n, 1] of any dtype (bnb_4bit_quant_storage); X mostly ends in weight
    X.absmax               a scale for each block of codes: float32, or uint8 with the following two
    X.nested_absmax, X.nested_quant_map    what these bytes stand for
    X.quant_map            what the 16 codes stand for
    X.quant_state.bitsandbytes__nf4        JSON: block sizes, shape, dtype, offset

    P.weight               int8 codes [out, in]
    P.SCB                  float32: the scale of each row
    P.weight_format        0: codes lie by rows

bitsandbytes is not needed for reading. Values are those of its `dequantize_4bit`, in the state's dtype, and of
`int8_vectorwise_dequant`, in float32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import InvalidInput
from ..kernels.packed import Codes, Nested
from ..kernels.segments import FLOATS
from .checkpoint import Checkpoint
from .chunks import Buffer, Rows, Take
from .decoded import Coded, Decoded, decoded, dtype_of_rest
from .format import Stored

STATE = ".quant_state.bitsandbytes__"
"""Between the name of a weight of 4 bits and its type, in the name of its state."""
_TYPES = ("nf4", "fp4")
_BESIDE = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_SCALES, _FORMAT = "SCB", "weight_format"


def read(raw: Checkpoint) -> Decoded:
    """Return the plain checkpoint that a base of bitsandbytes' stands for.

    Raises:
        InvalidInput: what says what a weight's codes stand for is missing, of another length, or not known; names it.
    """
    four = _states(raw)
    eight = {name: _beside_int8(raw, name) for name in _int8(raw)}
    beside = {f"{name}.{part}" for name in four for part in _BESIDE} | set(four.values())
    beside = (beside & raw.tensors.keys()).union(*eight.values())
    rest = [stored for name, stored in raw.tensors.items() if name not in beside and name not in four]
    dtype = dtype_of_rest(raw.config, rest)
    coded: dict[str, Coded] = {name: _four(raw, name, state) for name, state in four.items()}
    coded |= {name: _eight(raw, name, dtype) for name in eight}
    types = sorted({state.rpartition("__")[2] for state in four.values()} | ({"LLM.int8"} if eight else set()))
    return decoded(raw, coded, beside, " ".join(["bitsandbytes", *types]))


def _refuse(raw: Checkpoint, name: str, why: str) -> NoReturn:
    raise InvalidInput(f"{raw.folder}: {name}, quantised by bitsandbytes: {why}; save or fetch the base again")


def _values(raw: Checkpoint, name: str, begin: int, count: int) -> Tensor:
    """Return the elements of a tensor that lies in the files, 1-D."""
    stored = raw.tensors[name]
    found = torch.empty(count, dtype=stored.dtype, device="cpu")
    raw.read(name, begin * stored.dtype.itemsize, found)
    return found


def _bytes(raw: Checkpoint, name: str, begin: int, end: int, dtype: torch.dtype, take: Take) -> Buffer:
    """Return the bytes of a tensor, as of a dtype of one byte."""
    buffer = take((end - begin,), dtype)
    raw.read(name, begin, buffer.tensor)
    return buffer


# ---- 4 bits ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class _Four(Coded):
    """A weight of 4 bits.

    Args:
        block: codes that share a scale.
        code: float32 `[16]`.
        nested: what scales of 8 bits stand for, but for its absmax, which each chunk reads; None for float32.
    """

    block: int
    code: Tensor
    nested: Nested | None

    def chunk(self, raw: Checkpoint, rows: Rows, take: Take) -> Buffer:
        """Return codes from the block on in which the rows begin, as a weight of their own."""
        name = self.stored.name
        shape = self.shape[::-1] if self.turned else self.shape
        first, last = (0, prod(shape)) if self.turned else (rows.begin * shape[1], rows.end * shape[1])
        unit = self.block * (1 if self.nested is None else self.nested.block)
        zero = first // unit * unit  # the place that counts as the first
        buffer = _bytes(raw, name, first // 2, -(-last // 2), torch.uint8, take)
        blocks = zero // self.block, -(-last // self.block)
        absmax = _values(raw, f"{name}.absmax", blocks[0], blocks[1] - blocks[0])
        nested = self.nested
        if nested is not None:
            begin, end = blocks[0] // nested.block, -(-blocks[1] // nested.block)
            nested = replace(nested, absmax=_values(raw, f"{name}.nested_absmax", begin, end - begin))
        begin = first // 2 * 2 - zero
        codes = Codes(buffer.tensor, self.dtype, absmax, self.block, self.code, nested, begin)
        skipped = first - zero - begin  # a row of an odd number of codes may begin in the middle of a byte
        flat = codes.tensor()[skipped : skipped + last - first]
        values = flat.view(shape).t()[rows.begin : rows.end] if self.turned else flat.view(-1, shape[1])
        return Buffer(values, buffer.release)


def _states(raw: Checkpoint) -> dict[str, str]:
    """Return the names of the weights of 4 bits -> names of their states."""
    found: dict[str, str] = {}
    for name in raw.tensors:
        weight, state, kind = name.rpartition(STATE)
        if not state:
            continue
        if weight not in raw.tensors:
            _refuse(raw, weight, f"{name} says what its codes stand for, and they are not there")
        if weight in found:
            _refuse(raw, weight, f"it has two states, {found[weight]} and {name}")
        if kind not in _TYPES:
            _refuse(raw, weight, f"{name} is of type {kind!r}, expected nf4 or fp4")
        found[weight] = name
    for name in raw.tensors:
        weight, _, part = name.rpartition(".")
        if part in _BESIDE and weight in raw.tensors and weight not in found:
            _refuse(raw, weight, f"{name} is there, and no {weight}{STATE}nf4 or fp4")
    return found


def _four(raw: Checkpoint, name: str, state: str) -> _Four:
    said = _settings(raw, name, state)
    kind = state.rpartition("__")[2]
    if said.get("quant_type") != kind:
        _refuse(raw, name, f"{state} says quant_type {said.get('quant_type')!r}, expected {kind!r}")
    dtype = getattr(torch, str(said.get("dtype")), None)
    if dtype not in FLOATS:
        _refuse(raw, name, f"{state} says dtype {said.get('dtype')!r}, expected bfloat16, float16 or float32")
    shape = said.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(_positive(n) for n in shape):
        _refuse(raw, name, f"{state} says shape {shape!r}, expected [out, in]")
    block = _block(raw, name, state, said, "blocksize")
    stored, count = raw.tensors[name], prod(shape)
    if stored.nbytes != -(-count // 2):
        _refuse(raw, name, f"{stored.nbytes} bytes hold no {count} codes of 4 bits, a weight {shape} as {state} says")
    blocks = -(-count // block)
    double = f"{name}.nested_absmax" in raw.tensors or "nested_blocksize" in said
    _check(raw, name, "absmax", torch.uint8 if double else torch.float32, blocks)
    _check(raw, name, "quant_map", torch.float32, 16)
    nested = None
    if double:
        nested_block = _block(raw, name, state, said, "nested_blocksize")
        _check(raw, name, "nested_absmax", torch.float32, -(-blocks // nested_block))
        _check(raw, name, "nested_quant_map", torch.float32, 256)
        number = said.get("nested_offset")
        if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) < float("inf"):
            _refuse(raw, name, f"{state} says nested_offset {number!r}, expected a finite number")
        offset = torch.tensor([float(number)], dtype=torch.float32, device="cpu")
        code = _values(raw, f"{name}.nested_quant_map", 0, 256)
        nested = Nested(code, torch.empty(0, device="cpu"), nested_block, offset)
    code = _values(raw, f"{name}.quant_map", 0, 16)
    return _Four(stored, tuple(shape), dtype, dtype=dtype, block=block, code=code, nested=nested)


def _settings(raw: Checkpoint, name: str, state: str) -> Mapping[str, Any]:
    stored = raw.tensors[state]
    if stored.dtype != torch.uint8:
        _refuse(raw, name, f"{state} is {stored.dtype}, expected JSON in uint8")
    try:
        said = json.loads(bytes(_values(raw, state, 0, stored.nbytes).tolist()))
    except ValueError as error:
        _refuse(raw, name, f"{state} is no JSON ({error})")
    if not isinstance(said, dict):
        _refuse(raw, name, f"{state} is a {type(said).__name__}, expected an object of JSON")
    return said


def _positive(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def _block(raw: Checkpoint, name: str, state: str, said: Mapping[str, Any], key: str) -> int:
    block = said.get(key)
    if not _positive(block) or int(block) % 2:  # type: ignore[arg-type]
        _refuse(raw, name, f"{state} says {key} {block!r}, expected an even number of codes")
    return int(block)  # type: ignore[arg-type]


def _check(raw: Checkpoint, name: str, part: str, dtype: torch.dtype, count: int, of: str = "") -> Stored:
    """Raise unless a tensor beside a weight is there, of a dtype and a number of elements."""
    full = f"{of or name}.{part}"
    stored = raw.tensors.get(full)
    if stored is None:
        _refuse(raw, name, f"{full} is missing, expected {dtype} [{count}]")
    if stored.dtype != dtype or prod(stored.shape) != count:
        _refuse(raw, name, f"{full} is {stored.dtype} {list(stored.shape)}, expected {dtype} [{count}]")
    return stored


# ---- 8 bits ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class _Eight(Coded):
    """A weight of LLM.int8.

    Args:
        scales: name of its rows' scales.
    """

    scales: str

    def chunk(self, raw: Checkpoint, rows: Rows, take: Take) -> Buffer:
        """Return rows as a weight of their own; of a turned one all."""
        count, cols = self.stored.shape
        first, last = (0, count) if self.turned else rows
        buffer = _bytes(raw, self.stored.name, first * cols, last * cols, torch.int8, take)
        scales = _values(raw, self.scales, first, last - first)
        values = Codes(buffer.tensor, torch.float32, scales, max(cols, 1)).tensor((last - first, cols))
        return Buffer(values.t()[rows.begin : rows.end] if self.turned else values, buffer.release)


def _int8(raw: Checkpoint) -> list[str]:
    found = []
    for name, stored in raw.tensors.items():
        owner, _, part = name.rpartition(".")
        if part == _SCALES and f"{owner}.weight" not in raw.tensors:
            _refuse(raw, f"{owner}.weight", f"{name} scales its rows, and it is not there")
        if part == "weight" and stored.dtype == torch.int8:
            found.append(name)
        elif part == "weight" and f"{owner}.{_SCALES}" in raw.tensors:
            _refuse(raw, name, f"it is {stored.dtype} beside {owner}.{_SCALES}, expected int8")
    return found


def _beside_int8(raw: Checkpoint, name: str) -> set[str]:
    owner = name.removesuffix(".weight")
    return {f"{owner}.{part}" for part in (_SCALES, _FORMAT)} & raw.tensors.keys()


def _eight(raw: Checkpoint, name: str, dtype: torch.dtype) -> _Eight:
    owner, stored = name.removesuffix(".weight"), raw.tensors[name]
    if len(stored.shape) != 2:
        _refuse(raw, name, f"its codes are {list(stored.shape)}, expected [out, in]")
    _check(raw, name, _SCALES, torch.float32, stored.shape[0], of=owner)
    form = raw.tensors.get(f"{owner}.{_FORMAT}")
    if form is not None and int(_values(raw, form.name, 0, 1)[0]) != 0:
        _refuse(raw, name, f"{form.name} is not 0: its codes do not lie by rows")
    return _Eight(stored, stored.shape, dtype, scales=f"{owner}.{_SCALES}")
