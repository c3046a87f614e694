"""Packed: a quantised weight seen as the tensor that it stands for, which kernels decode while they merge.

    value = round(code[q] * absmax[place // block])      4 bits: two codes a byte, the first one in the upper half
    value = round((q * absmax[place // block]) * (1 / 127))      int8

`place` counts the elements of the whole weight in their order; products are float32, rounded one by one, and the value
is rounded to the weight's dtype: bit by bit what bitsandbytes' `dequantize_4bit` and `int8_vectorwise_dequant` give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..errors import InvalidInput

_AT_A_TIME = 1 << 22
"""Elements that `Packed.decoded` works on at a time."""
INT8_STEP = 7.874015718698502e-3
"""1 / 127, which int8 codes are multiplied with."""


@dataclass(frozen=True, slots=True, eq=False)
class Nested:
    """What the bytes of a quantised absmax stand for: `code[byte] * absmax[number // block] + offset`.

    Args:
        code: float32 `[256]`.
        absmax: float32, one for each `block` bytes.
        offset: float32, one element.
    """

    code: Tensor
    absmax: Tensor
    block: int
    offset: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """Codes that lie here, and what they stand for; all tensors contiguous, on one device.

    Args:
        data: uint8 (two codes a byte) or int8, 1-D.
        dtype: to which values are rounded.
        absmax: of all blocks of the weight: float32, or uint8 with `nested`.
        block: elements that share one.
        code: float32 `[16]`: the values of the codes of 4 bits; None for int8.
        nested: what absmax stands for; None where it is float32.
        begin: place of the first code in `data`: even, for codes of 4 bits.
    """

    data: Tensor
    dtype: torch.dtype
    absmax: Tensor
    block: int
    code: Tensor | None = None
    nested: Nested | None = None
    begin: int = 0

    @property
    def count(self) -> int:
        """Codes in `data`."""
        return self.data.numel() * (1 if self.code is None else 2)

    @property
    def tensors(self) -> list[Tensor]:
        """All that values are made of."""
        nested = self.nested
        more = [] if nested is None else [nested.code, nested.absmax, nested.offset]
        return [self.data, self.absmax, *([] if self.code is None else [self.code]), *more]

    @property
    def address(self) -> int:
        """Where place 0 would lie."""
        return self.data.data_ptr() - (self.begin if self.code is None else self.begin // 2)

    def values(self, place: Tensor) -> Tensor:
        """What the codes at some places (int64) stand for."""
        scale = self._scale(place // self.block)
        place = place - self.begin
        if self.code is None:
            return (self.data[place].float() * scale * INT8_STEP).to(self.dtype)
        byte = self.data[place >> 1]
        q = torch.where(place & 1 == 0, byte >> 4, byte & 15)
        return (self.code[q.long()] * scale).to(self.dtype)

    def _scale(self, number: Tensor) -> Tensor:
        absmax, nested = self.absmax[number], self.nested
        if nested is None:
            return absmax
        return nested.code[absmax.long()] * nested.absmax[number // nested.block] + nested.offset

    def tensor(self, shape: Sequence[int] | None = None) -> Packed:
        """What lies here, 1-D, or as a tensor of this shape, which may leave out codes at the end."""
        places = torch.empty(self.begin + self.count, dtype=torch.int8, device="meta")[self.begin :]
        if shape is not None:
            places = places[: torch.Size(shape).numel()].view(tuple(shape))
        return Packed(self, places)


class Packed(Tensor):
    """A view of a quantised weight, with the shape, strides and dtype of what it stands for. Its own views are such
    views; whatever computes with it gets the values, decoded there and then; it cannot be written.

    Args:
        codes: live.
        places: a tensor without memory, whose offset and strides say where in the weight each element is.
    """

    codes: Codes
    _places: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[Packed], codes: Codes, places: Tensor) -> Packed:
        made: Packed = Tensor._make_wrapper_subclass(
            cls,
            places.shape,
            strides=places.stride(),
            storage_offset=places.storage_offset(),
            dtype=codes.dtype,
            device=codes.data.device,
        )
        made.codes, made._places = codes, places
        return made

    def __init__(self, codes: Codes, places: Tensor) -> None: ...

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Packed({self.codes.data.dtype} codes of {self.dtype} {list(self.shape)} on {self.device})"

    def data_ptr(self) -> int:
        """Where the codes of the weight begin."""
        return self.codes.address

    @property
    def place(self) -> int:
        """Of the first element."""
        return int(self._places.storage_offset())

    def decoded(self) -> Tensor:
        """The values, in memory of their own."""
        if self.dim() and self.shape[0] > 1 and self.numel() > _AT_A_TIME:
            out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            parts = -(-self.numel() // _AT_A_TIME)
            for part, to in zip(self.chunk(parts), out.chunk(parts), strict=True):
                to.copy_(part)
            return out
        place = torch.full((1,) * self.dim(), self.place, device=self.device)
        for dim, (size, step) in enumerate(zip(self.shape, self.stride(), strict=True)):
            along = [1] * self.dim()
            along[dim] = size
            place = place + (torch.arange(size, device=self.device) * step).view(along)
        return self.codes.values(place)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known = func._schema.arguments
        for argument, value in [*zip(known, args, strict=False), *((a, kwargs.get(a.name)) for a in known)]:
            if isinstance(value, Packed) and argument.alias_info is not None and argument.alias_info.is_write:
                raise InvalidInput(f"{func}: a quantised weight cannot be written; pass another destination")
        first = args[0] if args else None
        if isinstance(first, Packed) and known[0].alias_info is not None and func is not torch.ops.aten.view.dtype:
            codes = first.codes
            seen = func(first._places, *args[1:], **kwargs)
            return tree_map(lambda view: Packed(codes, view) if isinstance(view, Tensor) else view, seen)
        decode: Callable[[Any], Any] = lambda value: value.decoded() if isinstance(value, Packed) else value  # noqa: E731
        return func(*tree_map(decode, tuple(args)), **tree_map(decode, dict(kwargs)))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; of a quantised weight the codes are moved."""
    if tensor.device == device:
        return tensor
    if not isinstance(tensor, Packed):
        return tensor.to(device)
    c, to = tensor.codes, partial(Tensor.to, device=device)
    nested = c.nested and replace(
        c.nested, code=to(c.nested.code), absmax=to(c.nested.absmax), offset=to(c.nested.offset)
    )
    code = None if c.code is None else to(c.code)
    return Packed(replace(c, data=to(c.data), absmax=to(c.absmax), code=code, nested=nested), tensor._places)


def memory(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor is read from."""
    return tensor.codes.tensors if isinstance(tensor, Packed) else [tensor]


def read_bytes(tensor: Tensor) -> int:
    """That reading a tensor once takes."""
    if not isinstance(tensor, Packed):
        return tensor.nbytes
    codes = tensor.codes
    elements = tensor.numel()
    return codes.data.nbytes * elements // max(codes.count, 1) + elements // codes.block * codes.absmax.itemsize
