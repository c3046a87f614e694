"""What layers hold, to be compared: vLLM makes anew what it changes there, when it reloads a layer."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

import torch
from torch import nn

_COUNTED = {int, float}
"""What changes as a layer computes, and what no tensor takes the place of."""


class LayerSnapshot:
    """What layers and their methods hold at the moment beside parameters, buffers and numbers. No Python runs for each
    layer to compare it: some fifty microseconds for a hundred layers.

    Args:
        layers: which, with their methods and what is in these.
    """

    def __init__(self, layers: Iterable[Any]) -> None:
        own = list(layers)
        methods = [vars(layer.quant_method) for layer in own]
        kernels = [vars(part) for method in methods for part in method.values() if _is_object(part)]
        self._dicts = [*map(vars, own), *methods, *kernels]
        self._sizes = list(map(len, self._dicts))
        found = [
            (inside, key, value)
            for number, inside in enumerate(self._dicts)
            for key, value in inside.items()
            if (number >= len(own) or not key.startswith("_")) and type(value) not in _COUNTED
        ]
        self._targets = [inside for inside, _, _ in found], [key for _, key, _ in found]
        self._things = [value for _, _, value in found]  # alive, so that nothing else comes to lie there

    @property
    def unchanged(self) -> bool:
        """Whether that is what they hold now."""
        same = all(map(is_, map(dict.get, *self._targets), self._things))
        return same and list(map(len, self._dicts)) == self._sizes


def _is_object(part: Any) -> bool:
    return hasattr(part, "__dict__") and not isinstance(part, (type, nn.Module, torch.Tensor))
