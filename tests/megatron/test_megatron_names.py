"""What is decided by names, shapes and configurations alone: no processes."""

from __future__ import annotations

import importlib
import re
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="the megatron tests run in an environment of their own")

import megatron.core
import megatron_models as mm
import torch

from lora_merge import InvalidInput, UnsupportedAdapter, merged
from lora_merge.engine.payload.adapter import _check_experts
from lora_merge.models.megatron import adapters
from lora_merge.models.megatron.adapters import cut_of
from lora_merge.models.megatron.conversion import MegatronConversion
from lora_merge.models.megatron.groups import replica
from lora_merge.models.megatron.layers import is_mamba
from lora_merge.models.megatron.names import bridge_names, names_of
from lora_merge.models.megatron.read import is_megatron, read
from lora_merge.models.megatron.rows import row_blocks


def config(**changes: Any) -> Any:
    base = {"qk_layernorm": True, "add_qkv_bias": False, "attention_output_gate": False}
    return types.SimpleNamespace(**base | {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 3} | changes)


def test_the_linears_of_transformer_engine_have_these_names() -> None:
    source = (Path(megatron.core.__path__[0]) / "extensions" / "transformer_engine.py").read_text()
    known = {path.rpartition(".")[2] for path in adapters._ROWS | adapters._COLUMNS if "transformer_engine" in path}
    bases = {name: base for name, base in re.findall(r"class (\w+)\(([\w.]+)", source) if "Parallel" in name}
    # One that is derived from a known one lays its weight as that one: the head of 8-bit models, since 0.18.
    assert {name for name, base in bases.items() if name not in known and base not in known} == set()
    assert all(f"class {name}(" in source for name in known), known


def test_classes_of_megatron_core_0_18() -> None:
    def cls(path: str, *bases: type) -> type:
        module, _, name = path.rpartition(".")
        return type(name, bases or (torch.nn.Module,), {"__module__": f"megatron.core.{module}"})

    hybrid = cls("models.hybrid.hybrid_model.HybridModel")()
    assert is_megatron([hybrid])
    assert is_mamba(hybrid)
    column = cls("extensions.transformer_engine.TEColumnParallelLinear")
    assert cut_of(cls("extensions.transformer_engine.TELMHeadColumnParallelLinear", column)()) == 0
    row = cls("extensions.transformer_engine.TERowParallelLinear")
    assert cut_of(cls("tensor_parallel.inference_layers.InferenceRowParallelLinear", row)()) == 1
    latent = names_of(config(multi_latent_attention=True))
    assert latent("decoder.layers.0.self_attention.linear_qkv_down_proj.weight") is None


def test_rows_of_gate_and_up_alternate_by_rank_and_those_of_q_k_and_v_by_query_group() -> None:
    both = {"gate": "g", "up": "u"}
    assert row_blocks("fc1", both, 8, 2, config()) == {
        "gate": [(0, 0, 2), (4, 2, 2)],
        "up": [(2, 0, 2), (6, 2, 2)],
    }
    qkv = {"q": "q", "k": "k", "v": "v"}
    assert row_blocks("qkv", qkv, 24, 4, config()) == {
        "q": [(0, 0, 6), (12, 6, 6)],
        "k": [(6, 0, 3), (18, 3, 3)],
        "v": [(9, 0, 3), (21, 3, 3)],
    }
    with pytest.raises(InvalidInput, match="qkv: 20 rows, but num_attention_heads=4, num_query_groups=2"):
        row_blocks("qkv", qkv, 20, 1, config())
    with pytest.raises(InvalidInput, match="fc1: 9 rows over 2 ranks do not halve into gate and up"):
        row_blocks("fc1", both, 9, 2, config())
    with pytest.raises(InvalidInput, match="x: fused tensors must be q, k, v or gate, up; got a, b"):
        row_blocks("x", {"a": "a", "b": "b"}, 8, 1, config())


