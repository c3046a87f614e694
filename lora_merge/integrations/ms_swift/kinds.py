"""Which of swift's trainers are taken over: swift asks its `TrainerFactory` for the class that is named there."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from ..options import switched_off
from ..takeover import Release, TrainerRefused, off

RELEASE = Release("ms-swift", "ms_swift", ("4.6.0",))
TAKEN = ("grpo", "gkd")
"""The types of training that have answers of a vLLM engine."""

_before: dict[str, str] = {}
"""Where swift, or a plugin that was imported before this one, has its trainers."""


def take_over() -> None:
    """Let swift's TrainerFactory find `kind` here, whatever `kind` of trainer it looks for.

    Raises:
        TrainerRefused: this release has no such factory.
    """
    if switched_off():
        return
    RELEASE.require({"swift.trainers:TrainerFactory": ("TRAINER_MAPPING", "get_trainer_cls")})
    from swift.trainers import TrainerFactory

    mapping = TrainerFactory.TRAINER_MAPPING
    _before.update({kind: where for kind, where in mapping.items() if not where.startswith(f"{__name__}.")})
    mapping.update({kind: f"{__name__}.{kind}" for kind in _before})
    if "swift.megatron" in sys.modules:
        _bar_megatron()


def _bar_megatron() -> None:
    """Let `megatron rlhf` find an error where it looks for a trainer that has answers of a vLLM engine."""
    trainers: Any = import_module("swift.megatron.trainers")
    for kind in TAKEN:
        name = f"Megatron{kind.upper()}Trainer"
        setattr(trainers, name, _Barred(trainers, name))


class _Barred:
    """In the place of a class of swift's Megatron trainers."""

    def __init__(self, module: Any, name: str) -> None:
        self._module, self._name = module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if switched_off():  # since
            return type(self._module).__getattr__(self._module, self._name)(*args, **kwargs)
        raise TrainerRefused(
            f"swift's {self._name} is not taken over: its models need TransformerEngine on GPUs, where nothing of this "
            f"has run yet. Leave the plugin out of --external_plugins, or train with `swift rlhf`. {off('ms-swift')}"
        )


def __getattr__(kind: str) -> Any:
    """The trainer class for a type of training (`--rlhf_type`, or the task of `swift sft`)."""
    if kind not in _before:
        raise AttributeError(f"module {__name__!r} has no attribute {kind!r}")
    module, _, name = _before[kind].rpartition(".")
    found = getattr(import_module(module), name)
    if switched_off():  # since
        return found
    if kind not in TAKEN:
        RELEASE.nothing(f"{kind} has no rollout engine; {' and '.join(TAKEN)} have one (--rlhf_type)")
        return found
    from .trainers import pushing

    return pushing(kind, found)
