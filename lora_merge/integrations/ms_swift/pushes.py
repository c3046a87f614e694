"""Base of swift's pushing trainers: they push the policy, compare log-probs and log figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from swift.utils import get_logger
from torch import Tensor

from ...choices import Mode
from ...errors import AlreadyMerged, InvalidInput, PushRefused, UnsupportedAdapter
from ...shards.ranks import Ranks
from ..compat import TrainerRefused, off
from ..metrics import PREFIX, PolicyGap, gap_of_tokens, hold, metrics
from ..options import Options
from .delivery import Colocated, Served
from .refusals import refuse_server
from .release import RELEASE

_log = get_logger()
TokenLogprobs = Sequence[tuple[Tensor, Tensor] | None]
"""Of each micro-batch the log-probs of its tokens by the trainer and by the engine; None where swift lacks one."""
_Trainer: Any = object
"""The trainer of swift's behind `Pushes`, of which no types are known."""


class Pushes(_Trainer):
    """Mixed in before a trainer of swift's, whose `__init__` sets `_lora_merge_options` and ends with `_begin`."""

    _lora_merge_options: Options
    _lora_merge: Colocated | Served
    _lora_merge_compared = False

    def _begin(self, load: Callable[[Mapping[str, Tensor]], object], sends: bool) -> None:
        """Find the engine that swift has made, and announce what was taken over.

        Args:
            load: sends some tensors to swift's server.
            sends: whether this rank is the one that talks to the server.
        """
        name = f"{type(self).__name__}._move_model_to_vllm"
        if self.vllm_mode == "colocate":
            mode: Mode = "adapter" if self.rollout_enable_lora else "merged"
            self._lora_merge = Colocated(self.engine, mode, self._lora_merge_options)
            RELEASE.announce(f"{name}: {mode} pushes into the colocated engine")
            return
        refuse_server(self.rollout_enable_lora)
        finish = self.vllm_client.process_weights_after_loading if sends else None
        self._lora_merge = Served(load, finish, self._lora_merge_options)
        RELEASE.announce(f"{name}: merged weights, streamed to swift's server")

    def _policy(self) -> Any:
        """Return the model that is pushed, wrapped as it is trained."""
        raise NotImplementedError

    def _exact(self) -> bool:
        """Return True if trainer and engine compute in float32."""
        raise NotImplementedError

    def _tell(self, figures: dict[str, float]) -> None:
        """Add figures to what swift logs at its next logging step, averaged over the pushes since the last one."""
        raise NotImplementedError

    def _move_full_model_to_vllm(self) -> None:
        self._push()
        self.base_sync_done = True

    def _move_adapter_to_vllm(self) -> None:
        self._push()

    def _push(self) -> None:
        try:
            report = self._lora_merge.push(self._policy())
        except (AlreadyMerged, InvalidInput, PushRefused, UnsupportedAdapter) as error:
            instead = "; --vllm_enable_lora false pushes merged weights" if self.rollout_enable_lora else ""
            raise TrainerRefused(f"{error}{instead}. {off('ms-swift')}") from error
        _log.info(f"lora_merge: {report}")
        self._tell(metrics(report))

    def _hold(self, found: TokenLogprobs, bound: float) -> None:
        """Log the importance ratios of all answers; raise `PolicyGap` on every rank if one rank's are out of bounds."""
        lined_up = [pair for pair in found if pair is not None]
        tokens, failure, figures = sum(ours.numel() for ours, _ in lined_up), "", {}
        if tokens:
            try:
                figures = hold(gap_of_tokens(*zip(*lined_up, strict=True)), bound, self._exact())
            except PolicyGap as error:
                failure = str(error)
        world = Ranks(dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)
        everywhere = world.gather((failure, tokens))
        for rank, (theirs, _) in enumerate(everywhere):
            if theirs:
                raise PolicyGap(f"rank {rank}: {theirs}")
        if not self._lora_merge_compared and not any(count for _, count in everywhere):
            raise PolicyGap(
                "swift has not one log-prob of the engine for each token that it trains on, in any micro-batch of the "
                "first answers: nothing can be compared (several turns need --loss_scale default)"
            )
        self._lora_merge_compared = True
        if tokens:
            low, high = figures[f"{PREFIX}ratio_min"], figures[f"{PREFIX}ratio_max"]
            _log.info(f"lora_merge: importance ratios {low:.4f} to {high:.4f} of {tokens} tokens")
        if len(lined_up) < len(found):
            _log.warning(
                f"lora_merge: {len(found) - len(lined_up)} of {len(found)} micro-batches have tokens without a "
                "log-prob of the engine and are not compared"
            )
        self._tell(figures | {f"{PREFIX}compared_tokens": float(tokens)})


def token_logprobs(batches: Sequence[Any]) -> TokenLogprobs:
    """Return both log-probs of GRPO's batches, which have those of every token in one frame.

    Args:
        batches: swift's `GRPOBatch` of each micro-batch.
    """
    found: list[tuple[Tensor, Tensor] | None] = []
    for grpo in batches:
        mask, theirs = grpo.completion_mask.bool(), grpo.rollout_per_token_logps
        found.append(None if theirs is None else (grpo.old_per_token_logps[mask], theirs[mask]))
    return found
