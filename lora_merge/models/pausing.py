"""Models whose base weights hold adapters between two steps of training, and come back when somebody reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

from torch import nn

_pauses: WeakKeyDictionary[nn.Module, WeakMethod[Callable[[], object]]] = WeakKeyDictionary()


def pausing(module: nn.Module, pause: Callable[[], object] | None) -> None:
    """Note how the base comes back of an adapter layer, or of a module that holds all of a model's; None: it lies there
    again for good."""
    if pause is None:
        _pauses.pop(module, None)
    else:
        _pauses[module] = WeakMethod(pause)  # what it belongs to holds the model


def has_pause(module: nn.Module) -> bool:
    """Return True if the base of an adapter layer comes back by `pause`."""
    return module in _pauses and _pauses[module]() is not None


def pause(model: Any) -> None:
    """Bring the base of a model back that is being trained on merged weights, before it is read.

    Args:
        model: a module, or a list of modules.
    """
    if not _pauses:
        return
    parts = model if isinstance(model, list | tuple) else [model]
    for found in set(_found([part for part in parts if isinstance(part, nn.Module)])):
        if (bring_back := found()) is not None:
            bring_back()


def _found(modules: list[nn.Module]) -> Iterator[WeakMethod[Callable[[], object]]]:
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
