"""Swift's GRPO and GKD trainers, whose weights get to the engine by a push."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from swift.utils import get_logger
from torch import Tensor

from ...errors import AlreadyMerged, InvalidInput, PushRefused, UnsupportedAdapter
from ..options import Options
from ..takeover import TrainerRefused, off
from ..telling import PREFIX, PolicyGap, both_float32, gap_of_tokens, hold, metrics
from .delivery import Colocated, Served
from .kinds import RELEASE
from .refusals import refuse, refuse_check, refuse_server

_log = get_logger()
_USED = {
    "swift.rlhf_trainers.rollout_mixin:RolloutTrainerMixin": (
        "_move_model_to_vllm",
        "_move_full_model_to_vllm",
        "_move_adapter_to_vllm",
        "_load_state_dict_to_vllm",
        "_engine_infer",
        "_prepare_batch_inputs",
    ),
    "swift.rlhf_trainers.vllm_client:VLLMClient": ("process_weights_after_loading",),
    "swift.infer_engine:GRPOVllmEngine": ("infer",),
    "swift.rl_core.data:GRPOBatch": ("old_per_token_logps", "rollout_per_token_logps"),
    "swift.rlhf_trainers.gkd_loss:DataSource": ("STUDENT",),
}


class Pushing:
    """Stands in front of a trainer of swift's: replaces what moves weights, and looks at what the engine answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lora_merge_options = options = Options.from_environment()
        model = kwargs["model"] if "model" in kwargs else args[0]
        refuse(model, kwargs["args"], options)
        if options.check is not None:
            refuse_check(model, kwargs["args"], kwargs["template"], isinstance(self, GKD))
        self._lora_merge_compared = False
        super().__init__(*args, **kwargs)
        trainer: Any = self
        self._lora_merge: Colocated | Served
        if trainer.vllm_mode == "colocate":
            mode = "adapter" if trainer.rollout_enable_lora else "merged"
            self._lora_merge = Colocated(trainer.engine, mode, options)
            RELEASE.announce(f"{type(self).__name__}._move_model_to_vllm: {mode} pushes into the colocated engine")
        else:
            refuse_server(trainer.rollout_enable_lora)
            client = trainer.vllm_client if trainer.accelerator.is_main_process else None
            finish = client and client.process_weights_after_loading
            self._lora_merge = Served(trainer._load_state_dict_to_vllm, finish, options)
            RELEASE.announce(f"{type(self).__name__}._move_model_to_vllm: merged weights, streamed to swift's server")

    def _move_full_model_to_vllm(self) -> None:
        self._push()
        self.base_sync_done = True

    def _move_adapter_to_vllm(self) -> None:
        self._push()

    def _push(self) -> None:
        trainer: Any = self
        try:
            report = self._lora_merge.push(trainer.model)
        except (AlreadyMerged, InvalidInput, PushRefused, UnsupportedAdapter) as error:
            instead = "; --vllm_enable_lora false pushes merged weights" if trainer.rollout_enable_lora else ""
            raise TrainerRefused(f"{error}{instead}. {off('ms-swift')}") from error
        _log.info(f"lora_merge: {report}")
        self._tell(metrics(report))

    def _engine_infer(self, *args: Any, **kwargs: Any) -> Any:
        self._lora_merge.check()
        return super()._engine_infer(*args, **kwargs)  # type: ignore[misc]

    def _prepare_batch_inputs(self, samples: Sequence[Any]) -> Any:
        batches = super()._prepare_batch_inputs(samples)  # type: ignore[misc]
        bound = self._lora_merge_options.check
        if bound is not None:
            found = self._logprobs(samples, batches)
            if found is not None:
                self._hold(found, bound)
        return batches

    def _hold(self, found: Sequence[tuple[Tensor, Tensor] | None], bound: float) -> None:
        """The importance ratios of all answers, within bounds on every rank.

        Args:
            found: of each micro-batch the log-probs of its tokens by the trainer and by the engine, where swift has
                one of the engine's for each that it trains on.
        """
        trainer: Any = self
        lined_up = [pair for pair in found if pair is not None]
        tokens, failure, figures = sum(ours.numel() for ours, _ in lined_up), "", {}
        if tokens:
            exact = both_float32(trainer.model.model_info.torch_dtype) and not (trainer.args.bf16 or trainer.args.fp16)
            try:
                figures = hold(gap_of_tokens(*zip(*lined_up, strict=True)), bound, exact)
            except PolicyGap as error:
                failure = str(error)
        everywhere = gather_object([(failure, tokens)])
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

    def _logprobs(
        self, samples: Sequence[Any], batches: Sequence[Any]
    ) -> Sequence[tuple[Tensor, Tensor] | None] | None:
        """As `_hold` takes them; None where these are no answers of the engine."""
        raise NotImplementedError

    def _tell(self, figures: dict[str, float]) -> None:
        """Into what swift logs at its next logging step, averaged over the pushes since the last one."""
        trainer: Any = self
        mode = "train" if trainer.model.training else "eval"
        for name, value in figures.items():
            trainer._metrics[mode][name].append(value)


class GRPO(Pushing):
    """swift has both log-probs of every batch already, in one frame."""

    def _logprobs(self, samples: Sequence[Any], batches: Sequence[Any]) -> list[tuple[Tensor, Tensor] | None]:
        found: list[tuple[Tensor, Tensor] | None] = []
        for batch in batches:
            grpo, mask = batch["grpo_batch"], batch["grpo_batch"].completion_mask.bool()
            theirs = grpo.rollout_per_token_logps
            found.append(None if theirs is None else (grpo.old_per_token_logps[mask], theirs[mask]))
        return found


class GKD(Pushing):
    """swift has the student's logits in the loss alone, which may come after optimizer steps: one more forward."""

    @torch.no_grad()
    def _logprobs(self, samples: Sequence[Any], batches: Sequence[Any]) -> list[tuple[Tensor, Tensor] | None] | None:
        from swift.rlhf_trainers.gkd_loss import DataSource

        trainer: Any = self
        if trainer._data_source != DataSource.STUDENT:
            return None
        found: list[tuple[Tensor, Tensor] | None] = []
        for chunk, batch in zip(trainer.split_by_mini_batches(samples), batches, strict=True):
            inputs = dict(batch["model_inputs"])
            labels = inputs.pop("labels")[:, 1:]
            answers = labels != -100  # padded or packed, in the order of the samples
            logits = trainer.model(**inputs, use_cache=False).logits[:, :-1][answers]
            logps = (logits.float() / trainer.temperature).log_softmax(-1)
            ours = logps.gather(-1, labels[answers][:, None]).squeeze(-1)
            theirs = torch.tensor([x for sample in chunk for turn in sample.rollout_logprobs for x in turn]).to(ours)
            found.append((ours, theirs) if ours.numel() == theirs.numel() else None)
        return found


def pushing(kind: str, trainer: type) -> type:
    """A trainer class of swift's, or one derived from it, that pushes.

    Raises:
        TrainerRefused: this release lacks what is used.
    """
    RELEASE.require(_USED)
    return type(trainer.__name__, ({"grpo": GRPO, "gkd": GKD}[kind], trainer), {"__module__": __name__})
