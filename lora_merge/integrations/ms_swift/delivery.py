"""Brings weights to swift's engines: into the one in each rank's process, or to a `swift rollout` server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...choices import Mode
from ...engine.push.replica import SyncReport
from ...engine.push.sharing import Sharing
from ...engine.transport.liveness import error_text
from ...errors import PushFailed, PushRefused
from ...models.live import live
from ...shards.ranks import Ranks, noted
from ...stream.weights import MergedWeights
from ..compat import TrainerRefused, off
from ..options import Options
from ..pushing import KeptSync
from ..sharing import SleepsShared
from ..tied import check_tied


class Colocated:
    """Pushes into the engine that swift started in this rank's process.

    Args:
        engine: swift's `GRPOVllmEngine`; its attribute `engine` is vLLM's.
        mode: "merged" or "adapter".

    Raises:
        TrainerRefused: in adapter mode, where swift's engine has no attribute for the adapter of its requests.
    """

    def __init__(self, engine: Any, mode: Mode, options: Options) -> None:
        if mode == "adapter" and not hasattr(engine, "default_adapter_request"):
            raise TrainerRefused(
                "swift's engine has no default_adapter_request, without which it would answer by the base alone: leave "
                f"--vllm_enable_lora out. {off('ms-swift')}"
            )
        self._engine, self._options = engine, replace(options, mode=mode)
        self._kept = KeptSync()
        self._shared: Any = None

    def share(self, model: Any) -> Sharing:
        """Let the model's weights lie in this rank's engine, of which the KV cache alone sleeps then. Collective.

        Returns:
            what is shared, and the training on merged weights that this begins.

        Raises:
            as `VllmSync`.
        """
        self._shared = model
        sync = self._kept.of(model, self._engine.engine, self._options)
        assert sync.sharing is not None
        SleepsShared(self._engine.engine, sync)
        return sync.sharing

    @property
    def written(self) -> bool:
        """Whether the trainer has written since the last push to weights that it shares with the engine."""
        return self._kept.written

    def push(self, model: Any) -> SyncReport:
        """Bring the model as it is now into every rank's engine. Collective.

        Raises:
            as `VllmSync.push`.
        """
        if self._shared is not None:  # what wraps it since is no other one
            model = self._shared
        sync = self._kept.of(model, self._engine.engine, self._options)
        report = sync.push(verify=self._options.verify)
        # swift's requests carry this, unless they have an adapter of their own.
        self._engine.default_adapter_request = sync.lora_request()
        return report

    def check(self) -> None:
        """Check that this rank's engine still holds what was pushed last.

        Raises:
            PushRefused: it does not.
        """
        if self._kept.sync is None:
            raise PushRefused("nothing was pushed to the engine yet: push first")
        self._kept.sync.check()


class Served:
    """Streams merged weights into swift's server (`swift rollout`), by swift's own transport.

    Args:
        load: sends some tensors; swift's `_load_state_dict_to_vllm`.
        finish: called when all are there, on the rank that talks to the server; None on the others.
    """

    written = False
    """Nothing is shared."""

    def __init__(
        self, load: Callable[[Mapping[str, Tensor]], object], finish: Callable[[], object] | None, options: Options
    ) -> None:
        self._load, self._finish, self._options = load, finish, options
        self._weights: MergedWeights | None = None
        self._version = 0
        self._whole = False

    def push(self, model: nn.Module) -> SyncReport:
        """Bring the model as it is now into the server. Collective.

        Raises:
            PushFailed: the server may hold a part of it.
            as `MergedWeights`: nothing was sent.
        """
        if self._weights is None or self._weights.model is not model:
            self._weights = MergedWeights(model, rounding=self._options.rounding)
        check_tied(self._weights, "--target_modules")
        self._whole = False
        self._version += 1
        report = SyncReport(self._version, "merged", transports=("swift's server",))
        errors: list[Exception] = []
        with noted(errors):
            self._send(self._weights, report)
        world = Ranks(dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)
        failures = world.gather(error_text(errors[0]) if errors else None)
        if errors:
            raise errors[0]
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise PushFailed(f"trainer rank {rank}: {failure}")
        self._whole = True
        return report

    def _send(self, weights: MergedWeights, report: SyncReport) -> None:
        if self._finish is None and live(weights.model).ranks.alone:
            return  # the rank that sends holds all of the model
        errors: list[Exception] = []
        with report.timed("transfer"):
            for bucket in weights.buckets():  # to the end, where the other ranks wait for this one
                report.tensors += len(bucket.slots)
                report.nbytes += sum(slot.nbytes for slot in bucket.slots)
                if self._finish is not None and not errors:
                    with noted(errors):
                        self._load(dict(bucket.tensors()))
        with report.timed("finish"):
            if self._finish is not None and not errors:
                with noted(errors):
                    self._finish()
        if errors:
            raise PushFailed(
                f"the server may hold a part of an update ({error_text(errors[0])}); the next push that goes through "
                "heals it"
            ) from errors[0]

    def check(self) -> None:
        """Check that the last push went through; the server itself cannot be asked.

        Raises:
            PushRefused: it did not.
        """
        if not self._whole:
            raise PushRefused("the server may hold a part of an update, or none: push first")
