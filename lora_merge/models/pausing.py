"""Models whose base weights hold adapters between two steps of training, and come back when somebody reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

from torch import nn

from ..names import lineage

_TUNER_LAYER = "peft.tuners.tuners_utils.BaseTunerLayer"


class Trained(Protocol):
    """The training of a model on its merged weights.

    Attributes:
        rounding: of these.
    """

    rounding: str

    def pause(self) -> None:
        """Bring the base back."""

    def hold(self) -> bool:
        """Merge the adapters that act now, where the base weights do not hold them; return False where none acts."""


_trained: WeakKeyDictionary[nn.Module, ref[Trained]] = WeakKeyDictionary()
"""By adapter layer. A training holds the model, not the model its training."""


def note_training(layer: nn.Module, training: Trained | None) -> None:
    """Note which training the base of an adapter layer holds adapters for; None: for none any more."""
    if training is None:
        _trained.pop(layer, None)
    else:
        _trained[layer] = ref(training)


def is_trained(layer: nn.Module) -> bool:
    """Return True if the base of an adapter layer may hold adapters for a training."""
    return layer in _trained and _trained[layer]() is not None


def training_of(model: Any) -> Trained | None:
    """Return the training to which all adapter layers of a model belong; None where there is no such one."""
    if not _trained:
        return None
    layers = (module for module in _modules(model) if _TUNER_LAYER in lineage(type(module)))
    found = {_trained[layer]() if layer in _trained else None for layer in layers}
    return found.pop() if len(found) == 1 else None


def pause(model: Any) -> None:
    """Bring the base of a model back that is being trained on merged weights, before it is read.

    Args:
        model: a module, or a list of modules.
    """
    if not _trained:
        return
    for found in {_trained[module] for module in _modules(model) if module in _trained}:
        if (training := found()) is not None:
            training.pause()


def _modules(model: Any) -> Iterator[nn.Module]:
    for part in model if isinstance(model, list | tuple) else [model]:
        if isinstance(part, nn.Module):
            yield from part.modules()
