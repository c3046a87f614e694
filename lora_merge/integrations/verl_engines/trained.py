"""Training on merged weights inside of an engine of verl's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...errors import InvalidInput, UnsupportedAdapter
from ...training.session import Training, train_merged
from ..compat import TrainerRefused
from ..options import SWITCH
from .merging import Merging
from .release import RELEASE


class Trained(Merging):
    """Mixed in before an engine of verl's: with LORA_MERGE_TRAIN=merged it trains on merged weights from its
    initialisation on. A sync reads the weights as they lie. The base is back for whatever else reads or moves the
    model: a checkpoint, offloading, a reference policy (`disable_adapter`), and after an error.

    Attributes:
        training: None where adapters are trained as PEFT computes.
    """

    training: Training | None = None
    trains = True

    def initialize(self) -> None:
        """Build the model as verl does, and begin to train it on merged weights.

        Raises:
            TrainerRefused: it cannot be trained so.
        """
        super().initialize()
        options = self.stream().options if self.merging else None
        if options is not None and options.train == "merged":
            try:
                self.training = train_merged(self.module, rounding=options.rounding)
            except (InvalidInput, UnsupportedAdapter) as error:
                raise TrainerRefused(
                    f"{SWITCH}_TRAIN=merged: {error}. (In verl: the strategy fsdp or fsdp2, LoRA without dropout.) Or "
                    f"leave {SWITCH}_TRAIN out, which trains as PEFT computes"
                ) from error
            RELEASE.announce_training()

    def train_batch(self, data: Any, loss_function: Any) -> Any:
        with self._base_after_an_error():
            return super().train_batch(data, loss_function)

    def infer_batch(self, *args: Any, **kwargs: Any) -> Any:
        with self._base_after_an_error():
            return super().infer_batch(*args, **kwargs)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        if model:
            self._pause()
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._pause()
        super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._pause()
        super().load_checkpoint(*args, **kwargs)

    @contextmanager
    def _base_after_an_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._pause()
            raise

    def _pause(self) -> None:
        """Bring the base back until the next forward."""
        if self.training is not None:
            self.training.pause()
