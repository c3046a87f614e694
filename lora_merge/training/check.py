"""Which models can be trained on merged weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..errors import InvalidInput
from ..models.live import check_model
from ..models.pausing import has_pause
from .layers import acting, layers_of


def check_trainable(model: nn.Module) -> None:
    """Raise unless the model can be trained so, before anything is changed."""
    if check_model(model):
        raise InvalidInput("train_merged: Megatron's layers cannot be trained on merged weights yet")
    found = layers_of(model)
    if not found:
        raise InvalidInput("train_merged: the model has no LoRA layers; pass the PeftModel, not its bare base")
    if any(has_pause(layer) for _, layer in found):
        raise InvalidInput("this model is being trained on merged weights already: close() that training first")
    for name, layer in found:
        acting(name, layer)


def tops(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that hold all adapter layers: a forward of each of them is one of the whole model."""
    wanted = set(map(id, layers))
    found = []
    for module in model.modules():
        if wanted <= set(map(id, module.modules())):
            found.append(module)
    return found
