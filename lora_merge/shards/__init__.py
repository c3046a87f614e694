"""Shard: which boxes of a tensor this rank holds, and where.

A layout (FSDP2, FSDP1, ZeRO-3, Megatron) is a file that says so for its tensors; everything behind it works on boxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""`(start, size)` of a box of a tensor, a number for each dimension."""
Address: TypeAlias = tuple[int, torch.device]


def here(t: Any) -> Any:
    """Return what lies on this rank of a tensor: of a DTensor its part, of a parameter of ZeRO-3 its partition."""
    local = getattr(t, "_local_tensor", None)
    if local is None:
        local = getattr(t, "ds_tensor", None)
    return t if local is None else local


def address(t: Tensor) -> Address:
    """Return where what is here of a tensor begins. Tensors that share memory have one address; one that is around
    others (of torchao's) has that of the first of them."""
    local = here(t)
    place = local.data_ptr()
    if not place and hasattr(local, "__tensor_flatten__"):
        (first, *_), _ = local.__tensor_flatten__()
        place = getattr(local, first).data_ptr()
    return place, local.device


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A box of a tensor that lies on this rank.

    Args:
        start: index of its first element in the whole tensor.
        tensor: live view of it, any strides; as many dimensions as the whole.
    """

    start: tuple[int, ...]
    tensor: Tensor

    @property
    def box(self) -> Box:
        return self.start, tuple(self.tensor.shape)

    def window(self, box: Box) -> Tensor | None:
        """Return a view of a box of the whole tensor; None where this piece does not hold all of it."""
        view = self.tensor
        for dim, (first, size, mine) in enumerate(zip(*box, self.start, strict=True)):
            if first < mine or first + size > mine + view.shape[dim]:
                return None
            view = view.narrow(dim, first - mine, size)
        return view


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """What this rank holds of one tensor.

    Args:
        shape, dtype: of the whole tensor.
        device: of the pieces; where there are none, of where they would be.
        pieces: disjoint boxes; none where this rank holds nothing of it.
        whole: the only piece is the whole tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    pieces: tuple[Piece, ...]
    whole: bool = False

    @property
    def box(self) -> Box:
        """The box of the whole tensor."""
        return (0,) * len(self.shape), self.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def key(self, *, turned: bool = False) -> tuple[Any, ...]:
        """Return where the pieces lie and what they are: what a plan depends on.

        Args:
            turned: of the transposed tensor.
        """
        way = slice(None, None, -1 if turned else 1)
        if self.whole:
            tensor = self.pieces[0].tensor
            return self.shape[way], self.dtype, tensor.data_ptr(), tensor.device, tensor.stride()[way]
        places = [
            (p.start[way], tuple(p.tensor.shape)[way], p.tensor.data_ptr(), p.tensor.device, p.tensor.stride()[way])
            for p in self.pieces
        ]
        return self.shape[way], self.dtype, *places

    @property
    def boxes(self) -> list[Box]:
        """Of the pieces; those that go on where another ends, along the first dimension, are one box with it."""
        boxes: list[Box] = []
        for start, size in sorted(piece.box for piece in self.pieces):
            if boxes and start:
                (row, *at), (rows, *wide) = boxes[-1]
                if row + rows == start[0] and at == list(start[1:]) and wide == list(size[1:]):
                    boxes[-1] = ((row, *at), (rows + size[0], *wide))
                    continue
            boxes.append((start, size))
        return boxes

    def window(self, box: Box) -> Tensor | None:
        """Return a view of a box of the whole tensor; None where no piece holds all of it."""
        views = (piece.window(box) for piece in self.pieces)
        return next((view for view in views if view is not None), None)

    def views(self, box: Box) -> list[tuple[tuple[int, ...], Box, Tensor]]:
        """Return what is here of a box of the whole tensor: of each view its start in the whole, and its box in the
        box."""
        found = []
        for piece in self.pieces:
            met = overlap(piece.box, box)
            view = None if met is None else piece.window(met)
            if met is not None and view is not None:
                inner = tuple(s - b for s, b in zip(met[0], box[0], strict=True))
                found.append((met[0], (inner, met[1]), view))
        return found


def whole(tensor: Tensor) -> Shard:
    """Return the shard of a tensor that lies here in full."""
    piece = Piece((0,) * tensor.dim(), tensor.detach())
    return Shard(tuple(tensor.shape), tensor.dtype, tensor.device, (piece,), True)


def overlap(a: Box, b: Box) -> Box | None:
    """Return the box that two boxes share; None where they do not meet."""
    start = tuple(map(max, a[0], b[0]))
    end = [min(i + n, j + m) for i, n, j, m in zip(*a, *b, strict=True)]
    size = tuple(e - s for s, e in zip(start, end, strict=True))
    return None if any(n <= 0 for n in size) else (start, size)


def numel(boxes: Sequence[Box]) -> int:
    return sum(prod(size) for _, size in boxes)


def cut(tensor: Tensor, box: Box) -> Tensor:
    """Return a view of a box of a tensor that lies here in full."""
    for dim, (first, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, first, size)
    return tensor


def flat_boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[Box, int]]:
    """Yield the boxes of elements `begin` to `end` (row-major) of a tensor, each with its first element's number.

    Three at most for a matrix: the end of a row, whole rows, the beginning of a row.
    """
    if begin >= end:
        return
    if not shape:
        yield ((), ()), begin
        return
    step = prod(shape[1:])
    first, last = -(-begin // step), end // step
    if first > last:  # inside of one slice
        yield from _inside(shape, begin // step, begin % step, end - begin // step * step, begin)
        return
    if begin < first * step:
        yield from _inside(shape, first - 1, begin % step, step, begin)
    if first < last:
        yield ((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])), first * step
    if last * step < end:
        yield from _inside(shape, last, 0, end - last * step, last * step)


def flat_pieces(shape: Sequence[int], begin: int, flat: Tensor) -> Iterator[Piece]:
    """Yield the pieces of a tensor whose elements (row-major), from number `begin` on, lie one after another in
    `flat`."""
    for (start, size), number in flat_boxes(shape, begin, begin + flat.numel()):
        yield Piece(start, flat[number - begin : number - begin + prod(size)].view(size))


def _inside(shape: Sequence[int], row: int, begin: int, end: int, number: int) -> Iterator[tuple[Box, int]]:
    for (start, size), at in flat_boxes(shape[1:], begin, end):
        yield ((row, *start), (1, *size)), number + at - begin
