"""Methods that must not be called on a model, or on its parts, while its base weights hold adapters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import compress, count, repeat
from operator import is_
from typing import Any

from torch import nn

from ..errors import AlreadyMerged
from ..names import lineage
from .peft.layer import TUNER_LAYER, peft_class

_SAVERS = (
    "save_pretrained",
    "push_to_hub",
    "save_checkpoint",
    "save_16bit_model",
    "save_fp16_model",
    "_consolidated_16bit_state_dict",
    "_zero3_consolidated_16bit_state_dict",
    "merge_and_unload",
    "unload",
    "add_adapter",
    "load_adapter",
    "add_weighted_adapter",
    "inject_adapter",
)
"""Methods of transformers, PEFT, diffusers and DeepSpeed that write a checkpoint, take the adapters off, or put more
on. (PEFT activates at its end what it has put on. Only that would be refused otherwise, and half of it would be there.
DeepSpeed's private ones are what transformers' Trainer and accelerate save.)"""
_DELETES = "delete_adapter"
"""A method of PEFT's models that asks for its own way back. Transformers' method of this name does without."""
_NONE = object()
"""Stands for an attribute that a module itself does not have."""


def refuse(*args: object, **kwargs: object) -> None:
    """Make a stand-in for a method that must not be called inside `merged`."""
    raise AlreadyMerged(
        "inside lora_merge.merged() the adapters are merged and the base is not at hand: leave the block before "
        "merge_adapter, unmerge_adapter, set_adapter, add_adapter, delete_adapter, disable_adapter or unload, and "
        "before save_pretrained or the like, of the model or of what is in it. MergedWeights streams the merged "
        "checkpoint"
    )


def refuse_copy(*args: object, **kwargs: object) -> None:
    """Make a stand-in for what copying and pickling ask of a module (`__getstate__`).

    A copy would keep merged weights, and PEFT's marks of them, for good: nothing takes them off it again. A shallow
    copy would share weights that go back, and its adapters would not act then.
    """
    raise AlreadyMerged(
        "inside lora_merge.merged() a module with adapters is neither copied (copy.deepcopy) nor pickled "
        "(torch.save of the module): the copy would hold merged weights for good. Copy it before or "
        "after the block; state_dict() gives the merged tensors, lora_merge.save_merged writes them as a checkpoint"
    )


@cache
def _refusing(kind: type) -> dict[str, Any]:
    """Return the replacements of the methods by which modules of a class save themselves, or delete adapters."""
    of_peft = peft_class(kind) != TUNER_LAYER and any(path.startswith("peft.") for path in lineage(kind))
    names = [*_SAVERS, _DELETES] if of_peft else _SAVERS
    return {name: refuse for name in names if callable(getattr(kind, name, None))}


def guarded(modules: Sequence[nn.Module]) -> list[tuple[Sequence[nn.Module], dict[str, Any]]]:
    """Return the modules that save themselves, class by class, with the replacements of their methods."""
    return [([modules[at] for at in numbers], new) for numbers, new in savers(modules)]


def savers(modules: Sequence[nn.Module]) -> list[tuple[list[int], dict[str, Any]]]:
    """Return the numbers of the modules that save themselves."""
    kinds: list[type] = list(map(type, modules))
    saving = filter(_refusing, dict.fromkeys(kinds))
    return [(list(compress(count(), map(is_, kinds, repeat(kind)))), _refusing(kind)) for kind in saving]


class Replaced:
    """Attributes of modules that are replaced for a while."""

    def __init__(self) -> None:
        self._before: list[tuple[list[dict[str, Any]], str, list[Any]]] = []

    def put(self, changes: Iterable[tuple[Sequence[nn.Module], dict[str, Any]]]) -> None:
        """Set attributes on some modules, the same on each; once, and none before all old values are known."""
        placed = [(list(map(vars, modules)), new) for modules, new in changes]
        for insides, new in placed:
            for key in new:
                self._before.append((insides, key, list(map(dict.get, insides, repeat(key), repeat(_NONE)))))
        for insides, new in placed:
            for inside in insides:
                inside.update(new)

    def back(self) -> None:
        """Set the old values again. May be called repeatedly."""
        for insides, key, values in self._before:
            if values.count(_NONE) == len(values):
                for inside in insides:
                    inside.pop(key, None)
                continue
            for inside, value in zip(insides, values, strict=True):
                if value is _NONE:
                    inside.pop(key, None)
                else:
                    inside[key] = value
        self._before = []
