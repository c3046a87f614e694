"""Which models can be trained on merged weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..errors import InvalidInput
from ..kernels.plan import ROUNDINGS
from ..models.live import check_model
from ..models.pausing import is_trained
from ..shards.layout import Layout
from .layers import acting, layers_of


def check_trainable(model: nn.Module, rounding: str = "nearest") -> None:
    """Raise unless the model can be trained so, before anything is changed."""
    if rounding not in ROUNDINGS:
        raise InvalidInput(f"train_merged: rounding must be one of {', '.join(ROUNDINGS)}, got {rounding!r}")
    if check_model(model):
        raise InvalidInput("train_merged: Megatron's layers cannot be trained on merged weights yet")
    layout = Layout(model)
    if not layout.plain and (layout.cut is None or not layout.cut.units):
        raise InvalidInput(
            "train_merged: the model is sharded by FSDP1, DeepSpeed ZeRO-3 or tensor parallelism, under which it "
            "cannot be trained on merged weights yet: shard it with FSDP2 (fully_shard), or train it with DDP"
        )
    found = layers_of(model)
    if not found:
        raise InvalidInput("train_merged: the model has no LoRA layers; pass the PeftModel, not its bare base")
    if any(is_trained(layer) for _, layer in found):
        raise InvalidInput("this model is being trained on merged weights already: close() that training first")
    for name, layer in found:
        weights = acting(name, layer).weights
        if rounding == "stochastic" and any(weight.dtype == torch.float32 and weight.ndim > 1 for weight in weights):
            raise InvalidInput(
                f"{name}.weight is float32, of which rounding={rounding!r} rounds nothing: what is served in 16 bits "
                'would not be what is trained. Keep the base in bfloat16, or train and push with rounding="nearest"'
            )


def tops(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that hold all adapter layers: a forward of each of them is one of the whole model."""
    wanted = set(map(id, layers))
    found = []
    for module in model.modules():
        if wanted <= set(map(id, module.modules())):
            found.append(module)
    return found
