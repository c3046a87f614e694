"""Names of the layers of the families of models that are known: tables, told apart by the configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from .conversion import ONE_LESS, stacked
from .rows import CONCATENATED

Table = Mapping[str, "str | Mapping[str, str]"]
"""Megatron name inside of a layer -> HF name inside of a layer; or the names of the tensors that are fused by rows."""
Find = Callable[[str], "str | Mapping[str, str] | None"]

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")
_VISION = {
    "megatron.bridge.models.qwen_vl.modeling_qwen25_vl.Qwen25VLModel": ("visual.", "visual.", "model."),
    "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.model.Qwen3VLModel": (
        "vision_model.",
        "model.visual.",
        "model.language_model.",
    ),
}
"""Class of a model with a tower -> the tower's place in it, in the checkpoint, and that of the language model there."""


def family_of(config: Any, kind: str) -> Find:
    """Return the names of DeepSeek-V3, Qwen3-Next, Nemotron-H or gpt-oss, whichever a configuration is of; for others
    those of Llama, Qwen2, Qwen3 and Mixtral.

    Args:
        config: the model's TransformerConfig.
        kind: "GPTModel" or "MambaModel".
    """
    if kind == "MambaModel":
        return _finder(_NEMOTRON_H_TOP, _nemotron_h(), "backbone.layers.", _plain_expert("mixer", gated=False))
    if getattr(config, "multi_latent_attention", False):
        return _finder(_TOP, _deepseek(), "model.layers.", _plain_expert("mlp", gated=True))
    if getattr(config, "experimental_attention_variant", None) == "gated_delta_net":
        return _finder(_TOP, _qwen3_next(), "model.layers.", _plain_expert("mlp", gated=True))
    if getattr(config, "softmax_type", "vanilla") == "learnable":
        return _finder(_TOP, _gpt_oss(), "model.layers.", _gpt_oss_expert)
    qwen = config.qk_layernorm or config.add_qkv_bias
    return _finder(_TOP, _usual(qwen), "model.layers.", _plain_expert("mlp", gated=True) if qwen else _mixtral_expert)


def within_vision(paths: list[str], text: Find, moe: bool) -> Find | None:
    """Return the names of a Qwen2.5-VL or Qwen3-VL model of Megatron-Bridge; None for other classes.

    Args:
        paths: of the model's class and its bases.
        text: names of its language model alone, under `model.`.
        moe: the language model has experts, which the checkpoints of Qwen3-VL-MoE hold stacked.
    """
    found = next((_VISION[path] for path in paths if path in _VISION), None)
    if found is None:
        return None
    inside, tower, language = found

    def place(hf: str) -> str:
        return language + hf.removeprefix("model.") if hf.startswith("model.") else hf

    def names(name: str) -> str | Mapping[str, str] | None:
        if name.startswith(inside):
            part = _tower_part(name.removeprefix(inside))
            return part and tower + part
        if not name.startswith("language_model."):
            return None
        name = name.removeprefix("language_model.")
        hf = _vl_expert(name) if moe else None
        hf = text(name) if hf is None else hf
        return hf and (place(hf) if isinstance(hf, str) else {key: place(value) for key, value in hf.items()})

    return names


_TOWER = [
    (r"decoder\.layers\.(\d+)\.self_attention\.linear_qkv\.layer_norm_(weight|bias)", r"blocks.\1.norm1.\2"),
    (r"decoder\.layers\.(\d+)\.mlp\.linear_fc1\.layer_norm_(weight|bias)", r"blocks.\1.norm2.\2"),
    (r"decoder\.layers\.(\d+)\.self_attention\.linear_qkv\.(weight|bias)", rf"blocks.\1.attn.qkv.\2{CONCATENATED}"),
    (r"decoder\.layers\.(\d+)\.self_attention\.linear_proj\.(weight|bias)", r"blocks.\1.attn.proj.\2"),
    (r"decoder\.layers\.(\d+)\.(mlp\.linear_fc[12]\.(?:weight|bias))", r"blocks.\1.\2"),
    (r"(?:decoder\.)?(merger|deepstack_merger_list\.\d+)\.patch_norm\.(weight|bias)", r"\1.norm.\2"),
    (r"decoder\.(deepstack_merger_list\.\d+\.linear_fc[12]\.(?:weight|bias))", r"\1"),
]
"""Names inside of Qwen3-VL's tower in Megatron's own layers, as Megatron-Bridge 0.5 builds it -> in the checkpoint."""


