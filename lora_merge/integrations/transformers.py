"""The Trainer of transformers, and whatever inherits from it: push to a rollout engine as training goes on.

    trainer = Trainer(model=peft_model, ...)
    attach(trainer, llm)
    trainer.train()

Each optimizer step is then followed by a push.
"""

from __future__ import annotations

import logging
from typing import Any

from transformers import Trainer, TrainerCallback

from ..engine.push.replica import SyncReport
from ..engine.vllm.sync import VllmSync
from ..errors import InvalidInput
from .metrics import metrics
from .options import Options
from .pushing import Pusher
from .train import TrainsMerged

_log = logging.getLogger(__name__)


class PushCallback(TrainerCallback):
    """Pushes when training begins and after every so many optimizer steps; made by `attach`."""

    def __init__(self, trainer: Trainer, pusher: Pusher) -> None:
        self._trainer, self._pusher = trainer, pusher
        self._unlogged: SyncReport | None = None

    @property
    def sync(self) -> VllmSync | None:
        """The sync, made when training begins: only then is the model wrapped and sharded as it will be trained."""
        return self._pusher.sync

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Push what training begins with: the base, or what a checkpoint restored."""
        self._pusher.begin(self._trainer.model_wrapped)
        self._push(should_log=False)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Push after an optimizer step, if it is time."""
        if self._pusher.due(state.global_step):
            self._push(control.should_log)
        else:
            self._log(control.should_log)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Push the model as it is now: perhaps the best one, which the trainer has loaded since."""
        self._push(should_log=False)

    def _push(self, should_log: bool) -> None:
        self._unlogged = self._pusher.push()
        self._log(should_log)

    def _log(self, should_log: bool) -> None:
        """Log the report of the last push at the first step at which the trainer logs."""
        if should_log and self._unlogged is not None:
            self._trainer.log(metrics(self._unlogged))
            self._unlogged = None


def attach(trainer: Trainer, engine: Any, *, every: int = 1, options: Options | None = None) -> PushCallback:
    """Push what a Trainer trains into a rollout engine: when training begins, after every `every` optimizer steps, and
    at the end. Reports are logged where the trainer logs, as `lora_merge/...`.

        lora_merge.integrations.transformers.attach(trainer, llm)
        trainer.train()

    Args:
        trainer: a Trainer whose `train()` was not called yet; with or without FSDP, DDP and gradient accumulation.
        engine: as for `VllmSync`; None on the ranks that hold no handle.
        every: optimizer steps between two pushes.
        options: mode, rounding, check, verify, train; default: from the environment variables.

    Returns:
        The callback, whose `sync` can generate once training has begun.

    Raises:
        InvalidInput: an argument that does not fit, a trainer that pushes already, or with `train="merged"` a model
            that cannot be trained so.
        UnsupportedAdapter: with `train="merged"` an adapter that cannot be trained so.
    """
    if not hasattr(trainer, "callback_handler"):
        raise InvalidInput(f"trainer must be a Trainer of transformers, got {type(trainer).__name__}")
    if any(isinstance(one, PushCallback) for one in trainer.callback_handler.callbacks):
        raise InvalidInput("this trainer pushes already: give one attach() a list of engines")
    options = Options.from_environment(trains=True) if options is None else options
    pusher = Pusher(engine, every, options, trainer="this trainer", log=_log, trains=True)
    trains = TrainsMerged(trainer.model) if options.train == "merged" else None
    callback = PushCallback(trainer, pusher)
    trainer.add_callback(callback)
    if trains is not None:
        trainer.add_callback(trains)
        vars(trainer)["train"] = trains.closing(trainer.train)
        _log.info("this trainer trains on merged weights: forward and backward compute with what is pushed")
    return callback
