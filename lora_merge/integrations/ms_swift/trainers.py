"""Swift's GRPO and GKD trainers, whose weights get to the engine by a push."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ...errors import InvalidInput, PushRefused, UnsupportedAdapter
from ..compat import TrainerRefused, off
from ..metrics import both_float32
from ..options import Options
from ..sharing import waiting
from ..train import TrainsMerged, TrainsShared
from .delivery import Colocated
from .pushes import Pushes, TokenLogprobs, token_logprobs
from .refusals import refuse, refuse_check, refuse_sharded, trained_merged
from .release import RELEASE

_USED = {
    "swift.rlhf_trainers.rollout_mixin:RolloutTrainerMixin": (
        "_move_model_to_vllm",
        "_move_full_model_to_vllm",
        "_move_adapter_to_vllm",
        "_load_state_dict_to_vllm",
        "_prepare_vllm_engine",
        "_fast_infer",
        "_engine_infer",
        "_prepare_batch_inputs",
        "offload_model",
    ),
    "swift.rlhf_trainers.vllm_client:VLLMClient": ("process_weights_after_loading",),
    "swift.infer_engine:GRPOVllmEngine": ("infer",),
    "swift.rl_core.data:GRPOBatch": ("old_per_token_logps", "rollout_per_token_logps"),
    "swift.rlhf_trainers.gkd_loss:DataSource": ("STUDENT",),
}


class Pushing(Pushes):
    """Mixed in before a trainer of swift's: replaces what moves weights, and checks what the engine answers."""

    _lora_merge_trains: TrainsMerged | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lora_merge_options = options = Options.from_environment(trains=True, shares=True)
        model = kwargs["model"] if "model" in kwargs else args[0]
        refuse(model, kwargs["args"], options)
        if options.check is not None:
            refuse_check(model, kwargs["args"], kwargs["template"], isinstance(self, GKD))
        trains = trained_merged(model, options.rounding) if options.train == "merged" else None
        super().__init__(*args, **kwargs)
        if options.share:
            refuse_sharded(self.accelerator)
        self._begin(self._load_state_dict_to_vllm, self.accelerator.is_main_process)
        if options.share:
            trains = self._shared()
        self._lora_merge_trains = trains
        if trains is not None:
            self.add_callback(trains)
            RELEASE.announce_training(trains.shared)

    def _shared(self) -> TrainsShared:
        """Let the model lie in the engine, and train it there.

        Raises:
            TrainerRefused: it cannot.
        """
        assert isinstance(self._lora_merge, Colocated)
        try:
            return TrainsShared(self._lora_merge.share(self.model))
        except (InvalidInput, PushRefused, UnsupportedAdapter) as error:
            raise TrainerRefused(f"{error}. {off('ms-swift')}") from error

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as swift does; the base is back afterwards, however that ends."""
        trains = self._lora_merge_trains
        train = super().train
        return (train if trains is None else trains.closing(train))(*args, **kwargs)

    def offload_model(self, model: Any) -> Any:
        """Move a model off its device as swift does; merged weights would stay there with what brings the base back."""
        if self._lora_merge_trains is not None:
            self._lora_merge_trains.pause()
        return super().offload_model(model)

    def _policy(self) -> Any:
        return self.model

    def _exact(self) -> bool:
        return both_float32(self.model.model_info.torch_dtype) and not (self.args.bf16 or self.args.fp16)

    def _prepare_vllm_engine(self) -> Any:
        """Start the engine of a QLoRA policy unquantised, from the same checkpoint: a push brings what the codes stand
        for, and the adapters. swift would have vLLM quantise the base. A model that will lie in the engine waits in the
        host's memory meanwhile."""
        model = self.model
        known = model.model_info
        model.model_info = plain = copy.copy(known)
        plain.quant_method = plain.quant_bits = None
        try:
            with waiting(model) if self._lora_merge_options.share else nullcontext():
                return super()._prepare_vllm_engine()
        finally:
            model.model_info = known

    def _fast_infer(self, samples: Any) -> Any:
        if self._lora_merge.written:
            # swift syncs once between two optimizer steps, whatever the trainer has done since with weights that both
            # share: reference passes, evaluations.
            self._last_loaded_step = -1
        return super()._fast_infer(samples)

    def _engine_infer(self, *args: Any, **kwargs: Any) -> Any:
        self._lora_merge.check()
        return super()._engine_infer(*args, **kwargs)

    def _prepare_batch_inputs(self, samples: Sequence[Any]) -> Any:
        batches = super()._prepare_batch_inputs(samples)
        bound = self._lora_merge_options.check
        if bound is not None:
            found = self._logprobs(samples, batches)
            if found is not None:
                self._hold(found, bound)
        return batches

    def _logprobs(self, samples: Sequence[Any], batches: Sequence[Any]) -> TokenLogprobs | None:
        """Return both log-probs, as `_hold` takes them; None where these are no answers of the engine."""
        raise NotImplementedError

    def _tell(self, figures: dict[str, float]) -> None:
        mode = "train" if self.model.training else "eval"
        for name, value in figures.items():
            self._metrics[mode][name].append(value)


class GRPO(Pushing):
    """swift has both log-probs of every batch already, in one frame."""

    def _logprobs(self, samples: Sequence[Any], batches: Sequence[Any]) -> TokenLogprobs:
        return token_logprobs([batch["grpo_batch"] for batch in batches])


class GKD(Pushing):
    """swift has the student's logits only in the loss, which may come after optimizer steps: the check runs one more
    forward."""

    @torch.no_grad()
    def _logprobs(self, samples: Sequence[Any], batches: Sequence[Any]) -> TokenLogprobs | None:
        from swift.rlhf_trainers.gkd_loss import DataSource

        if self._data_source != DataSource.STUDENT:
            return None
        found: list[Any] = []
        for chunk, batch in zip(self.split_by_mini_batches(samples), batches, strict=True):
            inputs = dict(batch["model_inputs"])
            labels = inputs.pop("labels")[:, 1:]
            answers = labels != -100  # padded or packed, in the order of the samples
            logits = self.model(**inputs, use_cache=False).logits[:, :-1][answers]
            logps = (logits.float() / self.temperature).log_softmax(-1)
            ours = logps.gather(-1, labels[answers][:, None]).squeeze(-1)
            theirs = torch.tensor([x for sample in chunk for turn in sample.rollout_logprobs for x in turn]).to(ours)
            found.append((ours, theirs) if ours.numel() == theirs.numel() else None)
        return found


def pushing(kind: str, trainer: type) -> type:
    """Return a trainer class that pushes, derived from one of swift's.

    Raises:
        TrainerRefused: this release lacks what is used.
    """
    RELEASE.require(_USED)
    return type(trainer.__name__, ({"grpo": GRPO, "gkd": GKD}[kind], trainer), {"__module__": __name__})
