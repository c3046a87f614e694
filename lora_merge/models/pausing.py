"""Models whose base weights hold adapters between two steps of training: they come back when somebody reads them, and
are told what is served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

from torch import nn


class Pausing(Protocol):
    """What merges a model between two steps of its training."""

    def pause(self) -> None:
        """Bring the base back."""

    def serve(self, rounding: str, seed: int | None = None) -> None:
        """Compute with what is served from now on.

        Args:
            rounding: of what is served.
            seed: of what is served of the adapters as they are now; None where that comes later.

        Raises:
            InvalidInput: it is trained with another rounding.
        """


_pauses: WeakKeyDictionary[nn.Module, ref[Pausing]] = WeakKeyDictionary()


def pausing(module: nn.Module, training: Pausing | None) -> None:
    """Note what brings the base back of an adapter layer, or of a module that holds all of a model's; None: it lies
    there again for good."""
    if training is None:
        _pauses.pop(module, None)
    else:
        _pauses[module] = ref(training)  # it holds the model


def has_pause(module: nn.Module) -> bool:
    """Return True if the base of an adapter layer comes back by `pause`."""
    return module in _pauses and _pauses[module]() is not None


def pause(model: Any) -> None:
    """Bring the base of a model back that is being trained on merged weights, before it is read.

    Args:
        model: a module, or a list of modules.
    """
    for training in _trainings(model):
        training.pause()


def serve(model: Any, rounding: str, seed: int | None = None) -> None:
    """Tell what trains a model on merged weights what is served of it; see `Pausing.serve`."""
    for training in _trainings(model):
        training.serve(rounding, seed)


def _trainings(model: Any) -> list[Pausing]:
    """Return what is noted of a model, of its parts, or of a list of modules."""
    if not _pauses:
        return []
    parts = model if isinstance(model, list | tuple) else [model]
    found = dict.fromkeys(_found([part for part in parts if isinstance(part, nn.Module)]))
    return [training for one in found if (training := one()) is not None]


def _found(modules: list[nn.Module]) -> Iterator[ref[Pausing]]:
    """Yield what is noted of modules and of those in them; nothing is looked for below one of which something is."""
    seen = set(map(id, modules))
    while modules:
        module = modules.pop()
        if has_pause(module):
            yield _pauses[module]
            continue
        below = [child for child in module._modules.values() if child is not None and id(child) not in seen]
        seen.update(map(id, below))
        modules += below
