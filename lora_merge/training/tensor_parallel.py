"""Gradients of adapters on a weight that tensor parallelism has cut (`parallelize_module`).

PEFT's layer sees what its base takes and gives: local tensors, whole, cut or with a part of a sequence. The base itself
computes with DTensors, which say how they are cut. So adapters get their gradients there, by DTensors too, and each in
the placements of its parameter: whole on every rank where it is a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..names import innermost
from ..shards import fsdp2


def is_cut(layer: Any, units: list[Any]) -> bool:
    """Return True if the base of a layer computes with a DTensor.

    Args:
        units: of FSDP2, which makes DTensors too, and gathers them before they are computed with.
    """
    weights = [p for p in innermost(layer).parameters(recurse=False) if fsdp2.is_dtensor_kind(type(p))]
    alone = fsdp2.sharded_alone(units)
    return any(id(weight) not in alone for weight in weights)


class Linear(torch.autograd.Function):
    """Pass `y` on, and give lora_A and lora_B their gradients; formulas of `straight.Linear`.

    Args (of `apply`):
        y: output of the base, a DTensor `[..., out]`.
        x: its input, a DTensor `[..., in]`.
        lora_A, lora_B: `[r, in]`, `[out, r]`, each a DTensor or whole.
        scaling: of their product.
        ready: as of `straight.Linear`.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, lora_A: Tensor, lora_B: Tensor, scaling: float, ready: Callable[[], object]
    ) -> Tensor:
        ctx.save_for_backward(x, lora_A, lora_B)
        ctx.scaling, ctx.ready = scaling, ready
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.ready()
        x, lora_A, lora_B = ctx.saved_tensors
        A, B = _on(x, lora_A), _on(x, lora_B)
        rows, gradient = x.flatten(0, -2).to(A.dtype), dy.flatten(0, -2).to(B.dtype)
        dA = dB = None
        if ctx.needs_input_grad[2]:
            dA = _like(((gradient @ B).t() @ rows) * ctx.scaling, lora_A)
        if ctx.needs_input_grad[3]:
            dB = _like((gradient.t() @ (rows @ A.t())) * ctx.scaling, lora_B)
        return dy, None, dA, dB, None, None


def _on(x: Any, parameter: Any) -> Any:
    """Return a parameter as a DTensor over the mesh of `x`."""
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(parameter, DTensor):
        return parameter
    return DTensor.from_local(parameter, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)


def _like(gradient: Any, parameter: Any) -> Tensor:
    """Return a gradient as its parameter lies."""
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(parameter, DTensor):
        found: Tensor = gradient.redistribute(parameter.device_mesh, parameter.placements)
        return found
    whole: Tensor = gradient.redistribute(placements=[Replicate()] * gradient.device_mesh.ndim).to_local()
    return whole
