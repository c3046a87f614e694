"""Gradients of adapters whose product lies in the base weight already, straight through its rounding.

Inside, a layer computes `y = x W'^T` with `W' = round(c * (W + scaling * lora_B @ lora_A))`, where c is 1, or DoRA's
factor of each row: its magnitude over the row's norm. Autograd gives `dx = dy W'` by itself. What is added here leaves
`y` as it is and gives the factors theirs, as if W' were not rounded:

    dlora_B = scaling * (c dy)^T (x lora_A^T)        dlora_A = scaling * ((c dy) lora_B)^T x

in the dtype of the factors. As in mixed precision, these move by less than a step of W' can hold; W' follows when they
have moved far enough. The norm counts as a constant (Liu et al. 2024, section 4.3), as in PEFT:

    dmagnitude = sum(dy * y) / magnitude

Nobody may differentiate such a backward pass (`create_graph`): that W' depends on the factors is not in its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .products import dots, factor_gradients, times

Added: TypeAlias = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""What adapters add to a layer's output, from its input and their parameters."""


class Zeros(NamedTuple):
    """Rows whose magnitude is 0, so that the merged weight says nothing of them.

    Args:
        numbers: theirs.
        outputs: returns `[..., rows]`, their outputs with a magnitude of 1, from the layer's input.
    """

    numbers: Tensor
    outputs: Callable[[Tensor], Tensor]


class Rows(NamedTuple):
    """DoRA's rows of one merged weight.

    Args:
        factor: float32 `[out]`, magnitude over norm.
        zeros: None: no row has the magnitude 0.
    """

    factor: Tensor
    zeros: Zeros | None = None


Gradients: TypeAlias = Callable[[Tensor, Sequence[Tensor], Sequence[bool]], Sequence[Tensor | None]]
"""Returns the gradients of some tensors, from that of a layer's output, these tensors, and which of them are wanted."""


