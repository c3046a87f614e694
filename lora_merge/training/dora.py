"""DoRA's rows while a model is merged: their factors, and rows whose magnitude is 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import InvalidInput, UnsupportedAdapter
from ..merge_in_place import ROW_SCALES
from ..models.live import live
from ..shards import here
from .layers import Acting
from .straight import Rows, Zeros, embed_scaled


def zero_rows(model: nn.Module, layers: Mapping[nn.Module, Acting]) -> dict[nn.Module, Zeros]:
    """Return the rows of each layer whose magnitude is 0, while the base is there: merged they are zeros.

    Collective over the ranks that hold the model. Waits once for the device.

    Raises:
        InvalidInput: a sharded model has such rows.
    """
    scaled = [acting for acting in layers.values() if acting.dora is not None]
    if not scaled:
        return {}
    magnitudes = [here(magnitude(acting)).detach().flatten() for acting in scaled]
    by_device: dict[Any, list[Tensor]] = {}
    for some in magnitudes:
        by_device.setdefault((some.device, some.dtype), []).append(some)
    whole = not any(bool((torch.cat(some) == 0).any()) for some in by_device.values())
    found = [] if whole else [a for a, some in zip(scaled, magnitudes, strict=True) if bool((some == 0).any())]
    ranks = live(model).ranks
    with ranks.vote("train_merged"):
        if found and not ranks.alone:
            raise InvalidInput(
                f"{found[0].name}: the magnitude of adapter '{found[0].dora}' is 0 in some rows, whose gradient needs "
                "the base, which is sharded: set these to a small number, or train this model without FSDP"
            )
    return {acting.layer: _zeros(acting) for acting in found}


def with_rows(layers: Mapping[nn.Module, Acting], zeros: Mapping[nn.Module, Zeros]) -> dict[nn.Module, Acting]:
    """Return what acts in layers of a model that is merged now, with DoRA's rows."""
    found = dict(layers)
    for layer, acting in layers.items():
        if acting.dora is None:
            continue
        if (factor := ROW_SCALES.get(acting.base)) is None:
            raise UnsupportedAdapter(
                f"{acting.name}: adapter '{acting.dora}', a DoRA adapter, shares its factors and its weight with "
                "another layer, which cannot be trained on merged weights: adapt one of the two"
            )
        found[layer] = replace(acting, rows=Rows(factor, zeros.get(layer)))
    return found


def magnitude(acting: Acting) -> Tensor:
    """Return the magnitude of the DoRA adapter that acts in a layer."""
    found: Tensor = acting.layer.lora_magnitude_vector[acting.dora].weight
    return found


@torch.no_grad()
def _zeros(acting: Acting) -> Zeros:
    layer, adapter, base = acting.layer, acting.dora, acting.base
    index = (magnitude(acting).flatten() == 0).nonzero().flatten()
    embedding = isinstance(base, nn.Embedding)
    turned = embedding or bool(getattr(layer, "fan_in_fan_out", False))
    if embedding:
        lora_A, lora_B = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
    else:
        lora_A, lora_B = layer.lora_A[adapter].weight.flatten(1), layer.lora_B[adapter].weight.flatten(1)
    weight = base.weight.t()[index] if turned else base.weight[index].flatten(1)
    rows = weight.double() + acting.scalings[0] * (lora_B[index].double() @ lora_A.double())
    rows = (rows / rows.norm(dim=1, keepdim=True)).to(torch.promote_types(base.weight.dtype, torch.float32))

    def outputs(x: Tensor) -> Tensor:
        if embedding:
            return embed_scaled(F.embedding(x, rows.t()), base)
        convolve: Any = getattr(base, "_conv_forward", None)
        if convolve is not None:
            return convolve(x.to(rows.dtype), rows.view(-1, *base.weight.shape[1:]), None)
        return F.linear(x.to(rows.dtype), rows)

    return Zeros(index, outputs)
