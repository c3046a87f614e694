"""LORA_MERGE=1: attaches TRL's trainers without a call in the script, for runs by TRL's command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, get_args

from ...engine.vllm.stand_in import stands_in
from ...shards.bitsandbytes import bits
from ..compat import TrainerRefused
from ..options import Options
from ..sharing import then_waiting
from .attach import attach, attached
from .engine import engine_options
from .release import GENERATION, OFF, asynchronous, own_rollout

_INSTALLED = "_lora_merge_attaches"


def install() -> None:
    """Attach, from now on, each trainer of TRL that rolls out by vLLM when it starts. In adapter mode its engine is
    started with `enable_lora`, and for a QLoRA policy unquantised. Harmless when called twice."""
    from transformers import Trainer

    if not hasattr(Trainer, _INSTALLED):
        setattr(Trainer, _INSTALLED, True)
        Trainer.__init__ = _then_prepare(Trainer.__init__)
        for name in ("train", "evaluate", "predict"):
            setattr(Trainer, name, _attached_first(getattr(Trainer, name)))


@stands_in
def _attached_first(method: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    detached = getattr(trainer, "_lora_merge_detached", False)
    if _rolls_out_by_trl(trainer) and attached(trainer) is None and not detached and attach(trainer) is not None:
        replaced = vars(trainer).get(method.__name__)  # by attaching
        if replaced is not None:
            return replaced(*args, **kwargs)
    return method(trainer, *args, **kwargs)


def _rolls_out_by_trl(trainer: Any) -> bool:
    """Return True if there is a sync to take over or to refuse. (Trainers built on TRL that roll out in their own way
    are left alone.)"""
    own = type(trainer).__module__.partition(".")[0] == "trl"
    # The asynchronous ones have no `use_vllm`: they know no other way.
    by_vllm = getattr(trainer.args, "use_vllm", own_rollout(trainer) is not None or asynchronous(trainer))
    return hasattr(trainer, "vllm_generation") or (own and bool(by_vllm))


@stands_in
def _then_prepare(init: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
    init(trainer, *args, **kwargs)
    if GENERATION in sys.modules:  # the trainer makes one of it after this
        _prepare_engine(import_module(GENERATION).VLLMGeneration)


def _prepare_engine(kind: Any) -> None:
    """Start engines with `enable_lora` in adapter mode, and unquantised where bitsandbytes quantises the trainer's
    base: a push brings what the codes stand for, and the adapters. TRL has no flags for these."""
    if _INSTALLED not in vars(kind):
        setattr(kind, _INSTALLED, True)
        kind._init_vllm = _with_options(kind._init_vllm)


@stands_in
def _with_options(start: Callable[[Any], None], generation: Any) -> None:
    options: dict[str, Any] = {}
    colocated = generation.mode == "colocate"
    if colocated and any(bits(module) for module in generation.model.modules()):
        options["quantization"] = None
    chosen = Options.from_environment(trains=True, shares=True)
    if colocated and chosen.mode == "adapter":
        options |= {"enable_lora": True, "max_lora_rank": max_lora_rank(generation.model)}
    with engine_options(**options):
        (then_waiting(start) if colocated and chosen.share else start)(generation)


def max_lora_rank(model: Any) -> int:
    """Return the least `max_lora_rank` of vLLM's that takes a model's active adapters side by side as one.

    Raises:
        TrainerRefused: there is none, or no adapter.
    """
    from vllm.config.lora import MaxLoRARanks

    configs = getattr(model, "peft_config", {})
    active = getattr(model, "active_adapters", ()) if configs else ()
    names = active() if callable(active) else active  # transformers has a method of this name, PEFT a property
    rank = sum(max(configs[name].r, *(configs[name].rank_pattern or {"": 0}).values()) for name in names)
    if not rank:
        raise TrainerRefused(f"LORA_MERGE_MODE=adapter needs an adapter: pass a LoRA configuration (--use_peft). {OFF}")
    sizes = [size for size in get_args(MaxLoRARanks) if size >= rank]
    if not sizes:
        raise TrainerRefused(
            f"vLLM serves no adapter of rank {rank}: choose a lower --lora_r, or LORA_MERGE_MODE=merged. {OFF}"
        )
    return min(sizes)
