"""The Trainer of transformers, and whatever inherits from it: push to a rollout engine as training goes on.

trainer = Trainer(model=peft_model, ...)
attach(trainer, llm)
trainer.train()
"""

from __future__ import annotations

import logging
from typing import Any

from transformers import Trainer, TrainerCallback

from ..engine.sync import VllmSync
from ..errors import InvalidInput
from .options import Options
from .telling import metrics

_log = logging.getLogger(__name__)


class PushCallback(TrainerCallback):
    """Pushes when training begins and after every so many optimizer steps; made by `attach`."""

    def __init__(self, trainer: Trainer, engine: Any, every: int, options: Options) -> None:
        self._trainer, self._engine, self._every, self._options = trainer, engine, every, options
        self.sync: VllmSync | None = None
        """Made when training begins: only then is the model wrapped and sharded as it will be trained."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The engine gets what training begins with: the base, or what a checkpoint brought back."""
        if self.sync is None:
            model = self._trainer.model_wrapped
            self.sync = VllmSync(model, self._engine, mode=self._options.mode, rounding=self._options.rounding)
        self._push(should_log=False)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An optimizer step is over."""
        if state.global_step % self._every == 0:
            self._push(control.should_log)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The engine ends with what was trained."""
        if state.global_step % self._every:
            self._push(should_log=False)

    def _push(self, should_log: bool) -> None:
        assert self.sync is not None
        report = self.sync.push(verify=self._options.verify)
        _log.info("%s", report)
        if should_log:
            self._trainer.log(metrics(report))


def attach(trainer: Trainer, engine: Any, *, every: int = 1, options: Options | None = None) -> PushCallback:
    """Push what a Trainer trains into a rollout engine: when training begins, after every `every` optimizer steps, and
    at the end. Reports are logged where the trainer logs, as `lora_merge/...`.

    Args:
        trainer: before `train()`; plain, or with FSDP, DDP or gradient accumulation as it likes.
        engine: as for `VllmSync`; None on the ranks that hold no handle.
        every: optimizer steps between two pushes.
        options: default: as the environment says.

    Returns:
        The callback, whose `sync` can generate once training has begun.

    Raises:
        InvalidInput: an argument that does not fit.
    """
    if every < 1:
        raise InvalidInput(f"every must be 1 or more optimizer steps, got {every}")
    if any(isinstance(one, PushCallback) for one in trainer.callback_handler.callbacks):
        raise InvalidInput("this trainer pushes already: give one attach() a list of engines")
    chosen = Options.from_environment() if options is None else options
    if chosen.check is not None:
        raise InvalidInput(
            "check (LORA_MERGE_CHECK) needs the rollout's log-probs, which this trainer does not have: compare them "
            "with lora_merge.verify.logprob_gap where you sample"
        )
    callback = PushCallback(trainer, engine, every, chosen)
    trainer.add_callback(callback)
    return callback
