"""Products with a weight that holds adapters: gradients go to the factors, and none of the weight's size is made.

The weight is `W' = round(W + sum of scaling * left @ right)`, in the orientation in which it is multiplied, `y = x W'`.
Autograd's own way would be the gradient `x^T dy`, as large as the weight, projected on the factors. It is projected
before it is made, with r columns:

    dx = dy W'^T        dleft = scaling * x^T (dy right^T)        dright = scaling * (x left)^T dy
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Multiply: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""The caller's own product of an input and a plain weight."""


class Factors(NamedTuple):
    """What one adapter adds to a weight `[..., rows, columns]`: `scaling * left @ right`.

    Args:
        left: `[..., rows, r]`.
        right: `[..., r, columns]`.
    """

    left: Tensor
    right: Tensor
    scaling: float

    def transposed(self) -> Factors:
        return Factors(self.right.mT, self.left.mT, self.scaling)


def flat(factors: Sequence[Factors]) -> tuple[tuple[float, ...], list[Tensor]]:
    """Return scalings, and all tensors one after another, as the functions below take them."""
    return tuple(f.scaling for f in factors), [t for f in factors for t in (f.left, f.right)]


class Whole(torch.autograd.Function):
    """Return a weight as it lies, and project the gradient that comes for it on the factors.

    Args (of `apply`):
        weight: `[..., rows, columns]`.
        scalings, tensors: `flat` of what adapters add to it.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scalings: tuple[float, ...], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.scalings = scalings
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = []
        tensors = iter(ctx.saved_tensors)
        with torch.autocast(gradient.device.type, enabled=False):
            for number, (scaling, left, right) in enumerate(zip(ctx.scalings, tensors, tensors, strict=True)):
                wants_left, wants_right = ctx.needs_input_grad[2 + 2 * number : 4 + 2 * number]
                dleft = gradient @ right.mT.to(gradient.dtype) if wants_left else None
                dright = left.mT.to(gradient.dtype) @ gradient if wants_right else None
                found += [_scaled(dleft, left, scaling), _scaled(dright, right, scaling)]
        return gradient if ctx.needs_input_grad[0] else None, None, *found


class Product(torch.autograd.Function):
    """Return `x @ weight` as the caller multiplies them. The weight itself gets no gradient.

    Three forms, told apart by shapes:

        one matrix        x [..., rows]                  weight [rows, columns]
        batches           x [E, tokens, rows]            weight [E, rows, columns]
        groups            x [tokens, rows], by expert    weight [E, rows, columns], `ends`

    The first two take the products for gradients in the factors' dtype, groups in the dtype of dy, which is what the
    grouped product of a GPU has.

    Args (of `apply`):
        x: input.
        weight: plain.
        ends: of the groups, int32 `[E]`; None where there are no groups.
        multiply: the product.
        scalings, tensors: `flat` of what adapters add to the weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        ends: Tensor | None,
        multiply: Multiply,
        scalings: tuple[float, ...],
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends, *tensors)
        ctx.scalings = scalings
        return multiply(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends, *factors = ctx.saved_tensors
        found: list[Tensor | None] = []
        tensors = iter(factors)
        dy = dy.contiguous()  # grouped products take no expanded rows
        with torch.autocast(dy.device.type, enabled=False):
            dx = None
            if ctx.needs_input_grad[0]:
                dx = _times(dy, weight.mT.to(dy.dtype), ends).to(x.dtype)
            for number, (scaling, left, right) in enumerate(zip(ctx.scalings, tensors, tensors, strict=True)):
                wants_left, wants_right = ctx.needs_input_grad[5 + 2 * number : 7 + 2 * number]
                dleft = _projected(x, dy, right, ends) if wants_left else None
                dright = _projected(dy, x, left.mT, ends) if wants_right else None
                dright = None if dright is None else dright.mT
                found += [_scaled(dleft, left, scaling), _scaled(dright, right, scaling)]
        return dx, None, None, None, None, *found


def _projected(rows: Tensor, columns: Tensor, factor: Tensor, ends: Tensor | None) -> Tensor:
    """Return `rows^T (columns factor^T)`.

    Args:
        rows: `[..., n]`, the side that the result keeps.
        columns: `[..., m]`.
        factor: `[..., r, m]`.

    Returns:
        `[..., n, r]`.
    """
    if ends is None:
        rows, columns = rows.to(factor.dtype), columns.to(factor.dtype)
        if factor.ndim == 2:
            rows, columns = rows.flatten(0, -2), columns.flatten(0, -2)
        return rows.mT @ (columns @ factor.mT)
    rank = factor.shape[-2]
    narrow = _grouped(columns.to(rows.dtype), _aligned(factor.to(rows.dtype)).mT, ends)
    return _grouped(rows.t(), narrow, ends)[..., :rank]


def _times(x: Tensor, weight: Tensor, ends: Tensor | None) -> Tensor:
    return x @ weight if ends is None else _grouped(x, weight, ends)


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    found: Tensor = torch._grouped_mm(x, weight, offs=ends)
    return found


def _aligned(factor: Tensor) -> Tensor:
    """Return a factor `[E, r, m]` as grouped products want it: rows that begin at multiples of 16 bytes, and so many
    of them that rows of a product with it do too."""
    at_once = 16 // factor.element_size()
    return F.pad(factor, (0, 0, 0, -factor.shape[-2] % at_once)).contiguous()


def _scaled(gradient: Tensor | None, factor: Tensor, scaling: float) -> Tensor | None:
    return None if gradient is None else gradient.to(factor.dtype) * scaling