def test_rows_of_a_gated_delta_net_in_tensors_of_their_own() -> None:
    """As Qwen3.5's checkpoints have them: q, k and v one below the other, z, b and a apart."""
    sizes = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 3}
    delta, ranks = config(**sizes, linear_value_head_dim=5), 2
    q, k, v, z, b, a = torch.arange(12 + 12 + 40 + 40 + 8 + 8).split([12, 12, 40, 40, 8, 8])
    parameter = torch.cat([part.chunk(ranks)[rank] for rank in range(ranks) for part in (q, k, v, z, b, a)])
    name, hf = "decoder.layers.0.self_attention.in_proj.weight", {key: key for key in ("qkv", "z", "b", "a")}
    found = row_blocks(name, hf, len(parameter), ranks, delta)
    for key, wanted in {"qkv": torch.cat([q, k, v]), "z": z, "b": b, "a": a}.items():
        made = torch.full_like(wanted, -1)
        for at, start, count in found[key]:
            made[start : start + count] = parameter[at : at + count]
        assert torch.equal(made, wanted), key
    with pytest.raises(InvalidInput, match=r"in_proj\.weight: it becomes qkvz and ba, or qkv, z, b and a; got q, k, v"):
        row_blocks(name, {"q": "q", "k": "k", "v": "v"}, len(parameter), ranks, delta)
    with pytest.raises(
        InvalidInput, match=r"in_proj\.weight: expected whole heads on each of 3 ranks, got linear_num_key_heads=4"
    ):
        row_blocks(name, hf, len(parameter), 3, delta)
    with pytest.raises(InvalidInput, match=r"conv1d\.weight: 60 rows over 2 ranks, .* make 64 of q, k, v"):
        row_blocks("decoder.layers.0.self_attention.conv1d.weight", "conv1d", 60, ranks, delta)


def test_experts_that_are_missing_in_a_tensor_of_all_of_them() -> None:
    part = torch.empty(2, 3, device="meta")
    whole = {f"w[{e}].{half}": part for e in range(3) for half in ("even", "odd")}
    (made,) = MegatronConversion().outputs(whole)
    assert (made.name, made.shape, made.sources) == ("w", (3, 3, 4), tuple(whole))
    del whole["w[1].odd"]
    with pytest.raises(InvalidInput, match=r"w: of the parts of 3 experts some are on no rank \(5 are there, w\[0\]"):
        MegatronConversion().outputs(whole)


def test_fc1_that_is_not_gate_above_up_is_refused() -> None:
    both, fc1 = {"gate": "g", "up": "u"}, "decoder.layers.0.mlp.linear_fc1.weight"
    with pytest.raises(InvalidInput, match=r"fc1\.weight: gated_linear_unit=False.* one tensor"):
        row_blocks(fc1, both, 8, 2, config(gated_linear_unit=False))
    assert row_blocks(fc1, "up", 8, 2, config(gated_linear_unit=False)) == {"": [(0, 0, 8)]}
    for option in ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"):
        for hf in (both, "gate_up"):
            with pytest.raises(InvalidInput, match=rf"fc1\.weight: {option}=32"):
                row_blocks(fc1, hf, 8, 1, config(**{option: 32}))
    with pytest.raises(InvalidInput, match=r"fc1\.weight: gate and up over 2 ranks.* names.* 'gate_up'"):
        row_blocks(fc1, "gate_up", 8, 2, config())
    assert row_blocks(fc1, "gate_up", 8, 1, config()) == {"": [(0, 0, 8)]}


RECORDED = {
    "AutoMapping": {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "decoder.layers.*.self_attention.linear_qkv.layer_norm_weight": "model.layers.*.input_layernorm.weight",
        "decoder.layers.*.mlp.router.weight": "model.layers.*.mlp.gate.weight",
        "decoder.layers.*.pre_mlp_layernorm.weight": "model.layers.*.post_attention_layernorm.weight",
        "decoder.layers.*.self_attention.q_layernorm.weight": "model.layers.*.self_attn.q_norm.weight",
        "decoder.layers.*.self_attention.k_layernorm.weight": "model.layers.*.self_attn.k_norm.weight",
        "decoder.layers.*.self_attention.linear_proj.weight": "model.layers.*.self_attn.o_proj.weight",
        "decoder.layers.*.mlp.experts.linear_fc2.weight*": "model.layers.*.mlp.experts.*.down_proj.weight",
    },
    "QKVMapping": {
        "decoder.layers.*.self_attention.linear_qkv.weight": {
            key: f"model.layers.*.self_attn.{key}_proj.weight" for key in "qkv"
        },
    },
    "GatedMLPMapping": {
        "decoder.layers.*.mlp.experts.linear_fc1.weight*": {
            key: f"model.layers.*.mlp.experts.*.{key}_proj.weight" for key in ("gate", "up")
        },
    },
}
"""What Megatron-Bridge 0.3.1 says of Qwen3-MoE (models/qwen/qwen3_moe_bridge.py)."""


def recorded(extra: str | None = None) -> Any:
    """The recorded table in Megatron-Bridge's own classes."""
    mm.bridge()
    folder = Path(sys.modules["megatron.bridge"].__path__[0])
    for name in ("models", "models.conversion"):
        package = types.ModuleType(f"megatron.bridge.{name}")
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules.setdefault(package.__name__, package)
    mappings = importlib.import_module("megatron.bridge.models.conversion.param_mapping")
    registry = importlib.import_module("megatron.bridge.models.conversion.mapping_registry")
    made = []
    for kind, table in RECORDED.items():
        for name, hf in table.items():
            made.append(getattr(mappings, kind)(name, **(hf if isinstance(hf, dict) else {"hf_param": hf})))
    if extra:
        cls = getattr(mappings, extra, None) or type(extra, (mappings.ReplicatedMapping,), {})
        made.append(cls("decoder.layers.*.special", "model.layers.*.special"))
    return registry.MegatronMappingRegistry(*made)


