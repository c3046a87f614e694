"""From the parameters of a megatron-core GPTModel to the tensors of a HF checkpoint: names, and which rows go where."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ...errors import InvalidInput

HF: TypeAlias = str | Mapping[str, str]
"""A checkpoint tensor; or the ones that Megatron fuses by rows: keys q, k, v or gate, up."""
Names: TypeAlias = Callable[[str], HF | None]
"""HF name(s) of a Megatron parameter, None for one that it does not know.

The parameter is named as in Megatron-Bridge's mappings: layers and experts by global index, one `weight{expert}` for
each expert whatever holds them, layer norms under the linear that they precede where there is a linear:
`decoder.layers.7.self_attention.linear_qkv.layer_norm_weight`, `decoder.layers.7.mlp.experts.linear_fc1.weight12`. So
where Megatron-Bridge is installed, its mappings serve: see `bridge_names`.
"""
Block: TypeAlias = tuple[int, int, int]
"""Rows that follow each other: the first one in the parameter over all ranks, the first one in the tensor, how many."""

INTERLEAVED = ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size")
"""Options of megatron-core, newer than 0.16, that order the rows of fc1 otherwise."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_FC1 = re.compile(r"linear_fc1\.(?:weight|bias)")
_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")


def names_of(config: Any) -> Names:
    """Return the names of Llama, Qwen2, Qwen3, Qwen2-MoE, Qwen3-MoE and Mixtral checkpoints, told apart by the
    configuration.

    Experts without norms on q and k, and without biases on them, are Mixtral's.

    Args:
        config: the model's TransformerConfig.
    """
    qwen = config.qk_layernorm or config.add_qkv_bias
    moe, gate, down, up = (
        ("mlp", "gate_proj", "down_proj", "up_proj") if qwen else ("block_sparse_moe", "w1", "w2", "w3")
    )
    top = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
    }
    layer: dict[str, HF] = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.router.weight": f"{moe}.gate.weight",
        "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
    }
    for kind in ("weight", "bias"):
        layer |= {
            f"self_attention.linear_qkv.{kind}": {key: f"self_attn.{key}_proj.{kind}" for key in "qkv"},
            f"self_attention.linear_proj.{kind}": f"self_attn.o_proj.{kind}",
            f"mlp.linear_fc1.{kind}": {key: f"mlp.{key}_proj.{kind}" for key in ("gate", "up")},
            f"mlp.linear_fc2.{kind}": f"mlp.down_proj.{kind}",
            f"mlp.shared_experts.linear_fc1.{kind}": {
                key: f"mlp.shared_expert.{key}_proj.{kind}" for key in ("gate", "up")
            },
            f"mlp.shared_experts.linear_fc2.{kind}": f"mlp.shared_expert.down_proj.{kind}",
        }

    def names(name: str) -> HF | None:
        found = _LAYER.fullmatch(name)
        if found is None:
            return top.get(name)
        index, rest = found.groups()
        expert = _EXPERT.fullmatch(rest)
        hf: HF | None
        if expert is None:
            hf = layer.get(rest)
        else:
            linear, kind, number = expert.groups()
            inside = f"{moe}.experts.{number}"
            fc1 = {"gate": f"{inside}.{gate}.{kind}", "up": f"{inside}.{up}.{kind}"}
            hf = fc1 if linear == "linear_fc1" else f"{inside}.{down}.{kind}"
        prefix = f"model.layers.{index}."
        if hf is None or isinstance(hf, str):
            return hf and prefix + hf
        return {key: prefix + value for key, value in hf.items()}

    return names


def bridge_names(registry: Any) -> Names:
    """Take HF names from a `MegatronMappingRegistry` of Megatron-Bridge, for architectures that `read` does not know.

        bridge = AutoBridge.from_hf_pretrained(path)
        read(chunks, names=bridge_names(bridge._model_bridge.mapping_registry()))

    Only names are taken. A mapping that changes values, or moves them otherwise than by splitting q, k, v or gate and
    up, is refused when a parameter needs it.

    Args:
        registry: of the bridge.

    Returns:
        a function from Megatron's parameter names to HF names, for `read` and `Chunks`; it raises `InvalidInput`, with
        the class of the mapping, for a parameter whose mapping is refused.
    """
    plain = {"AutoMapping", "QKVMapping", "GatedMLPMapping", "ColumnParallelMapping", "RowParallelMapping"}
    plain |= {"ReplicatedMapping", "DirectMapping"}

    def names(name: str) -> HF | None:
        mapping = registry.megatron_to_hf_lookup(name)
        if mapping is None:
            return None
        if type(mapping).__name__ not in plain:
            raise InvalidInput(
                f"{name}: Megatron-Bridge converts it with a {type(mapping).__name__}, which does more than split rows"
            )
        return mapping.hf_param

    return names


def row_blocks(name: str, hf: HF, rows: int, ranks: int, config: Any) -> dict[str, list[Block]]:
    """Return which rows of a Megatron parameter are which of the checkpoint's tensors: by key in `HF`, "" if there is
    one.

    Args:
        rows: of the whole parameter.
        ranks: over which its rows are cut; 1 where they are not.

    Raises:
        InvalidInput: the rows do not fit the configuration, or what it does to fc1.
    """
    if _FC1.search(name) or set(hf) == {"gate", "up"}:
        _check_fc1(name, hf, ranks, config)
    if isinstance(hf, str):
        return {"": [(0, 0, rows)]}
    if set(hf) == {"gate", "up"}:  # each rank holds its rows of gate above its rows of up
        half, rest = divmod(rows, 2 * ranks)
        if rest:
            raise InvalidInput(f"{name}: {rows} rows over {ranks} ranks do not halve into gate and up")
        return {
            key: [((2 * rank + turn) * half, rank * half, half) for rank in range(ranks)]
            for turn, key in enumerate(("gate", "up"))
        }
    if set(hf) != {"q", "k", "v"}:
        raise InvalidInput(f"{name}: fused tensors must be q, k, v or gate, up; got {', '.join(hf)}")
    heads, groups, dim = config.num_attention_heads, config.num_query_groups, config.kv_channels
    wanted = (heads + 2 * groups) * dim
    if rows != wanted or getattr(config, "attention_output_gate", False):
        raise InvalidInput(
            f"{name}: {rows} rows, but num_attention_heads={heads}, num_query_groups={groups} and kv_channels={dim} "
            f"make {wanted} of q, k and v"
        )
    q = heads // groups * dim  # a query group: its heads of q, then one of k, then one of v
    group = q + 2 * dim
    return {
        key: [(g * group + at, g * count, count) for g in range(groups)]
        for key, at, count in (("q", 0, q), ("k", q, dim), ("v", q + dim, dim))
    }


def _check_fc1(name: str, hf: HF, ranks: int, config: Any) -> None:
    """Check fc1: where it is gated, each rank holds its rows of gate above its rows of up; where not, it is one
    tensor."""
    gated, fused = getattr(config, "gated_linear_unit", True), not isinstance(hf, str)
    if not gated and fused:
        raise InvalidInput(
            f"{name}: gated_linear_unit=False, so that it is one tensor and not gate and up; pass names= that give it "
            "one HF name"
        )
    for option in INTERLEAVED:
        if gated and getattr(config, option, None):
            raise InvalidInput(
                f"{name}: {option}={getattr(config, option)} lays gate and up in turns, which is not known here; train "
                "with None"
            )
    if gated and not fused and ranks > 1:
        raise InvalidInput(
            f"{name}: gate and up over {ranks} ranks, each with its part of both: expected names of the two, got "
            f"{hf!r}; pass names= that give {{'gate': ..., 'up': ...}}"
        )
