"""Packed: a quantised weight seen as the tensor that it stands for.

`Codes` are decoded by kernels while they merge:

    value = round(code[q] * absmax[place // block])      4 bits: two codes a byte, the first one in the upper half
    value = round((q * absmax[place // block]) * (1 / 127))      int8

`place` counts the elements of the whole weight in their order; products are float32, rounded one by one, and the value
is rounded to the weight's dtype: bit by bit what bitsandbytes' `dequantize_4bit` and `int8_vectorwise_dequant` give.

What is `Called` no kernel reads: the library that quantised it decodes it, into memory that lies in front of the plan
(`in_reach` tells whether that is needed, `bring` does it).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..errors import InvalidInput

_AT_A_TIME = 1 << 22
"""Elements that are decoded at a time, where no kernel does it."""
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

    @property
    def device(self) -> torch.device:
        return self.data.device

    def decode(self, out: Tensor, places: Tensor) -> None:
        """Write the values at the places of a view into a tensor of its shape."""
        for part, to in _some(places, out, 0, _AT_A_TIME):
            place = torch.full((1,) * part.dim(), int(part.storage_offset()), device=self.device)
            for dim, (size, step) in enumerate(zip(part.shape, part.stride(), strict=True)):
                along = [1] * part.dim()
                along[dim] = size
                place = place + (torch.arange(size, device=self.device) * step).view(along)
            to.copy_(self.values(place))

    def values(self, place: Tensor) -> Tensor:
        """Return what the codes at some places (int64) stand for."""
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
        """Return what lies here, 1-D, or as a tensor of this shape, which may leave out codes at the end."""
        places = torch.empty(self.begin + self.count, dtype=torch.int8, device="meta")[self.begin :]
        if shape is not None:
            places = places[: torch.Size(shape).numel()].view(tuple(shape))
        return Packed(self, places)


@dataclass(frozen=True, slots=True, eq=False)
class Called:
    """Codes that lie here, and the call of their library that says what they stand for.

    Args:
        name: of the weight, for errors.
        tensors: live, plain, on one device: all that values are made of; the first one has the codes.
        shape, dtype: of the values, as the call returns them.
        values: the call: `values(tensors, begin, end)` are rows `begin` to `end`, `[end - begin, *shape[1:]]`. It holds
            no tensor.
        whole: it only decodes all rows at once.
    """

    name: str
    tensors: Sequence[Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Callable[[Sequence[Tensor], int, int], Tensor]
    whole: bool = False

    @property
    def address(self) -> int:
        """Where the codes begin: of no element."""
        return self.tensors[0].data_ptr()

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    def decode(self, out: Tensor, places: Tensor) -> None:
        """Write the values at the places of a view into a tensor of its shape; some rows are decoded at a time."""
        if not out.numel():
            return
        row = prod(self.shape[1:])
        down = max(range(places.dim()), key=lambda dim: (places.stride(dim), places.shape[dim]), default=0)
        # Along the view's longest steps, so that no row is decoded twice.
        for part, to in _some(places, out, down, sys.maxsize if self.whole else _AT_A_TIME):
            first = int(part.storage_offset())
            last = first + sum((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True))
            begin, end = (0, self.shape[0]) if self.whole else (first // row, last // row + 1)
            rows = self.values(self.tensors, begin, end)
            if rows.shape != (end - begin, *self.shape[1:]) or rows.dtype != self.dtype:
                raise InvalidInput(
                    f"{self.name}: its library dequantised rows {begin} to {end} to {rows.dtype} {list(rows.shape)}; "
                    f"expected {self.dtype} {[end - begin, *self.shape[1:]]}: load the base again"
                )
            rows = rows.contiguous()
            to.copy_(rows.as_strided(part.shape, part.stride(), rows.storage_offset() + first - begin * row))

    def tensor(self) -> Packed:
        """Return what lies here, as a tensor."""
        return Packed(self, torch.empty(self.shape, dtype=torch.int8, device="meta"))


def _some(places: Tensor, out: Tensor, dim: int, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of both, of `most` elements or one step along a dimension."""
    parts = -(-places.numel() // most) if places.dim() else 1
    if parts <= 1:
        return iter([(places, out)])
    return zip(places.chunk(parts, dim), out.chunk(parts, dim), strict=True)


class Packed(Tensor):
    """A view of a quantised weight, with the shape, strides and dtype of what it stands for. Its own views are such
    views; whatever computes with it gets the values, decoded there and then; it cannot be written.

    Args:
        codes: live.
        places: a tensor without memory, whose offset and strides say where in the weight each element is.
    """

    codes: Codes | Called
    places: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[Packed], codes: Codes | Called, places: Tensor) -> Packed:
        made: Packed = Tensor._make_wrapper_subclass(
            cls,
            places.shape,
            strides=places.stride(),
            storage_offset=places.storage_offset(),
            dtype=codes.dtype,
            device=codes.device,
        )
        made.codes, made.places = codes, places
        return made

    def __init__(self, codes: Codes | Called, places: Tensor) -> None: ...

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Packed({memory(self)[0].dtype} codes of {self.dtype} {list(self.shape)} on {self.device})"

    def data_ptr(self) -> int:
        """Return where the codes of the weight begin."""
        return self.codes.address

    @property
    def place(self) -> int:
        """Of the first element."""
        return int(self.places.storage_offset())

    def decoded(self) -> Tensor:
        """Return the values, in memory of their own."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self.codes.decode(out, self.places)
        return out

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
            seen = func(first.places, *args[1:], **kwargs)
            return tree_map(lambda view: Packed(codes, view) if isinstance(view, Tensor) else view, seen)
        decode: Callable[[Any], Any] = lambda value: value.decoded() if isinstance(value, Packed) else value  # noqa: E731
        return func(*tree_map(decode, tuple(args)), **tree_map(decode, dict(kwargs)))


def in_reach(tensor: Tensor, device: torch.device) -> bool:
    """Return True if kernels on a device read a tensor where it lies; others are copied there first."""
    return tensor.device == device and not (isinstance(tensor, Packed) and isinstance(tensor.codes, Called))


def bring(to: Tensor, source: Tensor) -> None:
    """Enqueue a copy of what a tensor stands for on the current stream."""
    if isinstance(source, Packed):
        source.codes.decode(to, source.places)
    else:
        to.copy_(source, non_blocking=True)


def made_of(tensor: Tensor) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return a function that makes a tensor again out of views of its `memory`, and keeps none of that."""
    if not isinstance(tensor, Packed):
        return itemgetter(0)
    codes, places = tensor.codes, tensor.places
    assert isinstance(codes, Called), "kernels read codes where they lie"
    bare = replace(codes, tensors=())
    return lambda tensors: Packed(replace(bare, tensors=tensors), places)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; of a quantised weight the codes are moved."""
    if tensor.device == device:
        return tensor
    if not isinstance(tensor, Packed):
        return tensor.to(device)
    c, to = tensor.codes, partial(Tensor.to, device=device)
    if isinstance(c, Called):
        return Packed(replace(c, tensors=[to(t) for t in c.tensors]), tensor.places)
    nested = c.nested and replace(
        c.nested, code=to(c.nested.code), absmax=to(c.nested.absmax), offset=to(c.nested.offset)
    )
    code = None if c.code is None else to(c.code)
    return Packed(replace(c, data=to(c.data), absmax=to(c.absmax), code=code, nested=nested), tensor.places)


def memory(tensor: Tensor) -> Sequence[Tensor]:
    """Return the plain tensors that a tensor is read from."""
    return tensor.codes.tensors if isinstance(tensor, Packed) else [tensor]


def read_bytes(tensor: Tensor) -> int:
    """Return how many bytes are read where a tensor is read once."""
    codes = tensor.codes if isinstance(tensor, Packed) else None
    if codes is None:
        return tensor.nbytes
    elements = tensor.numel()
    if isinstance(codes, Called):
        return sum(t.nbytes for t in codes.tensors) * elements // max(prod(codes.shape), 1)
    return codes.data.nbytes * elements // max(codes.count, 1) + elements // codes.block * codes.absmax.itemsize
