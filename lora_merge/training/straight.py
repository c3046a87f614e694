"""Gradients of adapters whose product lies in the base weight already, straight through its rounding.

Inside, a layer computes `y = x W'^T` with `W' = round(W + scaling * lora_B @ lora_A)`. Autograd gives `dx = dy W'` by
itself. What is added here leaves `y` as it is and gives the factors theirs, as if W' were not rounded:

    dlora_B = scaling * dy^T (x lora_A^T)        dlora_A = scaling * (dy lora_B)^T x

in the dtype of the factors. As in mixed precision, these move by less than a step of W' can hold; W' follows when they
have moved far enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

Added: TypeAlias = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""What adapters add to a layer's output, from its input and their parameters."""


class Linear(torch.autograd.Function):
    """Pass `y` on, and give lora_A and lora_B of a linear layer their gradients.

    Args (of `apply`):
        y: output of the layer, `[..., out]`.
        x: its input, `[..., in]`.
        lora_A, lora_B: `[r, in]`, `[out, r]`.
        scaling: of their product.
        ready: called before the gradients of the layer's own weight and input are taken.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, lora_A: Tensor, lora_B: Tensor, scaling: float, ready: Callable[[], object]
    ) -> Tensor:
        ctx.save_for_backward(x, lora_A, lora_B)
        ctx.scaling, ctx.ready = scaling, ready
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.ready()
        x, lora_A, lora_B = ctx.saved_tensors
        rows, gradient = x.flatten(0, -2).to(lora_A.dtype), dy.flatten(0, -2).to(lora_B.dtype)
        dA = dB = None
        if ctx.needs_input_grad[2]:
            dA = (gradient @ lora_B).t() @ rows
            dA *= ctx.scaling
        if ctx.needs_input_grad[3]:
            dB = gradient.t() @ (rows @ lora_A.t())
            dB *= ctx.scaling
        return dy, None, dA, dB, None, None


class Embedding(torch.autograd.Function):
    """Pass `y` on, and give lora_embedding_A and lora_embedding_B their gradients.

    Args (of `apply`):
        y: output of the layer, `[..., out]`.
        ids: its input.
        lora_A, lora_B: `[r, vocabulary]`, `[out, r]`.
        scaling: of their product, with the layer's own scale.
        padding: the row that gets no gradient; None for none.
        ready: as of `Linear`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        ids: Tensor,
        lora_A: Tensor,
        lora_B: Tensor,
        scaling: float,
        padding: int | None,
        ready: Callable[[], object],
    ) -> Tensor:
        ctx.save_for_backward(ids, lora_A, lora_B)
        ctx.scaling, ctx.padding, ctx.ready = scaling, padding, ready
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.ready()
        ids, lora_A, lora_B = ctx.saved_tensors
        ids, gradient = ids.flatten(), dy.flatten(0, -2).to(lora_B.dtype) * ctx.scaling
        dA = dB = None
        if ctx.needs_input_grad[3]:
            dB = gradient.t() @ F.embedding(ids, lora_A.t())
        if ctx.needs_input_grad[2]:
            rows = gradient @ lora_B
            if ctx.padding is not None:
                rows = rows.masked_fill((ids == ctx.padding)[:, None], 0)
            dA = torch.zeros_like(lora_A).index_add_(1, ids, rows.t().to(lora_A.dtype))
        return dy, None, dA, dB, None, None, None


class Recomputed(torch.autograd.Function):
    """Pass `y` on, and give parameters the gradients that they have in what they add to it, computed in the backward
    pass.

    Args (of `apply`):
        y: output of the layer.
        x: its input.
        added: what is added.
        ready: as of `Linear`.
        parameters: of the adapters.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, added: Added, ready: Callable[[], object], *parameters: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        ctx.added, ctx.ready = added, ready
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.ready()
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            copies = [p.detach().requires_grad_(p.is_floating_point()) for p in parameters]
            y = ctx.added(x.detach(), copies)
        gradients = torch.autograd.grad(y, copies, dy.to(y.dtype), allow_unused=True)
        return dy, None, None, None, *gradients