@pytest.mark.parametrize(
    "name",
    ["embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"]
    + [
        f"decoder.layers.17.{rest}"
        for rest in (
            "self_attention.linear_qkv.layer_norm_weight",
            "self_attention.linear_qkv.weight",
            "self_attention.linear_proj.weight",
            "self_attention.q_layernorm.weight",
            "pre_mlp_layernorm.weight",
            "mlp.router.weight",
            "mlp.experts.linear_fc1.weight113",
            "mlp.experts.linear_fc2.weight0",
        )
    ],
)
def test_megatron_bridge_and_we_give_the_same_names(name: str) -> None:
    assert bridge_names(recorded())(name) == names_of(config())(name) is not None


def test_names_of_megatron_bridge_that_do_not_fit() -> None:
    assert bridge_names(recorded())("decoder.layers.0.unheard_of") is None
    with pytest.raises(InvalidInput, match=r"decoder\.layers\.3\.special: .* a NewerMapping, which does more"):
        bridge_names(recorded("NewerMapping"))("decoder.layers.3.special")


def test_query_groups_become_one_tensor_of_q_then_k_then_v() -> None:
    name = bridge_names(recorded("ConcatenatedQKVMapping"))("decoder.layers.3.special")
    assert name == "model.layers.3.special[qkv]"
    q, k, v = torch.arange(24).split([12, 6, 6])
    parameter = torch.cat([part.chunk(2)[group] for group in range(2) for part in (q, k, v)])
    (blocks,) = row_blocks("linear_qkv", name, 24, 1, config()).values()
    made = torch.full((24,), -1)
    for at, start, count in blocks:
        made[start : start + count] = parameter[at : at + count]
    assert made.tolist() == list(range(24))


@pytest.mark.parametrize(
    ("tp", "experts", "world", "rank", "ranks"),
    [(2, 4, 8, 5, (4, 5, 6, 7)), (4, 2, 8, 1, (0, 1, 2, 3)), (2, 3, 12, 7, (6, 7, 8, 9, 10, 11)), (1, 1, 2, 1, (1,))],
)
def test_a_replica_holds_dense_weights_and_experts(
    tp: int, experts: int, world: int, rank: int, ranks: tuple[int, ...]
) -> None:
    def block(r: int, n: int) -> tuple[int, ...]:
        return tuple(range(r // n * n, r // n * n + n))

    assert replica([(block(r, tp), block(r, experts)) for r in range(world)], rank) == ranks


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({}, None),
        ({"m.experts.1.up_proj": None}, r"m\.experts\.1\.up_proj: no adapter here.* push with mode=\"merged\""),
        ({"m.experts.1.up_proj": 8}, r"m\.experts\.1\.up_proj: rank 8, but m\.experts\.0\.up_proj has 4.*\"merged\""),
        ({"m.experts.0.up_proj": 8, "m.experts.1.up_proj": 8}, None),
    ],
)
def test_which_experts_can_be_served_as_adapters(change: dict[str, int | None], error: str | None) -> None:
    """All of a layer or none, each projection at a rank of its own; other layers and linears do not matter."""
    experts = {f"m.experts.{e}.{key}_proj": 4 for e in range(2) for key in ("gate", "up", "down")}
    tensors = [f"{name}.weight" for name in (*experts, "n.experts.0.up_proj", "m.q_proj", "m.norm")]
    ranks = {name: rank for name, rank in {**experts, "m.q_proj": 2, **change}.items() if rank}
    with pytest.raises(UnsupportedAdapter, match=error) if error else nullcontext():
        _check_experts(ranks, tensors)


@pytest.mark.parametrize(("model", "kinds"), [([torch.nn.Linear(2, 2)], "Linear"), ([], "none")])
def test_only_megatron_models(model: list[Any], kinds: str) -> None:
    with pytest.raises(InvalidInput, match=f"chunks of a megatron-core GPTModel or MambaModel, got {kinds}"):
        read(model)


def test_without_torch_distributed() -> None:
    class GPTModel(torch.nn.Module):
        config = types.SimpleNamespace(qk_layernorm=False, add_qkv_bias=False)
        vocab_size = 8

    GPTModel.__module__, GPTModel.__qualname__ = "megatron.core.models.gpt.gpt_model", "GPTModel"
    with pytest.raises(InvalidInput, match=r"torch\.distributed is not initialised"):
        merged_model([GPTModel()])


def merged_model(chunks: list[Any]) -> None:
    with merged(chunks):
        pass