class Attached(torch.autograd.Function):
    """Pass `y` on, and give tensors their gradients, as one of the functions below computes them.

    Args (of `apply`):
        y: output of a layer, `[..., out]`.
        gradients: computes those of the tensors.
        ready: called before the gradients of the layer's own weight and input are taken.
        tensors: kept for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, gradients: Gradients, ready: Callable[[], object], *tensors: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.gradients, ctx.ready = gradients, ready
        return _passed(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.ready()
        with _exact(dy):
            return dy, None, None, *ctx.gradients(dy, ctx.saved_tensors, ctx.needs_input_grad[3:])


class Held:
    """The gradient of a layer's output, on its way from `Output` to `Input`, in one backward pass.

    Attributes:
        dy: the gradient.
        backward: PyTorch's number of the pass that has computed it.
    """

    dy: Tensor | None = None
    backward = -1


class Input(torch.autograd.Function):
    """Pass the input of a linear layer on, and give lora_A and lora_B their gradients once the layer's output and its
    input have theirs, those of `of_linear`. What it keeps is known before the layer computes, so that the forward that
    gradient checkpointing repeats ends before the last layer's product.

    Args (of `apply`):
        held: the same as `Output` has.
        x, lora_A, lora_B, bias, scaling: as of `of_linear`.
    """

    @staticmethod
    def forward(
        ctx: Any, held: Held, x: Tensor, lora_A: Tensor, lora_B: Tensor, bias: Tensor | None, scaling: float
    ) -> Tensor:
        ctx.save_for_backward(x, lora_A, lora_B)
        ctx.held, ctx.scaling = held, scaling
        # Who changed this view in place would change what the layers before have kept: PyTorch refuses that.
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        dy, ctx.held.dy = ctx.held.dy, None
        if dy is None or ctx.held.backward != this_backward():
            # A hook has kept the layer's input, which is differentiated in this pass and the output is not.
            return None, dx, None, None, None, None
        with _exact(dy):
            found = of_linear(dy, (*ctx.saved_tensors, None), (False, *ctx.needs_input_grad[2:5]), ctx.scaling)
        return None, dx, *found[1:], None


class Output(torch.autograd.Function):
    """Pass `y` on, and hold its gradient for `Input`.

    Args (of `apply`):
        held: as many as there are adapters.
        y, ready: as of `Attached`.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, held: Sequence[Held], ready: Callable[[], object]) -> Tensor:
        ctx.held, ctx.ready = held, ready
        return _passed(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.ready()
        for one in ctx.held:
            one.dy, one.backward = dy, this_backward()
        return dy, None, None


def of_linear(
    dy: Tensor, tensors: Sequence[Any], wants: Sequence[bool], scaling: float, rows: Rows | None = None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of lora_A and lora_B of a linear layer.

    Args:
        tensors: input `[..., in]`, lora_A `[r, in]`, lora_B `[out, r]`, and lora_B's bias `[out]`, of which no value
            counts.
        scaling: of their product.
        rows: DoRA's, or None.
    """
    x, lora_A, lora_B, _ = tensors
    inputs, gradient = _matrix(x), _matrix(dy)
    dA, dB = factor_gradients(inputs, gradient, lora_A, _scaled(lora_B, rows), (wants[1], wants[2]))
    dA = None if dA is None else dA.mul_(scaling)
    dB = None if dB is None else _scaled(dB, rows).mul_(scaling)
    dbias = gradient.sum(0, dtype=lora_B.dtype).mul_(scaling) if wants[3] else None
    return None, dA, dB, dbias


def of_embedding(
    dy: Tensor, tensors: Sequence[Tensor], wants: Sequence[bool], base: Any, scaling: float, rows: Rows | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of lora_embedding_A and lora_embedding_B.

    Args:
        tensors: ids, lora_A `[r, vocabulary]`, lora_B `[out, r]`.
        base: the `nn.Embedding`.
        scaling, rows: as of `of_linear`.
    """
    ids, lora_A, lora_B = tensors
    ids, gradient, dA, dB = ids.flatten(), _matrix(dy), None, None
    if wants[2]:
        dB = _scaled(times(gradient.t(), F.embedding(ids, lora_A.t())), rows).mul_(scaling)
        dB = embed_scaled(dB, base)
    if wants[1]:
        some = embed_scaled(times(gradient, _scaled(lora_B, rows)).mul_(scaling), base)
        padding = -1 if base.padding_idx is None else base.padding_idx
        dA = _sum_by_id(some.to(lora_A.dtype), ids, lora_A.shape[1], padding, base.scale_grad_by_freq).t()
    return None, dA, dB


def recomputed(dy: Tensor, tensors: Sequence[Tensor], wants: Sequence[bool], added: Added) -> tuple[Tensor | None, ...]:
    """Return the gradients of parameters in what they add to a layer's output, which is computed anew.

    Args:
        tensors: input of the layer, and the parameters of the adapters.
    """
    x, *parameters = tensors
    with torch.enable_grad():
        copies = [p.detach().requires_grad_(p.is_floating_point()) for p in parameters]
        y = added(x.detach(), copies)
        return None, *torch.autograd.grad(y, copies, dy.to(y.dtype), allow_unused=True)


class Magnitude(torch.autograd.Function):
    """Pass `y` on, and give DoRA's magnitude its gradient.

    Args (of `apply`):
        y: output of the layer.
        x: its input.
        magnitude: `out` elements, in any shape.
        bias: of the layer, `[out]`, or None.
        channels: the dimension of `y` that has the rows of the weight.
        rows: DoRA's.
        ready: as of `Attached`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor,
        magnitude: Tensor,
        bias: Tensor | None,
        channels: int,
        rows: Rows,
        ready: Callable[[], object],
    ) -> Tensor:
        out = _passed(y)
        ctx.save_for_backward(out, magnitude, bias, None if rows.zeros is None else x)
        ctx.channels, ctx.rows, ctx.ready = channels, rows, ready
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.ready()
        y, magnitude, bias, x = ctx.saved_tensors
        if not ctx.needs_input_grad[2]:
            return dy, None, None, None, None, None, None
        with _exact(dy):
            gradient = _matrix(dy.movedim(ctx.channels, -1))
            dm = dots(gradient, _matrix(y.movedim(ctx.channels, -1)), bias) / magnitude.flatten().to(gradient.device)
            if (zeros := ctx.rows.zeros) is not None:
                outputs = _matrix(zeros.outputs(x).movedim(ctx.channels, -1))
                dm[zeros.numbers] = dots(gradient[:, zeros.numbers], outputs)
        return dy, None, dm.to(magnitude).view(magnitude.shape), None, None, None, None


def of_embedding_rows(
    dy: Tensor, tensors: Sequence[Tensor], wants: Sequence[bool], base: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradient of rows of an embedding that were put in the place of others.

    Args:
        tensors: ids, the rows `[n, out]`, and their numbers, int64 `[n]`.
        base: the `nn.Embedding`.
    """
    ids, values, index = tensors
    ids = ids.flatten()
    numbers, order = index.sort()
    place = torch.searchsorted(numbers, ids).clamp_max(len(index) - 1)
    hit = numbers[place] == ids
    if base.padding_idx is not None:
        hit &= ids != base.padding_idx
    hits = hit.nonzero().flatten()
    some = embed_scaled(_matrix(dy)[hits].to(values.dtype), base)
    return None, _sum_by_id(some, order[place[hits]], len(index), -1, base.scale_grad_by_freq), None


def of_linear_rows(dy: Tensor, tensors: Sequence[Tensor], wants: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Return the gradient of rows of a linear layer's weight that were put in the place of others.

    Args:
        tensors: input `[..., in]`, the rows `[n, in]`, and their numbers, int64 `[n]`.
    """
    x, values, index = tensors
    some = _matrix(dy)[:, index].to(values.dtype)
    return None, times(_matrix(x).t(), some).t(), None


def this_backward() -> int:
    """Return PyTorch's number of the backward pass that this thread runs; -1 if it runs none."""
    found: int = torch._C._current_graph_task_id()
    return found


def embed_scaled(rows: Tensor, base: Any) -> Tensor:
    """Return rows times the factor of embeddings that have one (Gemma's)."""
    scale = getattr(base, "embed_scale", None)
    if scale is None:
        return rows
    return rows * (scale.to(rows.dtype) if isinstance(scale, Tensor) else scale)


def _passed(y: Tensor) -> Tensor:
    """Return `y`, for what is not a view to autograd: layers behind may change it in place."""
    found: Tensor = torch.ops.aten._unsafe_view(y, y.shape)
    return found


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _scaled(matrix: Tensor, rows: Rows | None) -> Tensor:
    """Return `[out, r]` with DoRA's factors of its rows."""
    return matrix if rows is None else (matrix * rows.factor.to(matrix.device)[:, None]).to(matrix.dtype)


def _exact(tensor: Tensor) -> torch.autocast:
    """Return a block without autocast: a backward pass may be called inside of it."""
    return torch.autocast(tensor.device.type, enabled=False)


def _sum_by_id(rows: Tensor, ids: Tensor, count: int, padding: int, by_frequency: bool) -> Tensor:
    """Return `[count, columns]`, the sum of the rows with each id; see `F.embedding` for `padding` and
    `by_frequency`."""
    found: Tensor = torch.ops.aten.embedding_dense_backward(rows, ids, count, padding, by_frequency)
    return found
