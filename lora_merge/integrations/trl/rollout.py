"""Replaces TRL's own sync: pushes into a colocated engine, or streams to a server."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...engine.push.replica import SyncReport
from ...errors import InvalidInput, PushRefused, UnsupportedAdapter
from ...stream.buckets import dtype_of
from ...stream.weights import MergedWeights
from ..compat import TrainerRefused
from ..metrics import Counted, metrics
from ..options import Options
from ..pushing import KeptSync
from ..sharing import SleepsShared, how_sharded
from ..tied import check_tied
from ..train import TrainsMerged, TrainsShared
from .prompts import Prompts
from .release import GENERATION, OFF

QUANTISED = "bitsandbytes"
"""vLLM's name for engines that hold their weights in its codes."""


class Rollout:
    """The sync of one trainer, taken over.

    Args:
        trainer: of TRL.
        generation: its `VLLMGeneration`.
        options: what the user chose.

    Attributes:
        report: of the last sync; None before the first.
        attached: whether TRL's calls come here.
        takes_over: what was taken over, in words.
    """

    takes_over: str

    def __init__(self, trainer: Any, generation: Any, options: Options) -> None:
        self.trainer, self.generation, self.options = trainer, generation, options
        self.report: SyncReport | None = None
        self.attached = False
        self._trains: TrainsMerged | None = None

    def check(self) -> None:
        """Raise `TrainerRefused` if the engine was not started for the chosen options."""

    def trains(self) -> TrainsMerged | None:
        """Return what trains on merged weights, if that was chosen.

        Raises:
            InvalidInput, UnsupportedAdapter: the model cannot be trained so.
        """
        merged = self.options.train == "merged"
        return TrainsMerged(self.trainer.model, self.options.rounding) if merged else None

    def install(self) -> None:
        """Take over: TRL's calls come here from now on."""
        self.attached = True
        self.generation.sync_weights = self.sync_weights

    def train_with(self, trains: TrainsMerged) -> None:
        """Train on merged weights from the next `train()` on."""
        self._trains = trains
        self.trainer.add_callback(trains)
        self.trainer.train = trains.closing(self.trainer.train)

    def detach(self) -> None:
        """Restore TRL's own sync, and free buffers and handles. Collective."""
        self.attached = False
        if self._trains is not None:
            self.trainer.remove_callback(self._trains)
            vars(self.trainer).pop("train", None)
            self._trains.close()
        self.trainer._lora_merge_detached = True  # the switch leaves it alone, too
        for owner, name in ((self.generation, "sync_weights"), (self.trainer, "_generate_and_score_completions")):
            vars(owner).pop(name, None)

    def sync_weights(self) -> None:
        """Bring the policy as it is now to the engine. Collective."""
        raise NotImplementedError

    @property
    def engine_dtype(self) -> torch.dtype:
        """Return the dtype in which the engine computes."""
        raise NotImplementedError

    @property
    def model(self) -> Any:
        """Return the model as accelerate has wrapped it by now: FSDP's outermost unit holds parameters of its own."""
        return self.trainer.model_wrapped

    def log(self, numbers: dict[str, float]) -> None:
        """Add numbers to what the trainer logs next: its history, W&B, TensorBoard."""
        logged = self.trainer._metrics["train" if self.trainer.model.training else "eval"]
        for name, value in numbers.items():
            logged[name].append(value)

    def _tell(self, report: SyncReport) -> None:
        self.report = report
        if self.generation.accelerator.is_main_process:
            logging.getLogger(__package__).info("lora_merge pushed %s", report)
        self.log(metrics(report))


