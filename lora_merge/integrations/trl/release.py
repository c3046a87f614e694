"""The names of TRL that are used here, and the releases that are known to have them."""

from __future__ import annotations

from typing import Any

from ..compat import Release, TrainerRefused, off

RELEASE = Release("TRL", "trl", ("1.16.0",))
OFF = off("TRL")
GENERATION = "trl.generation.vllm_generation"
"""The module of the class that seven of TRL's trainers share."""
_NAMES = {
    GENERATION: ("LLM", "empty_cache"),
    f"{GENERATION}:VLLMGeneration": ("sync_weights", "generate", "_iter_named_params", "_init_vllm"),
}
_ATTRIBUTES = ("mode", "model", "accelerator", "_dist", "_weight_metadata")
_COLOCATED = ("llm", "enable_sleep_mode", "_llm_weights_sleeping")
_APART = ("OnlineDPOTrainer",)
"""Trainers that roll out by vLLM with code of their own, which is not taken over."""
_ASYNCHRONOUS = ("AsyncGRPOTrainer", "AsyncDistillationTrainer")
"""Trainers whose rollouts go on, in a server, while they train."""
_USED_OF_ASYNCHRONOUS = ("_sync_weight", "_sync_weight_merged", "_lora_sync", "weight_transfer", "model_version",
                         "rollout_worker", "vllm_client", "_metrics", "model_wrapped", "accelerator")  # fmt: skip
SHARED = "GRPO, RLOO, Distillation, SDPO, GOLD, IW-OPD and SDFT (and what is derived from them)"


def own_rollout(trainer: Any) -> str | None:
    """Return the class of a trainer that has code of its own for vLLM, which is not taken over; else None."""
    return next((c.__name__ for c in type(trainer).__mro__ if c.__name__ in _APART), None)


def asynchronous(trainer: Any) -> bool:
    """Return True if a trainer is one of TRL's asynchronous ones."""
    return any(c.__name__ in _ASYNCHRONOUS for c in type(trainer).__mro__)


def check_asynchronous(trainer: Any) -> None:
    """Raise `TrainerRefused` if an asynchronous trainer lacks names that are used."""
    lacking = [f"{type(trainer).__name__}.{name}" for name in _USED_OF_ASYNCHRONOUS if not hasattr(trainer, name)]
    if not hasattr(trainer.args, "vllm_server_base_url"):
        lacking.append("args.vllm_server_base_url")
    if lacking:
        raise RELEASE.lacks(lacking)


def generation_of(trainer: Any) -> Any:
    """Return the `VLLMGeneration` of a trainer, which has all that is used of it.

    Raises:
        TrainerRefused: there is none, or this release of TRL lacks names that are used.
    """
    kind, other = type(trainer), own_rollout(trainer)
    if other is not None:
        raise TrainerRefused(
            f"{other} brings its weights to vLLM with code of its own, which lora_merge does not take over; it takes "
            f"over {SHARED}. {OFF}"
        )
    if not hasattr(trainer, "args"):
        raise TrainerRefused(
            f"trainer must be a trainer of TRL's ({SHARED}), got {kind.__name__}: pass what GRPOTrainer(...) returned"
        )
    if not getattr(trainer.args, "use_vllm", False):
        raise TrainerRefused(
            f"{kind.__name__} rolls out without vLLM: pass use_vllm=True in its configuration (--use_vllm). {OFF}"
        )
    RELEASE.require(_NAMES)
    generation = getattr(trainer, "vllm_generation", None)
    needed = _ATTRIBUTES + (_COLOCATED if getattr(generation, "mode", "") == "colocate" else ())
    lacking = [f"VLLMGeneration.{name}" for name in needed if not hasattr(generation, name)]
    lacking += [f"{kind.__name__}.{name}" for name in ("_metrics", "model_wrapped") if not hasattr(trainer, name)]
    if generation is None or lacking:
        raise RELEASE.lacks(lacking if generation is not None else [f"{kind.__name__}.vllm_generation"])
    return generation
