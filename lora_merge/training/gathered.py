"""Adapters whose parameters are not at hand in a layer's forward: FSDP1 and DeepSpeed ZeRO-3 gather them for a call of
their modules alone.

Their modules are called as PEFT calls them. What they give is thrown away, as it lies in the merged weight already; the
way back through them is kept. Hooks of whatever gathers and reduces then see what they see in PEFT's forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves

from ..names import innermost
from ..shards import zero3


class Carried(torch.autograd.Function):
    """Pass `y` on, and give `added`, which lies in `y` already, the same gradient.

    Args (of `apply`):
        y: output of a layer.
        added: what its adapters add to it, of the same shape.
        ready: called before the gradients of the layer's own weight and input are taken.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, added: Tensor, ready: Callable[[], object]) -> Tensor:
        ctx.ready, ctx.dtype = ready, added.dtype
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.ready()
        return dy, dy.to(ctx.dtype), None


class Input(torch.autograd.Function):
    """Pass the input of adapters on. It gets no gradient from them, as that of the merged weight is all of it; but it
    requires one where it did, which tells hooks when the backward pass of a module has ended."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> None:
        return None


def is_gathered(half: nn.Module) -> bool:
    """Return True if a lora_A or lora_B has to be called for its parameters to be at hand, or does more than multiply
    by them: something has hooks on it or is around it, or ZeRO-3 partitions it."""
    inner = innermost(half)
    hooks = inner._forward_hooks or inner._forward_pre_hooks
    return bool(inner is not half or hooks or any(map(zero3.is_managed, inner.parameters(recurse=False))))


def attach(y: Tensor, x: Tensor, layer: Any, adapter: str, scaling: float, ready: Callable[[], object]) -> Tensor:
    """Return a layer's output with the way back to an adapter, through its modules."""
    lora_A, lora_B = layer.lora_A[adapter], layer.lora_B[adapter]
    x = Input.apply(x)
    added = lora_B(lora_A(layer._cast_input_dtype(x, lora_A.weight.dtype))) * scaling
    return Carried.apply(y, added, ready)


def ask_first(output: Any, ready: Callable[[], object]) -> None:
    """Call `ready` when a backward pass reaches some of the tensors in a model's output."""
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: ready())
