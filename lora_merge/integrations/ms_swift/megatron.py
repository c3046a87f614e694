"""swift's Megatron trainers (`megatron rlhf`), whose weights get to the engine by a push: the adapters are merged where
this rank holds them, and the base is neither gathered by swift's bridge nor written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import Tensor

from ...models.megatron.read import Chunks
from ..metrics import both_float32
from ..options import Options
from .pushes import Pushes, token_logprobs
from .refusals import refuse_megatron
from .release import RELEASE

_USED = {
    "swift.megatron.trainers.rollout_mixin:MegatronRolloutMixin": (
        "_move_model_to_vllm",
        "_move_full_model_to_vllm",
        "_move_adapter_to_vllm",
        "_sync_bucket_to_server",
        "_colocate_rollout",
        "_server_rollout",
    ),
    "swift.megatron.trainers:MegatronGRPOTrainer": ("_generate_and_score_completions", "on_log"),
    "swift.megatron.trainers:MegatronGKDTrainer": ("on_log",),
    "swift.rlhf_trainers.vllm_client:VLLMClient": ("process_weights_after_loading",),
    "swift.infer_engine:GRPOVllmEngine": ("infer",),
    "swift.rl_core.data:GRPOBatch": ("old_per_token_logps", "rollout_per_token_logps"),
}


class Pushing(Pushes):
    """Mixed in before a Megatron trainer of swift's."""

    def __init__(self, args: Any, template: Any, **kwargs: Any) -> None:
        self._lora_merge_options = Options.from_environment()
        self._lora_merge_figures: dict[str, list[float]] = defaultdict(list)
        refuse_megatron(args, self._lora_merge_options)
        super().__init__(args, template, **kwargs)
        self._begin(self._send, self.is_main_process)

    @cached_property
    def _lora_merge_chunks(self) -> Chunks:
        return Chunks(self.unwrapped_models, vocab_size=self.config.padded_vocab_size)

    def _policy(self) -> Chunks:
        return self._lora_merge_chunks

    def _exact(self) -> bool:
        return both_float32(self.config.params_dtype)

    def _send(self, tensors: Mapping[str, Tensor]) -> None:
        self._sync_bucket_to_server(list(tensors.items()))

    def _colocate_rollout(self, *args: Any, **kwargs: Any) -> Any:
        self._lora_merge.check()
        return super()._colocate_rollout(*args, **kwargs)

    def _server_rollout(self, *args: Any, **kwargs: Any) -> Any:
        self._lora_merge.check()
        return super()._server_rollout(*args, **kwargs)

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        batches = super()._generate_and_score_completions(*args, **kwargs)
        if self._lora_merge_options.check is not None:
            last = [batch["grpo_batch"] for batch in batches]
            last = [grpo for grpo in last if grpo.old_per_token_logps is not None]  # of the last pipeline stage
            self._hold(token_logprobs(last), self._lora_merge_options.check)
        return batches

    def _tell(self, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._lora_merge_figures[name].append(value)

    def on_log(self, logs: dict[str, Any], prefix: str = "") -> None:
        """Log as swift does, with the figures of pushes since the last call."""
        logs |= {name: sum(values) / len(values) for name, values in self._lora_merge_figures.items()}
        self._lora_merge_figures.clear()
        super().on_log(logs, prefix)


def pushing(trainer: type) -> type:
    """Return a Megatron trainer class of swift's that pushes; the class itself, if it does already.

    Raises:
        TrainerRefused: this release lacks what is used.
    """
    if issubclass(trainer, Pushing):
        return trainer
    RELEASE.require(_USED)
    return type(trainer.__name__, (Pushing, trainer), {"__module__": __name__})