def _tower_part(name: str) -> str | None:
    """Return the checkpoint's name inside of a tower: of transformers' tower the same one."""
    for pattern, hf in _TOWER:
        if found := re.fullmatch(pattern, name):
            return found.expand(hf)
    return None if name.startswith("decoder.") else name


def _vl_expert(name: str) -> str | Mapping[str, str] | None:
    found = _LAYER.fullmatch(name)
    expert = found and _EXPERT.fullmatch(found[2])
    if not found or not expert or expert[2] != "weight":
        return None
    at = f"model.layers.{found[1]}.mlp.experts."
    if expert[1] == "linear_fc2":
        return stacked(at + "down_proj", expert[3])
    return {key: stacked(at + "gate_up_proj", expert[3], key) for key in ("gate", "up")}


def _finder(top: Mapping[str, str], layer: Table, prefix: str, expert: Callable[..., Any]) -> Find:
    def names(name: str) -> str | Mapping[str, str] | None:
        found = _LAYER.fullmatch(name)
        if found is None:
            return top.get(name)
        index, rest = found.groups()
        parts = _EXPERT.fullmatch(rest)
        hf = layer.get(rest) if parts is None else expert(*parts.groups())
        if hf is None or isinstance(hf, str):
            return hf and f"{prefix}{index}.{hf}"
        return {key: f"{prefix}{index}.{value}" for key, value in hf.items()}

    return names


_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_NEMOTRON_H_TOP = {
    "embedding.word_embeddings.weight": "backbone.embeddings.weight",
    "decoder.final_norm.weight": "backbone.norm_f.weight",
    "output_layer.weight": "lm_head.weight",
}
_GATED = ("gate", "up")


def _plain_expert(at: str, *, gated: bool) -> Callable[[str, str, str], Any]:
    """Return the names of experts that have tensors of their own."""

    def names(linear: str, kind: str, number: str) -> str | Mapping[str, str]:
        inside = f"{at}.experts.{number}"
        if linear == "linear_fc2":
            return f"{inside}.down_proj.{kind}"
        return {key: f"{inside}.{key}_proj.{kind}" for key in _GATED} if gated else f"{inside}.up_proj.{kind}"

    return names


def _mixtral_expert(linear: str, kind: str, number: str) -> str | Mapping[str, str]:
    inside = f"block_sparse_moe.experts.{number}"
    fc1 = {"gate": f"{inside}.w1.{kind}", "up": f"{inside}.w3.{kind}"}
    return fc1 if linear == "linear_fc1" else f"{inside}.w2.{kind}"


def _gpt_oss_expert(linear: str, kind: str, number: str) -> str | Mapping[str, str]:
    tail = "_bias" if kind == "bias" else ""
    if linear == "linear_fc2":
        return stacked(f"mlp.experts.down_proj{tail}", number)
    turns = {"gate": "even", "up": "odd"}
    return {key: stacked(f"mlp.experts.gate_up_proj{tail}", number, turn) for key, turn in turns.items()}


def _attention(at: str = "self_attn") -> dict[str, str | Mapping[str, str]]:
    table: dict[str, str | Mapping[str, str]] = {}
    for kind in ("weight", "bias"):
        table[f"self_attention.linear_qkv.{kind}"] = {key: f"{at}.{key}_proj.{kind}" for key in "qkv"}
        table[f"self_attention.linear_proj.{kind}"] = f"{at}.o_proj.{kind}"
    return table


def _mlp(at: str, hf: str, kind: str = "weight") -> dict[str, str | Mapping[str, str]]:
    return {
        f"{at}.linear_fc1.{kind}": {key: f"{hf}.{key}_proj.{kind}" for key in _GATED},
        f"{at}.linear_fc2.{kind}": f"{hf}.down_proj.{kind}",
    }


_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}


