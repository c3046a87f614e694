"""Which of verl's engines are taken over, and where verl looks for them."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Any

from ..compat import TrainerRefused
from ..options import switched_off
from .release import RELEASE, merges

_MODEL = "language_model"
_BACKENDS = ("fsdp", "fsdp2", "megatron")
_VENDOR = "nvidia"
_LEFT_ALONE = ("npu",)
_ADAPTER = "lora_merge.integrations.verl_engines.rollout.LoraMergeServerAdapter"
_NAMES = {
    "verl.workers.engine.base:EngineRegistry": ("register", "get_engine_cls"),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead": (
        "initialize",
        "train_batch",
        "get_per_tensor_param",
        "get_per_tensor_param_shard",
        "is_mp_src_rank_with_outputs",
        "_merged_lora_per_tensor_param",
    ),
    "verl.utils.fsdp_utils": ("offload_fsdp_model_to_cpu",),
    "verl.workers.rollout.base": ("_ROLLOUT_REGISTRY",),
    "verl.checkpoint_engine": ("CheckpointEngine", "CheckpointEngineRegistry"),
}

logger = logging.getLogger(__name__)


def take_over() -> None:
    """Register engines of this package in front of verl's own. Does nothing when called twice, or if LORA_MERGE=0.

    Raises:
        TrainerRefused: this release of verl lacks names that are used, or somebody else's engine is registered there.
        MissingExtra: verl is not installed.
    """
    if not switched_off():
        RELEASE.require(_NAMES)
        _register(only=None)
        from . import checkpoint_engine  # noqa: F401 - registers itself


def take_over_quietly() -> None:
    """Take over in verl's plugin, whose errors verl hides, and only for NVIDIA's accelerators, whose engines are verl's
    own.

    Where a release lacks a name, an engine that is to merge raises. Somebody else's engine is left alone, with a
    warning.
    """
    if switched_off():
        return
    try:
        RELEASE.require(_NAMES)
    except TrainerRefused as error:
        logger.warning("%s", error)
        with suppress(AttributeError, ImportError):  # without verl's registry a warning is all there can be
            _refuse_merging(error)
        return
    try:
        _register(only=_VENDOR)
    except TrainerRefused as error:
        logger.warning("lora_merge takes nothing of verl over: %s", error)


def place() -> tuple[str, str]:
    """Return the accelerator and its vendor for which verl looks up engines."""
    from verl.utils.device import get_device_name, get_vendor

    return os.getenv("VERL_ENGINE_DEVICE") or get_device_name(), os.getenv("VERL_ENGINE_VENDOR") or get_vendor()


def _register(only: str | None) -> None:
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    device, vendor = place()
    if device in _LEFT_ALONE or (only is not None and vendor != only):
        return
    for backend in _BACKENDS:
        engine = _engine(backend)
        try:
            current = EngineRegistry.get_engine_cls(_MODEL, backend)
        except (AssertionError, ValueError):  # not installed, or not for this accelerator
            continue
        if engine is None or current is engine:
            continue
        if current not in engine.__mro__:
            raise TrainerRefused(
                f"the engine of {backend} for {device} of {vendor} is {current.__module__}.{current.__qualname__}, "
                f"which is not verl's own: let it inherit from {engine.__mro__[1].__module__}."
                f"{engine.__mro__[1].__qualname__} first, or leave lora_merge out"
            )
        EngineRegistry.register(_MODEL, backend, device=device, vendor=vendor)(engine)
    # By name: vLLM is imported only where there are rollouts.
    if _ROLLOUT_REGISTRY[("vllm", "async")].startswith("verl."):
        _ROLLOUT_REGISTRY[("vllm", "async")] = _ADAPTER


def _refuse_merging(error: TrainerRefused) -> None:
    """Let verl's engines raise this if they are to merge."""
    from verl.workers.engine.base import EngineRegistry

    device, vendor = place()
    for backend in _BACKENDS if vendor == _VENDOR else ():
        try:
            current = EngineRegistry.get_engine_cls(_MODEL, backend)
        except (AssertionError, ValueError):
            continue

        def initialize(self: Any, own: Any = current.initialize) -> None:
            if merges(self.model_config, self.engine_config):
                raise error
            own(self)

        refusing = type(f"Refusing{current.__name__}", (current,), {"initialize": initialize})
        EngineRegistry.register(_MODEL, backend, device=device, vendor=vendor)(refusing)


def _engine(backend: str) -> type | None:
    """Return this package's engine; None where verl lacks what it is made of."""
    if backend == "megatron":
        try:
            from .megatron import LoraMergeMegatronEngine
        except ImportError:
            return None
        return LoraMergeMegatronEngine
    from .fsdp import LoraMergeFSDPEngine

    return LoraMergeFSDPEngine
