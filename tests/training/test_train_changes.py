"""What changes between two forwards of training on merged weights: seen by the next one, of the model or of a part."""

from __future__ import annotations

import gc
import weakref

from lora_merge import train_merged
from tests.training.test_train import loss_of, two_adapters


def test_a_model_whose_training_is_not_closed_is_freed() -> None:
    model = two_adapters()
    gone = weakref.ref(model)
    training = train_merged(model)
    loss_of(model).backward()
    del model, training
    gc.collect()
    assert gone() is None
