"""Trains a trainer's policy on its merged weights, from the beginning of `train` to its end, whichever way it ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from transformers import TrainerCallback

from ..choices import Rounding
from ..engine.push.sharing import Sharing
from ..training.check import check_trainable
from ..training.session import Training, train_merged


class TrainsMerged(TrainerCallback):
    """Switches training on merged weights on when the model is wrapped and a checkpoint is loaded, and off when
    training ends. The base is back while a checkpoint is saved.

    Callbacks do not see a training that ends by an exception: `closing` does.

    Args:
        model: the trainer's, as it was made.
        rounding: of merged weights.

    Attributes:
        shared: in words, what lies in an engine; "" if nothing does.

    Raises:
        InvalidInput, UnsupportedAdapter: it cannot be trained so; nothing was changed.
    """

    shared = ""

    def __init__(self, model: Any, rounding: Rounding = "nearest") -> None:
        check_trainable(model, rounding)
        self._rounding = rounding
        self.training: Training | None = None

    def closing(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Return a trainer's `train` after which the base is back, also after an exception or an interrupt."""

        @wraps(train)
        def trained(*args: Any, **kwargs: Any) -> Any:
            try:
                return train(*args, **kwargs)
            finally:
                self.close()

        return trained

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.close()
        self.training = train_merged(model, rounding=self._rounding)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Bring the base back for a checkpoint, whose writers may ask for a `state_dict` of the whole model."""
        if control.should_save:
            self.pause()

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Bring the base back: after an evaluation that is the best one yet a checkpoint may follow."""
        self.pause()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Bring the base back."""
        self.close()

    def pause(self) -> None:
        """Bring the base back until the next forward."""
        if self.training is not None:
            self.training.pause()

    def close(self) -> None:
        """Bring the base back, where this has not been done."""
        training, self.training = self.training, None
        if training is not None:
            training.close()


class TrainsShared(TrainsMerged):
    """The same for a model that shares its weights with an engine: it trains on merged weights as long as it does, and
    its base is back when `train` has ended.

    Args:
        sharing: of the model with its engine.
    """

    def __init__(self, sharing: Sharing) -> None:
        self.training, self.shared = sharing.training, str(sharing)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Nothing: it has begun."""

    def close(self) -> None:
        """Bring the base back until the next forward."""
        self.pause()
