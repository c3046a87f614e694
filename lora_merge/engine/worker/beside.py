"""Tensors that layers hold beside parameters and buffers: ALiBi's slopes, the weight of a norm that has none in the
checkpoint. Memory that is thrown away takes them along, engines keep buffers alone, and a push brings parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


class Beside:
    """Keeps tensors while their memory is unmapped."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, Tensor]] = []

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Copy these to the host's memory, and forget those before."""
        self._kept = [(tensor, tensor.to("cpu", copy=True)) for tensor in tensors]

    def forget(self) -> None:
        self._kept = []

    def bring_back(self) -> None:
        """Copy what was kept to where it was, now that its memory is mapped again."""
        with torch.inference_mode():  # SGLang makes some in that mode
            for tensor, copy in self._kept:
                tensor.copy_(copy)
        self._kept = []


def beside(model: nn.Module, engine: str, apart: tuple[type, ...] = ()) -> list[Tensor]:
    """Return the tensors that layers hold beside parameters and buffers, in memory of their own.

    Args:
        engine: the package whose objects in a layer (attention, kernels) are looked into.
        apart: classes of layers that are left out; what lies below them is not.
    """
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    modules = (module for module in model.modules() if not isinstance(module, apart))
    found = {id(t): t for module in modules for t in _held(module, f"{engine}.") if t.numel() and not t.is_meta}
    return [t for t in found.values() if t.untyped_storage().data_ptr() not in own]


def _held(module: nn.Module, engine: str) -> Iterator[Tensor]:
    for value in vars(module).values():
        if isinstance(value, Tensor):
            yield value
        elif type(value).__module__.startswith(engine) and not isinstance(value, nn.Module):
            yield from (inner for inner in getattr(value, "__dict__", {}).values() if isinstance(inner, Tensor))
