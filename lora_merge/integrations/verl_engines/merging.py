"""Base of this package's verl engines, whatever shards the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ...shards.ranks import Ranks
from ..compat import TrainerRefused, off
from ..metrics import metrics
from ..options import SWITCH, Options, trains_merged
from .check import check_batch
from .release import RELEASE, merges, ranks
from .stream import FLAG, Stream

_Engine: Any = object
"""The engine of verl's behind `Merging`, of which no types are known."""


class Merging(_Engine):
    """Mixed in before an engine of verl's.

    With `model.lora.merge=True` weights for the rollout come from a kept `Stream`, its report is among the metrics of
    the next update, and with LORA_MERGE_CHECK each batch of an update is held against the rollout. Without it, and
    without an adapter, the engine is verl's.
    """

    trains = False
    """True if this engine can train on merged weights."""
    rank_setting = "lora_rank"
    """The setting of verl's that this engine reads the adapter's rank from."""
    _stream: Stream | None = None
    _reported: int = 0
    """The version of the last report among the metrics."""

    def initialize(self) -> None:
        """Build the model as verl does; refuse at once what cannot be served."""
        if not self.merging:
            self._refuse_alone()
            super().initialize()
            return
        given = ranks(self.model_config)
        if not given[self.rank_setting]:
            other = next(name for name in given if given[name])
            raise TrainerRefused(
                f"actor_rollout_ref.model.{other}={given[other]} is not read with this strategy, so verl trains all "
                f"weights, no adapter: set actor_rollout_ref.model.{self.rank_setting}={given[other]} in its place"
            )
        if getattr(self, "_qat_enabled", False):
            raise TrainerRefused(
                f"actor_rollout_ref.actor.*.qat.enable=True trains weights as quantised ones, and {FLAG} brings them "
                f"unquantised: set one of them to False. {off('verl')}"
            )
        super().initialize()
        self._stream = self._make_stream()
        theirs = next(kind for kind in type(self).__mro__ if kind.__module__.startswith("verl."))
        RELEASE.announce(f"the merged weights of {theirs.__qualname__} (actor_rollout_ref.model.lora.merge)")

    @property
    def merging(self) -> bool:
        """Return True if this engine trains an adapter that verl is told to merge."""
        return merges(self.model_config, self.engine_config)

    def stream(self) -> Stream:
        """Return the kept stream of the model."""
        if self._stream is None:
            raise TrainerRefused(f"the engine was not initialised with {FLAG}: start the run with it")
        return self._stream

    def _make_stream(self) -> Stream:
        return Stream(self.module, dist.get_rank(), trains=self.trains)

    def train_batch(self, data: Any, loss_function: Any) -> Any:
        """Train as verl does, with the cost of the last sync and the gap between rollout and trainer in the metrics."""
        found: dict[str, float] = {}
        if self.merging:
            stream = self.stream()
            if stream.options.check is not None:
                with Ranks(dist.group.WORLD).vote(f"{SWITCH}_CHECK"):
                    computes = getattr(self, "_autocast_dtype", torch.bfloat16)
                    found |= check_batch(data, stream.options.check, exact=stream.exact(computes))
            if stream.report is not None and stream.report.version != self._reported:
                self._reported = stream.report.version
                found |= metrics(stream.report)
        outputs = super().train_batch(data, loss_function)
        if self.is_mp_src_rank_with_outputs():
            # verl's are one for each micro-batch.
            outputs["metrics"] |= {name: [value] for name, value in found.items()}
        return outputs

    def get_per_tensor_param_shard(self, **options: Any) -> Any:
        """Refuse shards of verl's own export while adapters are merged: they lack what the adapters add."""
        if self.merging:
            raise TrainerRefused(
                "actor_rollout_ref.rollout.checkpoint_engine.backend=delta_sharded sends shards of the base alone, "
                f"without what the adapter adds: choose another backend with {FLAG}"
            )
        return super().get_per_tensor_param_shard(**options)

    def _refuse_alone(self) -> None:
        """Refuse settings for merged weights where verl's own way is told to go."""
        if self.engine_config.forward_only:
            return
        if trains_merged():
            raise TrainerRefused(
                f"{SWITCH}_TRAIN=merged trains the policy of merged weights: set {FLAG} and "
                "actor_rollout_ref.model.lora_rank, as verl's own way (lora.merge=False) serves base and adapter "
                f"apart, which computes otherwise; or leave {SWITCH}_TRAIN out"
            )
        options = Options.from_environment(merges=True)
        promises = {
            "CHECK": options.check is not None,
            "VERIFY": options.verify,
            "ROUNDING": options.rounding != "nearest",
            "MERGE": options.merge != "auto",
            "CACHE": options.cache != "reset",
        }
        for name, given in promises.items():
            if given:
                raise TrainerRefused(
                    f"{SWITCH}_{name} is for merged weights, and verl's own way goes without this package: set {FLAG} "
                    f"and actor_rollout_ref.model.lora_rank, or leave {SWITCH}_{name} out"
                )
