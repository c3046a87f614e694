"""Tensors of a base that an adapter's folder holds whole: those of `modules_to_save`, buffers among them, trained
biases, and what lies beside the adapter."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ..names import NamedTensor

_brought: WeakKeyDictionary[nn.Module, list[Tensor]] = WeakKeyDictionary()


def bring(model: nn.Module, tensors: Iterable[NamedTensor], names: Collection[str]) -> None:
    """Note that a folder holds some of a model's tensors whole; parameters among them require a gradient, as in
    training. Buffers have no such flag: a router's bias and the statistics of a norm are trained without a gradient.

    Args:
        model: that the folder was read onto.
        names: of those that the folder holds; tied ones are noted under each of their names.
    """
    tensors = list(tensors)
    held = {id(t.tensor) for t in tensors if t.name in names}
    for t in tensors:
        if id(t.tensor) in held:
            _brought.setdefault(model, []).append(t.tensor)
            if isinstance(t.tensor, nn.Parameter):
                t.tensor.requires_grad_()


def brought(model: nn.Module) -> list[Tensor]:
    """List the tensors that came whole from the folder that a model was read from; none of a model that trains."""
    return list(_brought.get(model, ()))
