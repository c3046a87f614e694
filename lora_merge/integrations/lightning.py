"""Lightning: push to a rollout engine as training goes on.

trainer = lightning.Trainer(callbacks=[PushCallback(llm, model=lambda module: module.policy)])
trainer.fit(module)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

try:
    from lightning.pytorch import Callback
except ImportError as error:
    from ..errors import MissingExtra

    raise MissingExtra("this integration needs Lightning: pip install lightning") from error

from ..engine.sync import VllmSync
from ..errors import InvalidInput
from .options import Options
from .telling import metrics

_log = logging.getLogger(__name__)


class PushCallback(Callback):
    """Pushes when training begins, after every so many optimizer steps, and at the end.

    Args:
        engine: as for `VllmSync`; None on the ranks that hold no handle.
        model: from the LightningModule to what the engine serves, a PEFT model or any other of transformers.
        every: optimizer steps between two pushes.
        options: default: as the environment says.

    Raises:
        InvalidInput: an argument that does not fit.
    """

    def __init__(
        self, engine: Any, *, model: Callable[[Any], nn.Module], every: int = 1, options: Options | None = None
    ) -> None:
        if every < 1:
            raise InvalidInput(f"every must be 1 or more optimizer steps, got {every}")
        self._engine, self._model, self._every = engine, model, every
        self._options = Options.from_environment() if options is None else options
        if self._options.check is not None:
            raise InvalidInput(
                "check (LORA_MERGE_CHECK) needs the rollout's log-probs, which Lightning does not have: compare them "
                "with lora_merge.verify.logprob_gap where you sample"
            )
        self.sync: VllmSync | None = None
        """Made when training begins: only then is the model sharded as it will be trained."""
        self._pushed = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The engine gets what training begins with: the base, or what a checkpoint brought back."""
        if self.sync is None:
            model = self._model(pl_module)
            self.sync = VllmSync(model, self._engine, mode=self._options.mode, rounding=self._options.rounding)
        self._push(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A batch is over, and an optimizer step where gradients were not accumulated."""
        if trainer.global_step != self._pushed and trainer.global_step % self._every == 0:
            pl_module.log_dict(self._push(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The engine ends with what was trained."""
        if trainer.global_step != self._pushed:
            self._push(trainer)

    def _push(self, trainer: Any) -> dict[str, float]:
        assert self.sync is not None
        report = self.sync.push(verify=self._options.verify)
        self._pushed = trainer.global_step
        _log.info("%s", report)
        return metrics(report)
