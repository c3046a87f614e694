"""Gradients of adapters on a weight that tensor parallelism has cut (`parallelize_module`).

PEFT's layer sees what its base takes and gives: local tensors, whole, cut or with a part of a sequence. The base itself
computes with DTensors, which say how they are cut. So adapters get their gradients there, by DTensors too, and each in
the placements of its parameter: whole on every rank where it is a plain tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

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


def of_linear(dy: Any, tensors: Sequence[Any], wants: Sequence[bool], scaling: float) -> tuple[Tensor | None, ...]:
    """Return the gradients of lora_A and lora_B; formulas of `straight.of_linear`.

    Args:
        dy: of the output of the base, a DTensor `[..., out]`.
        tensors: its input, a DTensor `[..., in]`; lora_A `[r, in]` and lora_B `[out, r]`, each a DTensor or whole.
        scaling: of their product.
    """
    x, lora_A, lora_B = tensors
    A, B = _on(x, lora_A), _on(x, lora_B)
    rows, gradient = x.flatten(0, -2).to(A.dtype), dy.flatten(0, -2).to(B.dtype)
    dA = _like(((gradient @ B).t() @ rows) * scaling, lora_A) if wants[1] else None
    dB = _like((gradient.t() @ (rows @ A.t())) * scaling, lora_B) if wants[2] else None
    return None, dA, dB


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