class Colocated(Rollout):
    """An `LLM` in each rank's process."""

    def __init__(self, trainer: Any, generation: Any, options: Options) -> None:
        super().__init__(trainer, generation, options)
        self.takes_over = f"VLLMGeneration.sync_weights: {options.mode} pushes into the colocated engine"
        self._kept = KeptSync()
        self._sleeps: SleepsShared | None = None
        self._prompts = Prompts(trainer, generation)
        self._synced = False
        """True if the last push went through; there is none in a trainer that resumed between two of its syncs."""

    @property
    def engine_dtype(self) -> torch.dtype:
        dtype = self.generation.llm.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        return dtype

    def check(self) -> None:
        if self.generation.llm.model_config.quantization == QUANTISED:
            raise TrainerRefused(
                f"the engine quantises its weights by {QUANTISED}, as TRL starts it where the trainer's base is, and "
                "merged weights cannot be loaded into it: start with LORA_MERGE=1 in the environment, or make the "
                "trainer inside of `with lora_merge.integrations.trl.engine_options(quantization=None):`, both on a "
                f"checkpoint of plain weights. {OFF}"
            )
        if self.options.mode == "adapter" and self.generation.llm.llm_engine.vllm_config.lora_config is None:
            raise TrainerRefused(
                "mode='adapter' needs an engine that was started with enable_lora=True, for which TRL has no flag: "
                "make the trainer inside of `with lora_merge.integrations.trl.engine_options(enable_lora=True, "
                "max_lora_rank=...):`, or start with LORA_MERGE=1 and LORA_MERGE_MODE=adapter in the environment; or "
                f"choose mode='merged'. {OFF}"
            )

        if self.options.share and (how := how_sharded(self.trainer.accelerator)):
            raise TrainerRefused(
                f"share=True, and {how} shards the trainer's weights over its ranks, so that no rank holds one as its "
                f"engine does: train under DDP, or leave share out. {OFF}"
            )

    def trains(self) -> TrainsMerged | None:
        if not self.options.share:
            return super().trains()
        llm = self.generation.llm
        try:
            sync = self._kept.of(self.model, llm, self.options)
        except (InvalidInput, PushRefused, UnsupportedAdapter) as error:
            raise TrainerRefused(f"{error}. {OFF}") from error
        assert sync.sharing is not None
        self._sleeps = SleepsShared(llm, sync)
        return TrainsShared(sync.sharing)

    @property
    def model(self) -> Any:
        # What accelerate wraps later is the same one.
        return self.trainer.model if self.options.share else super().model

    def install(self) -> None:
        super().install()
        self._prompts.install()
        self.generation.llm.generate = self.generate

    def detach(self) -> None:
        super().detach()
        vars(self.generation.llm).pop("generate", None)
        self._prompts.detach()
        if self._sleeps is not None:
            self._sleeps.end()
        self._kept.close()
        self._synced = False

    def sync_weights(self) -> None:
        generation = self.generation
        if generation.enable_sleep_mode and generation._llm_weights_sleeping:
            # TRL wakes the KV cache itself, in `generate`; a push that finds the weights asleep would do both.
            import_module(GENERATION).empty_cache()
            generation.llm.wake_up(tags=["weights"])
        # Accelerate wraps the model after the trainer is made, and once more in `evaluate`.
        sync, self._synced = self._kept.of(self.model, generation.llm, self.options), False
        report = sync.push(verify=self.options.verify)
        self._synced = True
        if generation.enable_sleep_mode:
            generation._llm_weights_sleeping = False
        self._tell(report)

    def generate(self, prompts: Any, *args: Any, lora_request: Any = None, **kwargs: Any) -> Any:
        """Call `generate` of TRL's `LLM` with what was pushed last.

        Raises:
            InvalidInput: a `lora_request` of the caller's own.
            PolicyGap: the engine has read another prompt with images than the trainer.
            PushRefused: something else has written to the engine since the last push.
        """
        if lora_request is not None:
            raise InvalidInput(f"the engine serves the policy, and no {lora_request}: leave lora_request out")
        # TRL syncs once between two optimizer steps, whatever the trainer has done since with weights that both share:
        # reference passes, evaluations.
        if not self._synced or self._kept.written:
            self.sync_weights()
        sync, llm = self._kept.sync, self.generation.llm
        assert sync is not None
        try:
            sync.check()
        except PushRefused as error:
            raise PushRefused(
                f"{error} (the last sync went through: if it answers, something else has written to its weights)"
            ) from error
        rows = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        sent = self._prompts.to_engine(rows)
        outputs = type(llm).generate(llm, sent, *args, lora_request=sync.lora_request(), **kwargs)
        self._prompts.check(rows, outputs)
        return outputs


class Server(Rollout):
    """vLLM's own server, which gets our stream over TRL's own transport."""

    takes_over = "VLLMGeneration._iter_named_params: merged weights over TRL's own transport to the server"

    def __init__(self, trainer: Any, generation: Any, options: Options) -> None:
        super().__init__(trainer, generation, options)
        self._weights: MergedWeights | None = None
        self._passing: Counted | None = None

    @cached_property
    def engine_dtype(self) -> torch.dtype:
        from accelerate.utils import broadcast_object_list

        answer = [None]
        if self.generation.accelerator.is_main_process:
            answer = [self.generation.vllm_client.get_server_info()["model_config"]["dtype"]]
        broadcast_object_list(answer)
        return dtype_of(str(answer[0]).removeprefix("torch."))

    def check(self) -> None:
        apart = (
            ("mode", "adapter", "'merged'"),
            ("verify", True, "False"),
            ("share", True, "False"),
            ("cache", "keep", "'reset'"),
        )
        for name, chosen, instead in apart:
            if getattr(self.options, name) == chosen:
                raise TrainerRefused(
                    f"{name}={chosen!r} needs an engine in the trainer's process (--vllm_mode colocate); over TRL's "
                    f"transport to a server it has to be {name}={instead}. {OFF}"
                )

    def install(self) -> None:
        super().install()
        self.generation._iter_named_params = self._stream

    def detach(self) -> None:
        super().detach()
        vars(self.generation).pop("_iter_named_params", None)
        self._weights = None

    def sync_weights(self) -> None:
        if self._weights is None or self._weights.model is not self.model:
            self._weights = MergedWeights(self.model, dtype=self.engine_dtype, rounding=self.options.rounding)
        check_tied(self._weights, "the adapter's target_modules (--lora_target_modules)")
        # TRL would walk the stream, which merges, for names and shapes alone.
        self.generation._weight_metadata = [
            (name, str(dtype).removeprefix("torch."), list(shape)) for name, dtype, shape in self._weights.metadata()
        ]
        type(self.generation).sync_weights(self.generation)
        assert self._passing is not None
        self._tell(self._passing.report)

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        assert self._weights is not None
        version = 1 if self.report is None else self.report.version + 1
        # TRL sends from the first rank; the others are needed where the model is sharded.
        idle = not self.generation.accelerator.is_main_process and self._weights.bucket_writer(whole=True).ranks.alone
        self._passing = Counted(() if idle else self._weights, version, "TRL's server")
        return iter(self._passing)
