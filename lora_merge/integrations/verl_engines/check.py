"""Checks that verl's rollout is the trained policy, by the log-probs of both in its batches."""

from __future__ import annotations

from typing import Any

import torch

from ..compat import TrainerRefused
from ..metrics import gap_of_tokens, hold


def check_batch(batch: Any, bound: float = 0.02, *, exact: bool = False) -> dict[str, float]:
    """Return the importance ratios between the trainer's log-probs in a batch of verl's and the rollout's.

    Args:
        batch: a `DataProto` or `TensorDict` with `old_log_probs`, `rollout_log_probs` and `response_mask`, padded to
            `[N, R]` or jagged.
        bound: how far a ratio may lie from 1.
        exact: True if trainer and rollout compute in float32: every token's ratio has to lie within the bound; else
            their mean has to.

    Returns:
        numbers for a logger, by name; empty where no token counts.

    Raises:
        TrainerRefused: the batch lacks the rollout's log-probs, or has them as the trainer's.
        PolicyGap: rollout and trainer are not one policy.
    """
    fields = getattr(batch, "batch", batch)
    if "rollout_log_probs" not in fields:
        raise TrainerRefused(
            "the batch has no rollout_log_probs to compare the policy with: set "
            "actor_rollout_ref.rollout.calculate_log_probs=True, or LORA_MERGE_CHECK=0"
        )
    old, rolled, masks = (fields[name].unbind() for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
    trainer, rollout = [], []
    for ours, theirs, mask in zip(old, rolled, masks, strict=True):
        counts = mask.bool()
        if counts.any():
            trainer.append(ours[counts])
            rollout.append(theirs[counts])
    if not trainer:
        return {}
    if all(torch.equal(a, b) for a, b in zip(trainer, rollout, strict=True)):
        raise TrainerRefused(
            "old_log_probs are the rollout's own, so there is nothing to compare the policy with: set "
            "algorithm.rollout_correction.bypass_mode=False, or LORA_MERGE_CHECK=0"
        )
    return hold(gap_of_tokens(trainer, rollout), bound, exact)
