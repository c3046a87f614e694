"""Reading trainable tokens (`trainable_token_indices`, `TrainableTokensConfig`) out of a live PEFT model.

PEFT's layer computes with the base's weight in which some rows are others, those that were trained. A head that is tied
to the embedding has a layer of its own around it, with the same rows in the same memory.
"""

from __future__ import annotations

from torch import nn

from ...errors import UnsupportedAdapter
from ..delta import Delta, Rows
from .layer import LayerReader

TOKENS = "peft.tuners.trainable_tokens.layer.TrainableTokensLayer"
TRAINED = "trainable_tokens_delta"
"""The layer's rows, and what their names in files contain."""
WRAPPED = "token_adapter"
"""The layer inside the wrapper that LoRA puts it in."""


def read_tokens(reading: LayerReader) -> list[Delta]:
    """Return the rows that active adapters replace, as one delta of the weight."""
    name, base = reading.name, reading.base
    if not isinstance(base, nn.Embedding | nn.Linear):
        raise UnsupportedAdapter(
            f"{name}: trainable tokens on a {type(base).__name__}, expected an Embedding or a Linear: PEFT's forward "
            "knows no other"
        )
    if getattr(base, "max_norm", None) is not None:
        raise UnsupportedAdapter(
            f"{name}: an Embedding with max_norm rescales its weight in the forward; set max_norm=None"
        )
    if not isinstance(base, nn.Embedding) and getattr(base, "bias", None) is not None:
        raise UnsupportedAdapter(
            f"{name}: trainable tokens on a layer with a bias: PEFT's forward of it leaves the bias out, and merged it "
            "would be added; train the layer whole (modules_to_save)"
        )
    rows = tuple(_rows(reading, adapter) for adapter in reading.active)
    taken: dict[int, str] = {}
    for some in rows:
        for index in some.indices:
            if index in taken:
                raise UnsupportedAdapter(
                    f"{name}: the adapters '{taken[index]}' and '{some.adapter}' both replace row {index}; activate "
                    "one of them"
                )
            taken[index] = some.adapter
    return [Delta(f"{name}.weight", reading.shard(base, "weight"), (), owner=base, attribute="weight", rows=rows)]


def _rows(reading: LayerReader, adapter: str) -> Rows:
    name, layer = reading.name, reading.layer
    indices = tuple(map(int, layer.token_indices[adapter]))
    values = reading.shard(layer._modules[TRAINED], adapter)
    weight = reading.shard(reading.base, "weight")
    if len(set(indices)) < len(indices):
        raise UnsupportedAdapter(f"{name}: token_indices of '{adapter}' hold a number twice; give each token once")
    if indices and not 0 <= min(indices) <= max(indices) < weight.shape[0]:
        raise UnsupportedAdapter(
            f"{name}: token_indices of '{adapter}' must be from 0 to {weight.shape[0] - 1}, the rows of the weight, "
            f"got {min(indices)} to {max(indices)}"
        )
    if tuple(values.shape) != (len(indices), *weight.shape[1:]):
        raise UnsupportedAdapter(
            f"{name}: the rows of '{adapter}' are {list(values.shape)}, expected "
            f"{[len(indices), *weight.shape[1:]]}; is it sharded or offloaded?"
        )
    return Rows(indices, values, adapter)
