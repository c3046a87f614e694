"""Figures of a push for a trainer's logger, and the check that rollout and trainer compute with the same policy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..engine.push.replica import SyncReport
from ..errors import LoraMergeError
from ..verify import LogprobGap, logprob_gap

PREFIX = "lora_merge/"


class PolicyGap(LoraMergeError, RuntimeError):
    """The engine's log-probs differ from the trainer's by more than allowed; the message says by how much."""


def metrics(report: SyncReport) -> dict[str, float]:
    """Return a report as numbers for a trainer's logger (W&B and TensorBoard take no text), under `lora_merge/`.

    Returns:
        version, merged (1 in merged mode, 0 in adapter mode), megabytes (10^6), shared_megabytes where weights are held
        once, tensors, seconds (all of the push), seconds_<phase> for each phase, and coverage where it is known: the
        share of the engine's elements that the last full push wrote.
    """
    found = {
        "version": float(report.version),
        "merged": float(report.mode == "merged"),
        "megabytes": report.nbytes / 1e6,
        "tensors": float(report.tensors),
        "seconds": sum(report.seconds.values()),
    }
    found |= {f"seconds_{phase}": spent for phase, spent in report.seconds.items()}
    if report.shared:
        found["shared_megabytes"] = report.shared / 1e6
    if report.coverage is not None:
        found["coverage"] = report.coverage
    return {PREFIX + name: value for name, value in found.items()}


class Counted:
    """A stream of `(name, tensor)` that a trainer's own transport sends, and the report of it when it has ended.

    Args:
        weights: the stream; iterated once.
        version: number of this pass.
        transport: what carries it, in words ("TRL's server").
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]], version: int, transport: str) -> None:
        self._weights = weights
        self.report = SyncReport(version, "merged", transports=(transport,))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        begin = time.perf_counter()
        for name, tensor in self._weights:
            self.report.tensors += 1
            self.report.nbytes += tensor.nbytes
            yield name, tensor
        self.report.seconds["transfer"] = time.perf_counter() - begin


def gap_of_tokens(trainer: Sequence[Tensor], rollout: Sequence[Tensor]) -> LogprobGap:
    """Return the gap between log-probs of the same tokens, in several pieces or one.

    Args:
        trainer, rollout: log-probs, each piece `[tokens]`; one token at least in all of them.
    """
    ours, theirs = (torch.cat(tuple(pieces)) for pieces in (trainer, rollout))
    # One sequence of all tokens, after a token that stands for its prompt.
    padded = F.pad(ours, (1, 0))
    return logprob_gap(padded, [theirs], shifted=False, prompt_lengths=[1], cu_seqlens=[0, padded.numel()])


def hold(gap: LogprobGap, bound: float, exact: bool) -> dict[str, float]:
    """Return the importance ratios of a batch for a trainer's logger, and raise if they are too far from 1.

    Args:
        gap: of this rank's share of the batch.
        bound: how far a ratio may lie from 1.
        exact: whether trainer and rollout compute in float32, where every token's ratio has to lie within the bound;
            in 16 bits rounding alone takes single tokens further, and their mean has to.

    Raises:
        PolicyGap: a ratio, or their mean, lies outside of 1 +- bound.
    """
    low, high = gap.ratio_range
    worst = max(high - 1, 1 - low) if exact else abs(gap.ratio_mean - 1)
    if not worst <= bound:  # NaN, too
        raise PolicyGap(
            f"the engine does not answer as the policy that is trained: {gap}; allowed is 1 +- {bound}. Its "
            "weights, its sampling (temperature, logprobs_mode) or the padding of this batch are not the trainer's"
        )
    return {
        f"{PREFIX}ratio_min": low,
        f"{PREFIX}ratio_max": high,
        f"{PREFIX}ratio_mean": gap.ratio_mean,
        f"{PREFIX}logprob_gap": gap.maximum,
    }


def both_float32(*dtypes: torch.dtype) -> bool:
    return all(dtype == torch.float32 for dtype in dtypes)
