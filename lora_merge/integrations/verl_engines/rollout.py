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
from .checkpoint_engine import Receiving
from .server import ServerControl
from .stream import CONFIGURED, FLAG, Pass


class LoraMergeServerAdapter(ServerAdapter):
    """A rank's side of verl's vLLM server: pushes merged weights by `VllmSync` if the server was configured for that,
    and does as verl in everything else."""

    _kept: KeptSync | None = None

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        """Make verl's own.

        Raises:
            TrainerRefused: the server is configured for pushes, which reach the first of its engines alone.
        """
        super().__init__(config, *args, **kwargs)
        self._refuse_engines()

    def _refuse_engines(self) -> None:
        """Refuse servers that no push reaches whole."""
        engines = int(self.config.data_parallel_size or 1)
        if self.configured and engines > 1:
            raise TrainerRefused(
                f"{CONFIGURED} pushes into servers of one engine, and actor_rollout_ref.rollout.data_parallel_size="
                f"{engines} makes one of {engines}, of which only the first answers: set data_parallel_size=1 (verl "
                "starts more servers instead), or leave weight_transfer_config out"
            )

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
            RuntimeError: a push of a trainer elsewhere (`checkpoint_engine.py`) failed.
        """
        if isinstance(weights, Receiving):
            await weights.end(self.server_handle if self._ensure_server_handle() else None)
            await self._note(global_steps)
            return
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
