"""TRL's asynchronous trainers: their sync is a push into the server that rolls out meanwhile; its requests are kept."""

from __future__ import annotations

import time
from typing import Any

from ..compat import TrainerRefused
from ..options import Options
from ..pushing import KeptSync
from .release import OFF
from .rollout import Rollout


class Asynchronous(Rollout):
    """The sync of an AsyncGRPO or AsyncDistillation trainer with vLLM's server.

    TRL pauses the server, merges into the base, sends, takes off again and resumes. Here the base is only read, and
    the server stands still for as long as the push transfers; requests that are under way go on with the new weights,
    as under TRL's own pause.
    """

    takes_over = "_sync_weight_merged: merged pushes into vLLM's server"

    def __init__(self, trainer: Any, generation: Any, options: Options) -> None:
        super().__init__(trainer, generation, options)
        self._kept = KeptSync()
        self._own_transfer: Any = None

    def check(self) -> None:
        kind = type(self.trainer).__name__
        if self.options.mode == "adapter" or self.trainer._lora_sync:
            raise TrainerRefused(
                f"{kind} sends adapters by itself, to a server that was started with --enable-lora; lora_merge takes "
                f"over merged weights: mode='merged', and a server without --enable-lora. {OFF}"
            )
        if self.options.share:
            raise TrainerRefused(
                f"share=True: the engine of {kind} is in another process, which trains nothing: leave share "
                f"(LORA_MERGE_SHARE) out. {OFF}"
            )
        if self.options.check is not None:
            raise TrainerRefused(
                f"check: {kind} trains on answers of earlier policies (max_staleness), whose importance ratios are "
                f"meant to differ from 1: leave check (LORA_MERGE_CHECK) out. {OFF}"
            )

    def install(self) -> None:
        self.attached = True
        trainer = self.trainer
        # The callback that calls it holds `_sync_weight`, which looks this one up.
        trainer._sync_weight_merged = self._sync_weight_merged
        self._own_transfer, trainer.weight_transfer = trainer.weight_transfer, None

    def detach(self) -> None:
        super().detach()
        vars(self.trainer).pop("_sync_weight_merged", None)
        self.trainer.weight_transfer = self._own_transfer
        self._kept.close()

    def sync_weights(self) -> None:
        main = self.trainer.accelerator.is_main_process
        url = self.trainer.args.vllm_server_base_url if main else None
        report = self._kept.of(self.model, url, self.options).push(verify=self.options.verify)
        self._tell(report)

    def _sync_weight_merged(self, t0: float) -> tuple[float, float, float]:
        """Replace the trainer's method: push, and count the version that the rollout's requests are of.

        Returns:
            when the pause, the barrier and the transfer ended, as TRL logs them: a push has no barrier, and pauses with
            the transfer.
        """
        self.sync_weights()
        trainer, done = self.trainer, time.time()
        if trainer.accelerator.is_main_process:
            trainer.model_version += 1
            if trainer.rollout_worker:
                trainer.rollout_worker.update_model_version(trainer.model_version)
        return t0, t0, done
