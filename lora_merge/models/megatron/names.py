"""The names that parameters of a megatron-core model have in a HF checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ...errors import InvalidInput
from .conversion import ONE_LESS, stacked
from .families import family_of, within_vision
from .rows import CONCATENATED, HF

Names: TypeAlias = Callable[[str], HF | None]
"""HF name(s) of a Megatron parameter, None for one that it does not know.

The parameter is named as in Megatron-Bridge's mappings: layers and experts by global index, one `weight{expert}` for
each expert whatever holds them, layer norms under the linear that they precede where there is a linear:
`decoder.layers.7.self_attention.linear_qkv.layer_norm_weight`, `decoder.layers.7.mlp.experts.linear_fc1.weight12`. So
where Megatron-Bridge is installed, its mappings serve: see `bridge_names`.
"""


def names_of(config: Any, kind: str = "GPTModel", outer: Sequence[str] = ()) -> Names:
    """Return the names of the checkpoints of Llama, Qwen2, Qwen3, Qwen2-MoE, Qwen3-MoE, Mixtral, DeepSeek-V3,
    Qwen3-Next, Nemotron-H and gpt-oss, told apart by the configuration; and of Qwen2.5-VL and Qwen3-VL, by their class.

    Experts without norms on q and k, and without biases on them, are Mixtral's.

    Args:
        config: of the (language) model.
        kind: "GPTModel" or "MambaModel".
        outer: dotted paths of the class, and its bases, of the model that has it as `language_model`.

    Raises:
        InvalidInput: a model around a language model whose names are not known.
    """
    text = family_of(config, kind)
    if not outer:
        return text
    found = within_vision(list(outer), text, bool(config.num_moe_experts))
    if found is None:
        raise InvalidInput(
            f"{outer[0]}: the HF names of this model around a language model are not known here; pass names=, such as "
            "those of Megatron-Bridge: Chunks(chunks, names=bridge_names(bridge._model_bridge.mapping_registry()))"
        )
    return found


def bridge_names(registry: Any) -> Names:
    """Take HF names from a `MegatronMappingRegistry` of Megatron-Bridge, for architectures that `read` does not know.

        bridge = AutoBridge.from_hf_pretrained(path)
        read(chunks, names=bridge_names(bridge._model_bridge.mapping_registry()))

    Only names are taken. A mapping that changes values, or moves them in another way than is known here, is refused
    when a parameter needs it.

    Args:
        registry: of the bridge.

    Returns:
        a function from Megatron's parameter names to HF names, for `read` and `Chunks`; it raises `InvalidInput`, with
        the class of the mapping, for a parameter whose mapping is refused.
    """

    def names(name: str) -> HF | None:
        mapping = registry.megatron_to_hf_lookup(name)
        if mapping is None:
            return None
        kind = type(mapping).__name__
        if kind in _PLAIN and getattr(mapping, "permute_dims", None) is None:
            return mapping.hf_param
        if kind == "ConcatenatedQKVMapping":
            return mapping.hf_param + CONCATENATED
        if kind in _STACKED and getattr(mapping, "transpose_on_export", True):
            places, expert = _STACKED[kind], re.sub(r"\D", "", name.rpartition(".")[2])
            hf = {key: stacked(mapping.hf_param, expert, place) for key, place in places.items()}
            return hf or stacked(mapping.hf_param, expert)
        if kind == "RMSNorm2ZeroCenteredRMSNormMapping":
            return mapping.hf_param + ONE_LESS
        raise InvalidInput(
            f"{name}: Megatron-Bridge converts it with a {kind}, which does more than is known here of splitting rows"
        )

    names.zero_centered = True  # type: ignore[attr-defined]  # what it copies is what the checkpoint holds
    return names


_PLAIN = {"AutoMapping", "QKVMapping", "GatedMLPMapping", "ColumnParallelMapping", "RowParallelMapping"}
_PLAIN |= {"ReplicatedMapping", "DirectMapping"}
_PLAIN |= {"GDNConv1dMapping", "GDNLinearMapping", "GDNLinearMappingSeparate"}
_PLAIN |= {"MambaConv1dMapping", "MambaInProjMapping"}
_HALVES, _TURNS = {"gate": "gate", "up": "up"}, {"gate": "even", "up": "odd"}
_STACKED: dict[str, dict[str, str]] = {"GPTOSSMLPGateUpProjMapping": _TURNS, "GPTOSSMLPDownProjMapping": {}}
_STACKED |= {"ExpertMLPGateUpProjMapping": _HALVES, "ExpertMLPDownProjMapping": {}}
_STACKED |= {"FusedGatedExpertMapping": _HALVES, "FusedExpertMapping": {}}  # of 0.5, where they transpose
"""Mappings of Megatron-Bridge into tensors of all experts, `[experts, in, out]`: where gate and up go."""
