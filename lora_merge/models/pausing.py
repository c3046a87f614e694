"""Models whose base weights hold adapters between two steps of training, and come back when somebody reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

from torch import nn

_pauses: WeakKeyDictionary[nn.Module, WeakMethod[Callable[[], object]]] = WeakKeyDictionary()


def pausing(module: nn.Module, pause: Callable[[], object] | None) -> None:
    """Note how the base of an adapter layer comes back; None: it lies there again for good."""
    if pause is None:
        _pauses.pop(module, None)
    else:
        _pauses[module] = WeakMethod(pause)  # what it belongs to holds the model


def has_pause(module: nn.Module) -> bool:
    """Return True if the base of an adapter layer comes back by `pause`."""
    return module in _pauses and _pauses[module]() is not None


def being_trained(model: Any) -> bool:
    """Return True if a model is being trained on merged weights.

    Args:
        model: a module, or a list of modules.
    """
    return bool(_pauses) and any(map(has_pause, _modules(model)))


def pause(model: Any) -> None:
    """Bring the base of a model back that is being trained on merged weights, before it is read.

    Args:
        model: a module, or a list of modules.
    """
    if not _pauses:
        return
    for found in {_pauses[module] for module in _modules(model) if module in _pauses}:
        if (bring_back := found()) is not None:
            bring_back()


def _modules(model: Any) -> Iterator[nn.Module]:
    for part in model if isinstance(model, list | tuple) else [model]:
        if isinstance(part, nn.Module):
            yield from part.modules()
