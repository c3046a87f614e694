"""Window: a view of a tensor that is a box of it, dimensions perhaps in another order, some of size 1 left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..shards import Box


@dataclass(frozen=True, slots=True)
class Window:
    """Where a view lies in its tensor.

    Args:
        start, size: the box of the tensor.
        dims: for each dimension of the view that of the tensor; None for one of size 1 that the tensor lacks.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]
    dims: tuple[int | None, ...]

    @property
    def box(self) -> Box:
        return self.start, self.size

    def inner(self, box: Box) -> Box:
        """Return a box of the tensor, inside of the window, in coordinates of the view."""
        start = tuple(0 if d is None else box[0][d] - self.start[d] for d in self.dims)
        return start, tuple(1 if d is None else box[1][d] for d in self.dims)

    def outer(self, box: Box) -> Box:
        """Return a box of the view in coordinates of the tensor."""
        start, size = list(self.start), [1] * len(self.start)
        for dim, first, count in zip(self.dims, *box, strict=True):
            if dim is not None:
                start[dim], size[dim] = self.start[dim] + first, count
        return tuple(start), tuple(size)

    def unfold(self, view: Tensor) -> Tensor:
        """Return something laid out as (a box of) the view, with the dimensions of the tensor."""
        for h in reversed([h for h, d in enumerate(self.dims) if d is None]):
            view = view.select(h, 0)
        dims = [d for d in self.dims if d is not None]
        view = view.permute([dims.index(d) for d in sorted(dims)])
        for d in range(len(self.start)):
            if d not in dims:
                view = view.unsqueeze(d)
        return view

    def fold(self, tensor: Tensor) -> Tensor:
        """Undo `unfold`."""
        dims = [d for d in self.dims if d is not None]
        for d in reversed(range(len(self.start))):
            if d not in dims:
                tensor = tensor.select(d, 0)
        order = sorted(dims)
        tensor = tensor.permute([order.index(d) for d in dims])
        for h, dim in enumerate(self.dims):
            if dim is None:
                tensor = tensor.unsqueeze(h)
        return tensor


def window_of(
    view: tuple[int, Sequence[int], Sequence[int]], shape: Sequence[int], stride: Sequence[int]
) -> Window | None:
    """Return the window of a view `(offset, shape, stride)` of a tensor of this shape and stride; None where it is no
    box."""
    offset, sizes, steps = view
    same = offset == 0 and tuple(sizes) == tuple(shape)
    if same and all(n == 1 or a == b for n, a, b in zip(sizes, steps, stride, strict=True)):
        return Window((0,) * len(shape), tuple(shape), tuple(range(len(shape))))
    start, size = [0] * len(shape), [1] * len(shape)
    by_stride = sorted((dim for dim, n in enumerate(shape) if n > 1), key=lambda dim: -stride[dim])
    for dim in by_stride:
        start[dim], offset = divmod(offset, stride[dim])
    dims: list[int | None] = []
    for n, step in zip(sizes, steps, strict=True):
        found = [d for d in range(len(shape)) if shape[d] > 1 and stride[d] == step and d not in dims] if n > 1 else []
        dims.append(found[0] if found else None)
        if n > 1:
            if not found:
                return None
            size[found[0]] = n
    if offset or any(s + n > whole for s, n, whole in zip(start, size, shape, strict=True)):
        return None
    return Window(tuple(start), tuple(size), tuple(dims))
