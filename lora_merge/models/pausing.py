"""Models whose base weights hold adapters between two steps of training, and come back when somebody reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

from torch import nn

from ..choices import Rounding
from ..names import lineage
from .delta import Delta

_TUNER_LAYER = "peft.tuners.tuners_utils.BaseTunerLayer"


class Trained(Protocol):
    """The training of a model on its merged weights.

    Attributes:
        rounding: of these.
    """

    rounding: Rounding

    def pause(self) -> None:
        """Bring the base back."""

    def hold(self) -> bool:
        """Merge the adapters as they are now; return False where none acts."""

    def deltas(self) -> Sequence[Delta]:
        """Return what the adapters add that are merged."""


_trained: WeakKeyDictionary[nn.Module, ref[Trained]] = WeakKeyDictionary()
"""The training of each adapter layer, and of each module that holds all of a model's. A training holds the model; the
model does not hold it."""


def note_training(module: nn.Module, training: Trained | None) -> None:
    """Note which training the base of an adapter layer, or of all those in a module, holds adapters for; None: for none
    any more."""
    if training is None:
        _trained.pop(module, None)
    else:
        _trained[module] = ref(training)


def is_trained(module: nn.Module) -> bool:
    """Return True if a training is noted of an adapter layer, or of a module that holds all of a model's."""
    return module in _trained and _trained[module]() is not None


def training_of(model: Any) -> Trained | None:
    """Return the training to which all adapter layers of a model belong; None where there is no such one."""
    found = set(_trainings(model)) if _trained else set()
    return found.pop() if len(found) == 1 else None


def pause(model: Any) -> None:
    """Bring the base of a model back that is being trained on merged weights, before it is read.

    Args:
        model: a module, or a list of modules.
    """
    if not _trained:
        return
    for training in set(_trainings(model)):
        if training is not None:
            training.pause()


def _trainings(model: Any) -> Iterator[Trained | None]:
    """Yield the training of each module that has one, and None for each other adapter layer. What is below a module
    with a note is not looked at."""
    modules = [part for part in (model if isinstance(model, list | tuple) else [model]) if isinstance(part, nn.Module)]
    seen = set(map(id, modules))
    while modules:
        module = modules.pop()
        if is_trained(module):
            yield _trained[module]()
            continue
        if _TUNER_LAYER in lineage(type(module)):
            yield None
        below = [child for child in module._modules.values() if child is not None and id(child) not in seen]
        seen.update(map(id, below))
        modules += below
