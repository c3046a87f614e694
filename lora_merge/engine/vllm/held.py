"""What layers hold, to be compared: vLLM makes anew what it changes there, when it reloads a layer."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

import torch

_PLAIN = {bool, int, float, str, torch.dtype, torch.Size}


class Held:
    """What layers and their methods hold at the moment beside parameters, buffers, numbers and words. No Python runs
    for each layer to compare it: some fifty microseconds for a hundred layers.

    Args:
        layers: which, with their methods; what these hold is not looked into.
    """

    def __init__(self, layers: Iterable[Any]) -> None:
        self._dicts = [inside for layer in layers for inside in (vars(layer), vars(layer.quant_method))]
        self._sizes = list(map(len, self._dicts))
        found = [
            (inside, key, value)
            for inside in self._dicts
            for key, value in inside.items()
            if not key.startswith("_") and type(value) not in _PLAIN
        ]
        self._places = [inside for inside, _, _ in found], [key for _, key, _ in found]
        self._things = [value for _, _, value in found]  # alive, so that nothing else comes to lie there

    @property
    def same(self) -> bool:
        """Whether that is what they hold now."""
        same = all(map(is_, map(dict.get, *self._places), self._things))
        return same and list(map(len, self._dicts)) == self._sizes
