"""Whole pushes into verl's vLLM servers, checks and states included, in place of verl's buckets.

By configuration: `rollout.engine_kwargs.vllm.weight_transfer_config={backend: lora_merge}`, with `lora.merge=True`.
"""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from ...engine.vllm.names import BACKEND
from ...engine.vllm.sync import VllmSync
from ..compat import TrainerRefused
from ..pushing import KeptSync
from .server import ServerControl
from .stream import CONFIGURED, FLAG, Pass


class LoraMergeServerAdapter(ServerAdapter):
    """A rank's side of verl's vLLM server: pushes merged weights by `VllmSync` if the server was configured for that,
    and does as verl in everything else."""

    _kept: KeptSync | None = None

    @property
    def configured(self) -> bool:
        """Return True if the server was started for pushes."""
        options = (self.config.engine_kwargs or {}).get("vllm", {}) or {}
        transfer = options.get("weight_transfer_config") or {}
        return bool(transfer) and transfer.get("backend") == BACKEND

    async def update_weights(self, weights: Any, global_steps: int | None = None, **options: Any) -> None:
        """Push the weights if they are this package's and the server was configured for it.

        Raises:
            TrainerRefused: the server was configured for pushes, and verl sends an adapter alone.
        """
        if not self.configured or not (isinstance(weights, Pass) or options.get("peft_config")):
            await super().update_weights(weights, global_steps=global_steps, **options)
            return
        if not isinstance(weights, Pass):
            raise TrainerRefused(
                f"{CONFIGURED} is for merged weights, and verl sends the adapter alone: set {FLAG}, or leave "
                "weight_transfer_config out"
            )
        weights.push(self._sync_of(weights))
        await self._note(global_steps)

    async def _note(self, global_steps: int | None) -> None:
        """Tell the server which step's weights it has."""
        if global_steps is not None and self._ensure_server_handle():
            await self.server_handle.set_global_steps.remote(global_steps)

    def _sync_of(self, weights: Pass) -> VllmSync:
        """Return the sync, kept as long as the model is the same. Collective over the trainer's ranks."""
        if self._kept is None:
            self._kept = KeptSync()
        control = ServerControl(self.server_handle) if self._ensure_server_handle() else None
        return self._kept.of(weights.stream.weights.model, control, weights.stream.options)
