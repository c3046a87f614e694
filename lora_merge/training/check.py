"""Which models can be trained on merged weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from ..errors import InvalidInput
from ..kernels.plan import ROUNDINGS
from ..models.live import Live, check_model, live
from ..models.pausing import is_trained
from ..shards.layout import Layout
from . import gathered
from .layers import Acting, acting, cut_of, layers_of


def check_trainable(model: nn.Module, rounding: str = "nearest") -> None:
    """Raise unless the model can be trained so, before anything is changed."""
    if rounding not in ROUNDINGS:
        raise InvalidInput(f"train_merged: rounding must be one of {', '.join(ROUNDINGS)}, got {rounding!r}")
    if check_model(model):
        raise InvalidInput(
            "train_merged: layers of megatron-core cannot be trained on merged weights yet: train them by the forward "
            "of their adapters, and serve them merged"
        )
    found = layers_of(model)
    if not found:
        raise InvalidInput("train_merged: the model has no LoRA layers; pass the PeftModel, not its bare base")
    if any(is_trained(layer) for _, layer in found):
        raise InvalidInput("this model is being trained on merged weights already: close() that training first")
    whole = live(model)
    with whole.ranks.vote("train_merged"):
        for _, acts in acting_layers(model, whole):
            if rounding == "stochastic" and any(w.dtype == torch.float32 and w.ndim > 1 for w in acts.weights):
                raise InvalidInput(
                    f"{acts.name}.weight is float32, of which rounding={rounding!r} rounds nothing: what is served in "
                    "16 bits would not be what is trained. Keep the base in bfloat16, or train and push with "
                    'rounding="nearest"'
                )
        whole.weights(whole.adapters()[1])


def acting_layers(model: nn.Module, whole: Live) -> Iterator[tuple[nn.Module, Acting]]:
    """Yield the adapter layers of a model that is `whole`, with what acts in them; may fail on one rank alone.

    Raises:
        as `acting` and `cut_of`; UnsupportedAdapter: an adapter that cannot be trained as the model is sharded.
    """
    layout = Layout(model) if whole.sharded else None
    if layout is not None:
        layout.check_idle()
        layout.reshard()
    for name, layer in layers_of(model):
        acts = acting(name, layer)
        if layout is not None:
            if layout.cut is None or not layout.cut.units:  # by more than FSDP2
                gathered.check(name, acts)
            acts = replace(acts, cut=cut_of(name, acts, layout.units))
            acts = gathered.of_flat(acts, layout) if layout.flat else acts
        yield layer, acts


def tops(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that hold all adapter layers: a forward of each of them is one of the whole model."""
    wanted = set(map(id, layers))
    found = []
    for module in model.modules():
        if wanted <= set(map(id, module.modules())):
            found.append(module)
    return found
