"""Trains a trainer's policy on its merged weights, from the beginning of `train` to its end."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ...training.check import check_trainable
from ...training.session import Training, train_merged


class TrainsMerged(TrainerCallback):
    """Switches training on merged weights on when accelerate has wrapped the model, and off when training ends.

    Args:
        model: the trainer's, as it was made.
        rounding: of merged weights.

    Raises:
        InvalidInput, UnsupportedAdapter: it cannot be trained so; nothing was changed.
    """

    def __init__(self, model: Any, rounding: str = "nearest") -> None:
        check_trainable(model, rounding)
        self._rounding = rounding
        self.training: Training | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begin."""
        self.close()
        self.training = train_merged(model, rounding=self._rounding)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Bring the base back."""
        self.close()

    def close(self) -> None:
        """Bring the base back, where this has not been done."""
        if self.training is not None:
            self.training.close()
        self.training = None
