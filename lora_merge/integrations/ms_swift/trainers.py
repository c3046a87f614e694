"""Swift's GRPO and GKD trainers, whose weights get to the engine by a push."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from swift.utils import get_logger
from torch import Tensor

from ...errors import AlreadyMerged, InvalidInput, PushRefused, UnsupportedAdapter
from ...verify import LogprobGap, logprob_gap
from ..options import Options
from ..takeover import TrainerRefused, off
from ..telling import PolicyGap, both_float32, hold, metrics
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
}


class Pushing:
    """Stands in front of a trainer of swift's: replaces what moves weights, and looks at what the engine answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lora_merge_options = options = Options.from_environment()
        refuse(kwargs["model"] if "model" in kwargs else args[0], kwargs["args"], options)
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
        if options.check is not None:
            refuse_check(trainer, isinstance(self, GKD))

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
            self._hold(self._logprobs(samples, batches), bound)
        return batches

    def _hold(self, found: tuple[Tensor, Tensor] | None, bound: float) -> None:
        """The importance ratios of a batch, on all ranks or on none within bounds.

        Args:
            found: log-probs of the answers' tokens by the trainer and by the engine, or None: these are no answers of
                the engine.
        """
        trainer: Any = self
        told, figures = None, {}
        try:
            if found is not None and found[0].numel():
                dtype = trainer.model.model_info.torch_dtype
                exact = both_float32(dtype) and not (trainer.args.bf16 or trainer.args.fp16)
                figures = hold(_gap(*found), bound, exact)
        except PolicyGap as error:
            told = str(error)
        for rank, failure in enumerate(gather_object([told])):
            if failure is not None:
                raise PolicyGap(f"rank {rank}: {failure}")
        if figures:
            low, high = figures["lora_merge/ratio_min"], figures["lora_merge/ratio_max"]
            _log.info(f"lora_merge: importance ratios {low:.4f} to {high:.4f}")
        self._tell(figures)

    def _logprobs(self, samples: Sequence[Any], batches: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
        raise NotImplementedError

    def _tell(self, figures: dict[str, float]) -> None:
        """Into what swift logs at its next logging step, averaged over the pushes since the last one."""
        trainer: Any = self
        mode = "train" if trainer.model.training else "eval"
        for name, value in figures.items():
            trainer._metrics[mode][name].append(value)


class GRPO(Pushing):
    """swift has both log-probs of every batch already, in one frame."""

    def _logprobs(self, samples: Sequence[Any], batches: Sequence[Any]) -> tuple[Tensor, Tensor]:
        ours, theirs = [], []
        for batch in batches:
            grpo = batch["grpo_batch"]
            if grpo.rollout_per_token_logps is None:
                raise _no_logprobs()
            mask = grpo.completion_mask.bool()
            ours.append(grpo.old_per_token_logps[mask])
            theirs.append(grpo.rollout_per_token_logps[mask])
        return torch.cat(ours), torch.cat(theirs)


class GKD(Pushing):
    """swift has the student's logits in the loss alone, which may come after optimizer steps: one more forward."""

    @torch.no_grad()
    def _logprobs(self, samples: Sequence[Any], batches: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
        from swift.rlhf_trainers.gkd_loss import DataSource

        trainer: Any = self
        if trainer._data_source != DataSource.STUDENT:
            return None
        ours = []
        for batch in batches:
            inputs = dict(batch["model_inputs"])
            labels = inputs.pop("labels")[:, 1:]
            answers = labels != -100  # padded or packed, in the order of the samples
            logits = trainer.model(**inputs, use_cache=False).logits[:, :-1][answers]
            logps = (logits.float() / trainer.temperature).log_softmax(-1)
            ours.append(logps.gather(-1, labels[answers][:, None]).squeeze(-1))
        found = torch.cat(ours)
        theirs = torch.tensor([x for s in samples for turn in s.rollout_logprobs for x in turn]).to(found)
        if theirs.numel() != found.numel():
            raise _no_logprobs()
        return found, theirs


def pushing(kind: str, trainer: type) -> type:
    """A trainer class of swift's, or one derived from it, that pushes.

    Raises:
        TrainerRefused: this release lacks what is used.
    """
    RELEASE.require(_USED)
    return type(trainer.__name__, ({"grpo": GRPO, "gkd": GKD}[kind], trainer), {"__module__": __name__})


def _gap(ours: Tensor, theirs: Tensor) -> LogprobGap:
    """Flat log-probs of the same tokens."""
    one = torch.nn.functional.pad(ours.float(), (1, 0))  # a prompt of one token
    bounds = [0, one.numel()]
    return logprob_gap(one, [theirs.float()], shifted=False, cu_seqlens=bounds, prompt_lengths=[1])


def _no_logprobs() -> PolicyGap:
    return PolicyGap("swift has not one log-prob of the engine for each token of its answers: nothing can be compared")
