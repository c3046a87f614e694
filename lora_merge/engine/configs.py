"""Settings of a model's configuration that no shape shows: where the trainer's and an engine's differ, the engine
computes another model with the right weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

_KEYS = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon",
    "hidden_act", "hidden_activation", "activation_function",
    "num_attention_heads", "num_key_value_heads", "head_dim",
    "rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor",
    "sliding_window", "layer_types",
    "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "attention_multiplier",
    "num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor", "scoring_func",
    "logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier",
    "scale_emb", "scale_depth", "dim_model_base", "clip_qkv", "use_parallel_residual",
)  # fmt: skip
"""Settings that change what comes out of the same weights, as transformers' configurations call them."""
_OFF = {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}
"""None or 0 turns these off. Elsewhere None is a default, which engines write out."""
_RENAMED = "deepseek_"
"""Prefix that vLLM adds to names of rotary embeddings in the configuration itself."""
_HEADS = "num_attention_heads", "num_key_value_heads", "head_dim"
_SHOWN = 48
_NONE = object()
"""Stands for a setting that a configuration does not have."""


def computing(config: Any) -> dict[str, Any]:
    """Return the settings of a transformers configuration that say how its language model computes, as JSON values;
    empty where it is none."""
    if not hasattr(config, "get_text_config"):
        return {}
    try:
        text = config.get_text_config()
    except ValueError:  # several, and none of them is the main one
        text = config
    found = {key: value for key in _KEYS if (value := getattr(text, key, _NONE)) is not _NONE}
    if "rope_parameters" in found:
        found.pop("rope_scaling", None)  # its older name, for the same settings
    if hasattr(text, "original_num_attention_heads"):  # SGLang adds heads of zeros, for workers that share them on CPUs
        found = {key: value for key, value in found.items() if key not in _HEADS}
    flat: dict[str, Any] = json.loads(json.dumps(dict(_flat(found)), default=str))
    return flat


def config_of(model: Any) -> Any:
    """Find the transformers configuration of a model, however it is wrapped; None where it has none (Megatron's)."""
    parts: Sequence[nn.Module] = [model] if isinstance(model, nn.Module) else getattr(model, "list", model)
    for part in parts:
        for module in part.modules():
            if hasattr(config := getattr(module, "config", None), "get_text_config"):
                return config
    return None


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Say in which settings that both have a trainer and an engine differ; "" for none."""
    both = [key for key in ours if key in theirs and ours[key] != theirs[key]]
    return ", ".join(f"{key} {_shown(ours[key])} (engine: {_shown(theirs[key])})" for key in both)


def _flat(found: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in found.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        elif (value is None and key not in _OFF) or str(value).startswith(_RENAMED):
            continue
        else:
            yield f"{above}{key}", (value or None) if key in _OFF else value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