def _usual(qwen: bool) -> Table:
    table: dict[str, str | Mapping[str, str]] = {
        **_NORMS,
        **_attention(),
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "mlp.router.weight": f"{'mlp' if qwen else 'block_sparse_moe'}.gate.weight",
        "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
    }
    for kind in ("weight", "bias"):
        table |= _mlp("mlp", "mlp", kind) | _mlp("mlp.shared_experts", "mlp.shared_expert", kind)
    return table


def _deepseek() -> Table:
    """DeepSeek-V3, Kimi-K2, GLM-4.7-Flash; with the indexer, DeepSeek-V3.2 and GLM-5."""
    at = "self_attention"
    table: dict[str, str | Mapping[str, str]] = {
        **_NORMS,
        f"{at}.linear_q_proj.weight": "self_attn.q_proj.weight",
        f"{at}.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
        f"{at}.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
        f"{at}.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
        f"{at}.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
        f"{at}.linear_proj.weight": "self_attn.o_proj.weight",
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
        **_mlp("mlp", "mlp"),
        **_mlp("mlp.shared_experts", "mlp.shared_experts"),
    }
    for norm in ("linear_q_up_proj.layer_norm_weight", "q_layernorm.weight"):
        table[f"{at}.{norm}"] = "self_attn.q_a_layernorm.weight"
    for norm in ("linear_kv_up_proj.layer_norm_weight", "kv_layernorm.weight"):
        table[f"{at}.{norm}"] = "self_attn.kv_a_layernorm.weight"
    indexer = {"linear_wq_b": "wq_b", "linear_wk": "wk", "k_norm": "k_norm", "linear_weights_proj": "weights_proj"}
    for linear, hf in indexer.items():
        for kind in ("weight", "bias"):
            table[f"{at}.core_attention.indexer.{linear}.{kind}"] = f"self_attn.indexer.{hf}.{kind}"
    return table


def _qwen3_next() -> Table:
    at, hf = "self_attention", "linear_attn"
    return {
        **_NORMS,
        **_attention(),
        f"{at}.q_layernorm.weight": "self_attn.q_norm.weight",
        f"{at}.k_layernorm.weight": "self_attn.k_norm.weight",
        f"{at}.in_proj.layer_norm_weight": "input_layernorm.weight",
        f"{at}.in_proj.weight": {key: f"{hf}.in_proj_{key}.weight" for key in ("qkvz", "ba")},
        f"{at}.conv1d.weight": f"{hf}.conv1d.weight",
        f"{at}.A_log": f"{hf}.A_log",
        f"{at}.dt_bias": f"{hf}.dt_bias",
        f"{at}.out_norm.weight": f"{hf}.norm.weight{ONE_LESS}",
        f"{at}.out_proj.weight": f"{hf}.out_proj.weight",
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
        **_mlp("mlp", "mlp"),
        **_mlp("mlp.shared_experts", "mlp.shared_expert"),
    }


def _nemotron_h() -> Table:
    plain = [
        "A_log",
        "D",
        "dt_bias",
        "in_proj.weight",
        "conv1d.weight",
        "conv1d.bias",
        "norm.weight",
        "out_proj.weight",
    ]
    norms = ["mixer.in_proj.layer_norm_weight", "norm.weight", "pre_mlp_layernorm.weight"]
    norms += ["mlp.linear_fc1.layer_norm_weight", "self_attention.linear_qkv.layer_norm_weight"]
    return {
        **dict.fromkeys(norms, "norm.weight"),
        **{f"mixer.{name}": f"mixer.{name}" for name in plain},
        **_attention("mixer"),
        "mlp.linear_fc1.weight": "mixer.up_proj.weight",
        "mlp.linear_fc2.weight": "mixer.down_proj.weight",
        "mlp.router.weight": "mixer.gate.weight",
        "mlp.router.expert_bias": "mixer.gate.e_score_correction_bias",
        "mlp.shared_experts.linear_fc1.weight": "mixer.shared_experts.up_proj.weight",
        "mlp.shared_experts.linear_fc2.weight": "mixer.shared_experts.down_proj.weight",
    }


def _gpt_oss() -> Table:
    return {
        **_NORMS,
        **_attention(),
        "self_attention.core_attention.softmax_offset": "self_attn.sinks",
        "mlp.router.weight": "mlp.router.weight",
        "mlp.router.bias": "mlp.router.bias",
    }
