"""Classes of megatron-core by their part in a model; by name, so that nothing is imported to look."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...errors import InvalidInput
from ...names import innermost, lineage

_CORE = "megatron.core."
_GPT = _CORE + "models.gpt.gpt_model.GPTModel"
_MAMBA = {_CORE + "models.mamba.mamba_model.MambaModel", _CORE + "models.hybrid.hybrid_model.HybridModel"}
"""The second name is that of megatron-core 0.18."""
_LAYERS = {
    _CORE + "transformer.transformer_layer.TransformerLayer",
    _CORE + "ssm.mamba_layer.MambaLayer",
    _CORE + "ssm.mlp_layer.MLPLayer",
}
_DELTA, _MIXER = _CORE + "ssm.gated_delta_net.GatedDeltaNet", _CORE + "ssm.mamba_mixer.MambaMixer"
_ATTENTION = _CORE + "transformer.attention.SelfAttention"
_WITHIN = {
    _DELTA: ("A_log", "dt_bias", "conv1d"),
    _MIXER: ("A_log", "D", "dt_bias", "conv1d", "norm"),
    _CORE + "transformer.dot_product_attention.DotProductAttention": ("softmax_offset",),
    _CORE + "extensions.transformer_engine.TEDotProductAttention": ("softmax_offset",),
}
"""Class -> its parameters, and its children's, that are cut by rows over tensor-parallel ranks."""


def text_of(chunk: nn.Module) -> Any | None:
    """Return the GPTModel or MambaModel that a chunk is, wraps or has as its `language_model`; None if it has none."""
    model = innermost(chunk)
    for candidate in (model, model._modules.get("language_model")):
        if candidate is not None:
            text = innermost(candidate)
            if not {_GPT, *_MAMBA}.isdisjoint(lineage(type(text))):
                return text
    return None


def is_mamba(model: nn.Module) -> bool:
    """Return True for a MambaModel, which may hold attention and experts too."""
    return not _MAMBA.isdisjoint(lineage(type(model)))


def is_layer(module: nn.Module) -> bool:
    """Return True for a layer of a decoder, of any kind."""
    return not _LAYERS.isdisjoint(lineage(type(module)))


def cut_within(module: nn.Module) -> tuple[str, ...]:
    """Return which of a module's parameters and children are cut by rows over tensor-parallel ranks, other than
    linears."""
    return next((_WITHIN[path] for path in lineage(type(module)) if path in _WITHIN), ())


def check_known(name: str, module: nn.Module, config: Any) -> None:
    """Raise `InvalidInput` for a class derived from one of megatron-core whose rows may lie in another order: those of
    mcore-bridge's gated delta net and gated attention do."""
    paths = lineage(type(module))
    gated = getattr(config, "attention_output_gate", False)
    for path in (_DELTA, _MIXER, *([_ATTENTION] if gated else [])):
        if path in paths and paths[0] != path:
            raise InvalidInput(
                f"{name}: a {paths[0]}, which may order the rows of its linears otherwise than {path} does; how is not "
                "known here. Build the model with megatron-core's own class, as Megatron-Bridge does"
            )


def columns_of(name: str, config: Any) -> tuple[str, int]:
    """Return the input width of a linear over all ranks, where the configuration says it, and how it is said."""
    latent = getattr(config, "multi_latent_attention", False)
    if ".linear_proj." in name:
        channels = "v_head_dim" if latent else "kv_channels"
        heads, dim = config.num_attention_heads, getattr(config, channels)
        return f"num_attention_heads={heads} and {channels}={dim}", heads * dim
    for linear, option in ((".linear_q_up_proj.", "q_lora_rank"), (".linear_kv_up_proj.", "kv_lora_rank")):
        if linear in name:
            return f"{option}={getattr(config, option)}", getattr(config, option)
    return f"hidden_size={config.hidden_size}", config.hidden_size
