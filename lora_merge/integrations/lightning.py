"""Lightning: push to a rollout engine as training goes on.

    trainer = lightning.Trainer(callbacks=[PushCallback(llm, model=lambda module: module.policy)])
    trainer.fit(module)

Each optimizer step is then followed by a push.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from ..extras import needed

with needed("this integration needs Lightning", "lightning", "lightning"):
    from lightning.pytorch import Callback

from ..engine.vllm.sync import VllmSync
from .metrics import metrics
from .options import Options
from .pushing import Pusher

_log = logging.getLogger(__name__)


class PushCallback(Callback):
    """Pushes a module's model into rollout engines: when training begins, after every `every` optimizer steps, and at
    the end.

        trainer = lightning.Trainer(callbacks=[PushCallback(llm, model=lambda module: module.policy)])

    Args:
        engine: as for `VllmSync`; None on the ranks that hold no handle.
        model: a function from the LightningModule to the part that the engine serves: a PEFT model or any other of
            transformers.
        every: optimizer steps between two pushes.
        options: mode, rounding, check, verify; default: from the environment variables.

    Raises:
        InvalidInput: an argument that does not fit.
    """

    def __init__(
        self, engine: Any, *, model: Callable[[Any], nn.Module], every: int = 1, options: Options | None = None
    ) -> None:
        self._pusher = Pusher(engine, every, options, trainer="Lightning", log=_log)
        self._model = model
        self._pushed = -1

    @property
    def sync(self) -> VllmSync | None:
        """The sync, made when training begins: only then is the model sharded as it will be trained."""
        return self._pusher.sync

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Push what training begins with: the base, or what a checkpoint restored."""
        self._pusher.begin(self._model(pl_module))
        self._push(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Push if the batch ended with an optimizer step."""
        if self._pusher.due(trainer.global_step, self._pushed):
            pl_module.log_dict(self._push(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Push the model as it is now: callbacks before this one may have put averaged weights there."""
        self._push(trainer)

    def _push(self, trainer: Any) -> dict[str, float]:
        report = self._pusher.push()
        self._pushed = trainer.global_step
        return metrics(report)
