"""Which of swift's trainers are taken over: swift asks its `TrainerFactory` for the class of this name."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from ..options import switched_off
from .release import RELEASE

TAKEN = ("grpo", "gkd")
"""The types of training that have answers of a vLLM engine."""

_before: dict[str, str] = {}
"""Where swift, or a plugin that was imported before this one, has its trainers."""


def take_over() -> None:
    """Let swift's TrainerFactory find every kind of trainer in this module.

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
        _rebind_megatron()


def _rebind_megatron() -> None:
    """Let `megatron rlhf` find trainers that push, under the names of its own."""
    from .megatron import pushing

    trainers: Any = import_module("swift.megatron.trainers")
    for kind in TAKEN:
        name = f"Megatron{kind.upper()}Trainer"
        setattr(trainers, name, pushing(getattr(trainers, name)))


def __getattr__(kind: str) -> Any:
    """Return the trainer class for a type of training (`--rlhf_type`, or the task of `swift sft`)."""
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
