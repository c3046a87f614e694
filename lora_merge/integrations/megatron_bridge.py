"""Megatron-Bridge: `export_hf_weights` of one `AutoBridge` yields merged weights out of `MergedWeights`.

    bridge = bind(AutoBridge.from_hf_pretrained(path))

Whoever holds this bridge, a trainer or a library around it, then exports merged weights without gathering the base.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch

from ..choices import DType, Rounding
from ..errors import InvalidInput
from ..models.megatron.names import bridge_names
from ..models.megatron.read import Chunks
from ..stream.weights import MergedWeights
from .compat import Release
from .options import switched_off

_Bridge = TypeVar("_Bridge")
RELEASE = Release("Megatron-Bridge", "megatron-bridge", ("0.3.1", "0.5.1"), "megatron.bridge")
_NAMES = {
    "megatron.bridge.models.conversion.auto_bridge:AutoBridge": (
        "export_hf_weights",
        "get_conversion_tasks",
        "_model_bridge",
    ),
    "megatron.bridge.models.conversion.model_bridge": ("HFWeightTuple",),
}


def bind(bridge: _Bridge, *, dtype: DType | None = None, rounding: Rounding = "nearest") -> _Bridge:
    """Make the `export_hf_weights` of one bridge yield merged weights; other bridges stay as they are.

        bridge = lora_merge.integrations.megatron_bridge.bind(AutoBridge.from_hf_pretrained(path))
        for name, tensor in bridge.export_hf_weights(chunks):
            send(name, tensor)

    `del bridge.export_hf_weights` undoes it.

    Args:
        bridge: a `megatron.bridge.AutoBridge`.
        dtype: as for `MergedWeights`.
        rounding: as for `MergedWeights`.

    Returns:
        the bridge; as it was, where LORA_MERGE=0 is set.

    Raises:
        TrainerRefused: this release of Megatron-Bridge lacks a name that is used; names it.
    """
    if switched_off():
        return bridge
    RELEASE.require(_NAMES)
    from megatron.bridge.models.conversion.model_bridge import HFWeightTuple

    kept: dict[tuple[Any, ...], MergedWeights] = {}
    own = type(bridge).export_hf_weights.__get__(bridge)  # type: ignore[attr-defined]

    def export_hf_weights(
        model: Any,
        cpu: bool = False,
        show_progress: bool = True,
        conversion_tasks: Sequence[Any] | None = None,
        merge_adapter_weights: bool = True,
        weight_dtype: torch.dtype | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Export as Megatron-Bridge does, by a stream that is kept for the next time; shows no progress. Collective.
        With merge_adapter_weights=False Megatron-Bridge's own runs. It has `weight_dtype` since release 0.6.

        Raises:
            InvalidInput: conversion_tasks of a part of the model; all of them mean the same as None.
        """
        if not merge_adapter_weights:
            newer = {} if weight_dtype is None else {"weight_dtype": weight_dtype}
            return own(model, cpu, show_progress, conversion_tasks, merge_adapter_weights, **newer)
        chunks = list(model) if isinstance(model, list | tuple) else [model]
        if conversion_tasks is not None:
            _check_all(conversion_tasks, bridge.get_conversion_tasks(chunks))  # type: ignore[attr-defined]
        key = (weight_dtype, *map(id, chunks))
        if key not in kept:
            kept.clear()  # another model
            kept[key] = MergedWeights(chunks_of(bridge, chunks), dtype=weight_dtype or dtype, rounding=rounding)
        weights = kept[key]
        weights.metadata()  # what cannot be streamed is an error here, on all ranks, and not in the middle
        return (HFWeightTuple(name, tensor.cpu() if cpu else tensor) for name, tensor in weights)

    bridge.export_hf_weights = export_hf_weights  # type: ignore[attr-defined]
    RELEASE.announce(f"{type(bridge).__name__}.export_hf_weights: merged weights")
    return bridge


def _check_all(given: Sequence[Any], whole: Sequence[Any]) -> None:
    named, wanted = ({task.global_param_name for task in tasks if task is not None} for tasks in (given, whole))
    if named != wanted:
        missing = sorted(wanted - named) or sorted(named - wanted)
        raise InvalidInput(
            f"export_hf_weights(conversion_tasks=...) of a part of the model ({missing[0]} and {len(missing) - 1} more "
            "make the difference): lora_merge exports everything; pass None or all of get_conversion_tasks, or take "
            "bind back by del bridge.export_hf_weights"
        )


def chunks_of(bridge: Any, chunks: Sequence[Any]) -> Any:
    """Return Megatron's chunks under the names of a bridge's mappings; as they are, where it has no mappings."""
    found = getattr(bridge, "_model_bridge", None)
    if found is None:
        return list(chunks)
    if (changes := _changes(type(found))) is not None:
        raise InvalidInput(
            f"{changes} changes exported weights beyond what its mappings say (maybe_modify_converted_hf_weight), and "
            "how is not known here; export by Megatron-Bridge: del bridge.export_hf_weights takes bind back"
        )
    config = getattr(bridge.hf_pretrained, "config", bridge.hf_pretrained)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return Chunks(list(chunks), vocab_size=text.vocab_size, names=bridge_names(found.mapping_registry()))


_HOOK = "maybe_modify_converted_hf_weight"
_HARMLESS = {"MegatronModelBridge", "GPTOSSBridge", "Qwen3VLMoEBridge", "DeepSeekV3Bridge", "LlamaBridge", "MimoBridge"}
"""Bridges whose hook stacks experts as is known here, adds constants, or changes layers of multi-token prediction
alone, which are refused elsewhere."""


def _changes(cls: type) -> str | None:
    """Return the name of the class that gives a bridge a hook which changes what is exported, if one is unknown."""
    return next((c.__name__ for c in cls.__mro__ if _HOOK in vars(c) and c.__name__ not in _HARMLESS), None)
