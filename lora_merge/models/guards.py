"""What must not be called on a model, or below it, while its base weights hold adapters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..errors import AlreadyMerged

_SAVERS = (
    "save_pretrained",
    "push_to_hub",
    "save_checkpoint",
    "save_16bit_model",
    "save_fp16_model",
    "merge_and_unload",
    "unload",
)
"""Methods of transformers, PEFT, diffusers and DeepSpeed that write a checkpoint, or take the adapters off."""
_NONE = object()
"""Stands for an attribute that a module has not itself."""
_found: dict[type, dict[str, Any]] = {}


def refuse(*args: object, **kwargs: object) -> None:
    """Stands for a method that must not be called inside `merged`."""
    raise AlreadyMerged(
        "inside lora_merge.merged() the adapters are merged and the base is not at hand: leave the block before "
        "merge_adapter, unmerge_adapter, set_adapter, disable_adapter or unload, and before save_pretrained or the "
        "like, of the model or of what is in it. MergedWeights streams the merged checkpoint"
    )


def guarded(modules: Iterable[nn.Module]) -> Iterable[tuple[nn.Module, dict[str, Any]]]:
    """The modules that save themselves, each with what is to stand for those of its methods."""
    for module in modules:
        kind = type(module)
        if kind not in _found:
            _found[kind] = {name: refuse for name in _SAVERS if callable(getattr(kind, name, None))}
        if _found[kind]:
            yield module, _found[kind]


class Replaced:
    """Attributes of modules that are others for a while."""

    def __init__(self) -> None:
        self._before: list[tuple[dict[str, Any], str, Any]] = []

    def put(self, changes: Iterable[tuple[nn.Module, dict[str, Any]]]) -> None:
        """Set the attributes on the modules themselves; once, and none before all old ones are known."""
        changes = list(changes)
        for module, new in changes:
            for key in new:
                self._before.append((module.__dict__, key, module.__dict__.get(key, _NONE)))
        for module, new in changes:
            module.__dict__.update(new)

    def back(self) -> None:
        """As they were before. May be called again."""
        for inside, key, value in self._before:
            if value is _NONE:
                inside.pop(key, None)
            else:
                inside[key] = value
