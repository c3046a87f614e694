"""Warns if a model has LoRA layers but no active adapter: merging then only copies the base."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from torch import nn

from ..pausing import is_trained

_warned: WeakSet[nn.Module] = WeakSet()


def warn_if_idle(model: nn.Module, layers: Sequence[tuple[Any, list[str]]]) -> None:
    """Warn, once for each model, if it has adapter layers and no adapter acts in any of them.

    Args:
        layers: every adapter layer, with the names of its adapters that act.
    """
    if not layers or any(active for _, active in layers) or model in _warned:
        return
    if any(is_trained(layer) for layer, _ in layers):  # on merged weights: in a reference pass the base is meant
        return
    _warned.add(model)
    there = sorted({name for layer, _ in layers for name in layer._get_available_adapters()})
    if not there:
        how = "their adapters were deleted: add_adapter or load_adapter brings one"
    elif any(layer.disable_adapters for layer, _ in layers):
        how = f"{_quoted(there)} disabled: leave disable_adapter(), or call enable_adapters() / enable_adapter_layers()"
    else:
        how = f"{_quoted(there)} not active: call set_adapter({there[0]!r})"
    warnings.warn(
        f"lora_merge: the model has {len(layers)} LoRA layers, and no adapter acts in any of them, so that what is "
        f"merged is the base alone: {how}. For a stream of the base say MergedWeights(model, adapters=False)",
        stacklevel=2,
    )


def _quoted(names: Sequence[str]) -> str:
    return f"{', '.join(map(repr, names))} {'is' if len(names) == 1 else 'are'}"
