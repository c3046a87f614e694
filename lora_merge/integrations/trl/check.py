"""Checks the importance ratios of TRL's own batches against their bound."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...verify import LogprobGap
from ..compat import TrainerRefused
from ..metrics import both_float32, gap_of_tokens, hold
from .release import OFF
from .rollout import Rollout

_PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
"""Sampling under which the engine's log-probs are the policy's."""


def check_comparable(trainer: Any, generation: Any) -> None:
    """Raise `TrainerRefused` if a trainer's batches lack log-probs of one side, or of the same distribution."""
    kind = type(trainer).__name__
    if not hasattr(trainer, "vllm_importance_sampling_correction"):
        raise TrainerRefused(
            f"{kind} does not keep the log-probs of the engine beside its own, so there is nothing to check: leave "
            "check (LORA_MERGE_CHECK) out; GRPOTrainer and what is derived from it keep them"
        )
    if not trainer.vllm_importance_sampling_correction:
        raise TrainerRefused(
            "the check needs the trainer's log-probs of what was sampled, which TRL computes with "
            "vllm_importance_sampling_correction=True (--vllm_importance_sampling_correction) alone; or leave check "
            "(LORA_MERGE_CHECK) out"
        )
    dropping = [name for name, m in trainer.model.named_modules() if isinstance(m, nn.Dropout) and m.p > 0]
    if dropping:
        raise TrainerRefused(
            f"TRL takes the trainer's log-probs with dropout ({dropping[0]}, for one), which no engine has: set "
            f"disable_dropout=True (--disable_dropout), or leave check (LORA_MERGE_CHECK) out. {OFF}"
        )
    extra = generation.generation_kwargs
    for name, plain in _PLAIN.items():
        chosen = extra.get(name, getattr(generation, name, plain))
        if chosen not in (plain, *((-1,) if name == "top_k" else (0.0,) if name == "min_p" else ())):
            raise TrainerRefused(
                f"the check compares with the whole distribution, and {name}={chosen} samples from another: set "
                f"{name}={plain} (--{name}), or leave check (LORA_MERGE_CHECK) out. {OFF}"
            )


def watch(trainer: Any, rollout: Rollout, bound: float) -> None:
    """Check every batch that the trainer makes from now on."""
    make = trainer._generate_and_score_completions

    def checked(inputs: Any) -> Any:
        batch = make(inputs)
        gap = gap_of(batch, trainer.accelerator)
        if gap is not None:
            dtypes = {p.dtype for p in trainer.model.parameters()} | {rollout.engine_dtype}
            half = trainer.args.bf16 or trainer.args.fp16
            rollout.log(hold(gap, bound, exact=both_float32(*dtypes) and not half))
        return batch

    trainer._generate_and_score_completions = checked


def gap_of(batch: dict[str, Tensor], accelerator: Any) -> LogprobGap | None:
    """Return the gap between the engine's and the trainer's log-probs over all ranks' shares of a batch, so that all
    ranks decide alike; None if no share has a token that counts.

    Args:
        batch: of TRL: `completion_mask`, `old_per_token_logps`, `sampling_per_token_logps` and perhaps `tool_mask`
            (tokens of tools, which nobody sampled, are 0 there), all `[N, R]`.
    """
    from accelerate.utils import gather_object

    mask = (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()
    ours = [row[kept] for row, kept in zip(batch["old_per_token_logps"].float(), mask, strict=True)]
    theirs = [row[kept] for row, kept in zip(batch["sampling_per_token_logps"].float(), mask, strict=True)]
    shares = gather_object([(torch.cat(ours).cpu(), torch.cat(theirs).cpu())])
    if not any(trained.numel() for trained, _ in shares):
        return None
    return gap_of_tokens(*zip(*shares, strict=True))
