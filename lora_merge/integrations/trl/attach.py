"""The call that takes a TRL trainer over; everything is checked before the trainer is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, ref

from ...choices import Cache, Mode, Rounding, Train
from ...errors import InvalidInput
from ...models.plain import check_plain
from ...names import named_tensors, walk
from ...shards import quantised
from ..compat import TrainerRefused
from ..options import Options, switched_off
from .asynchronous import Asynchronous
from .check import check_comparable, watch
from .release import OFF, RELEASE, asynchronous, check_asynchronous, generation_of
from .rollout import Colocated, Rollout, Server

_attached: WeakKeyDictionary[Any, ref[Rollout]] = WeakKeyDictionary()
"""Engine (of a server: the `VLLMGeneration` that calls it) -> who brings it a policy."""


def attach(
    trainer: Any,
    *,
    mode: Mode | None = None,
    rounding: Rounding | None = None,
    check: float | bool | None = None,
    verify: bool | None = None,
    train: Train | None = None,
    share: bool | None = None,
    cache: Cache | None = None,
) -> Rollout | None:
    """Make each weight sync of a TRL trainer a push by `VllmSync`.

        from lora_merge.integrations.trl import attach

        trainer = GRPOTrainer(model=model, args=config, peft_config=lora)
        attach(trainer)
        trainer.train()

    The base is never written, and the engine answers only with what was pushed last.

    Call it on every rank after the trainer is made, before `train`. Arguments that are None are taken from the
    environment variables in brackets.

    Args:
        trainer: a GRPO, RLOO, Distillation, SDPO, GOLD, IW-OPD or SDFT trainer with `use_vllm=True`, an AsyncGRPO or
            AsyncDistillation trainer, or one that is derived from these.
        mode: "merged" or "adapter" (LORA_MERGE_MODE).
        rounding: of merged weights, "nearest" or "stochastic" (LORA_MERGE_ROUNDING).
        check: how far importance ratios may lie from 1; True is 0.02, False checks none (LORA_MERGE_CHECK).
        verify: whether each push compares checksums on both sides (LORA_MERGE_VERIFY).
        train: "adapters", as PEFT computes, or "merged": forward and backward compute with the weights that are pushed
            (`lora_merge.train_merged`), from the beginning of `train()` to its end (LORA_MERGE_TRAIN).
        share: whether trainer and colocated engine hold the weights once, as `VllmSync(share=True)`; switches
            train="merged" on (LORA_MERGE_SHARE). `engine_options(share=True)` starts an engine for it.
        cache: "reset" or "keep": what happens to the KV cache of requests that are under way, as for `VllmSync`; for
            asynchronous trainers (LORA_MERGE_CACHE).

    Returns:
        the object that replaces TRL's own sync: `report` of the last push, and `detach()`, which restores TRL's
        own sync. None where LORA_MERGE=0 leaves TRL's own way in place.

    Raises:
        TrainerRefused: the trainer cannot be taken over as it was started; names the setting to change. It is as
            before.
        InvalidInput: an argument that does not fit, or a model whose weights cannot be read (those that are
            quantised by some libraries can).
    """
    if switched_off():
        return None
    chosen = {"mode": mode, "rounding": rounding, "check": check, "verify": verify, "train": train}
    options = _options(chosen | {"share": share, "cache": cache})
    kind: type[Rollout]
    if asynchronous(trainer):
        check_asynchronous(trainer)
        generation, kind = trainer, Asynchronous
    else:
        generation = generation_of(trainer)
        kind = Colocated if generation.mode == "colocate" else Server
    engine = getattr(generation, "llm", generation)
    _check_alone(trainer, engine)
    _check_model(trainer)
    rollout = kind(trainer, generation, options)
    rollout.check()
    if options.check is not None:
        check_comparable(trainer, generation)
    trains = rollout.trains()
    rollout.install()
    if trains is not None:
        rollout.train_with(trains)
    vars(trainer).pop("_lora_merge_detached", None)
    if options.check is not None:
        watch(trainer, rollout, options.check)
    _attached[engine] = ref(rollout)
    RELEASE.announce(rollout.takes_over)
    if trains is not None:
        RELEASE.announce_training(trains.shared)
    return rollout


def attached(trainer: Any) -> Rollout | None:
    """Return what `attach` returned for a trainer, if it is taken over; else None."""
    generation = trainer if asynchronous(trainer) else getattr(trainer, "vllm_generation", None)
    rollout = None if generation is None else _rollout_of(getattr(generation, "llm", generation))
    return rollout if rollout is not None and rollout.trainer is trainer else None


def _options(chosen: Mapping[str, Any]) -> Options:
    """Return the options that were passed, and those of the environment for the rest."""
    passed = {name: value for name, value in chosen.items() if value is not None}
    if isinstance(check := chosen["check"], bool):
        passed["check"] = 0.02 if check else None
    if chosen["share"] and chosen["train"] == "adapters":
        raise InvalidInput("share=True trains on merged weights, and train='adapters' does not: leave train out")
    return replace(Options.from_environment(trains=True, shares=True), **passed)


def _rollout_of(engine: Any) -> Rollout | None:
    known = _attached.get(engine)
    rollout = None if known is None else known()
    return rollout if rollout is not None and rollout.attached else None


def _check_alone(trainer: Any, engine: Any) -> None:
    rollout = _rollout_of(engine)
    if rollout is None:
        return
    if rollout.trainer is trainer:
        raise TrainerRefused("this trainer was attached before: attach it once, where it is made")
    raise TrainerRefused(
        f"the engine of this trainer serves the policy of another one ({type(rollout.trainer).__name__}), which pushes "
        f"would overwrite: give each trainer an engine of its own, or detach() the other. {OFF}"
    )


def _check_model(trainer: Any) -> None:
    try:
        check_plain(walk(trainer.model), named_tensors(trainer.model, quantised.parameters))
    except InvalidInput as error:
        raise InvalidInput(
            f"{error}. In TRL: name a checkpoint of plain weights, with --load_in_4bit for QLoRA. {OFF}"
        ) from error
