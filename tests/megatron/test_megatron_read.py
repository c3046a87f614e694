"""Reading megatron-core models: real ones, over gloo, loaded from HF models by code that shares nothing with ours."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="the megatron tests run in an environment of their own")

import docs_code
import megatron_models as mm
import torch
from helpers import assert_same_bits
from megatron_models import Grid
from megatron_processes import POOL
from torch import Tensor

from lora_merge.megatron import adapters_off, read
from lora_merge.names import innermost
from lora_merge.shards import Shard

TOKENS = torch.arange(1, 25).view(2, 12) * 7 % 101


@dataclass(frozen=True)
class Case:
    kind: str
    grid: Grid
    world: int
    style: str | None = None
    form: str = "local"
    hf: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        said = {k: "" if v is True else v for k, v in vars(self.grid).items() if v and (v is True or v != 1)}
        sizes = "".join(f" {k}{v}" for k, v in said.items())
        options = "".join(f" {v if isinstance(v, torch.dtype) else f'{k}={v}'}" for k, v in self.hf.items())
        return f"{self.kind}{sizes}{options} {self.form} {self.style}".replace("torch.", "")


# ---- on each rank ----------------------------------------------------------------------------------------------------


def boxes(shard: Shard) -> dict[str, Any]:
    return {"shape": shard.shape, "whole": shard.whole, "pieces": [(p.start, p.tensor.clone()) for p in shard.pieces]}


def collect(case: Case) -> dict[str, Any]:
    """What this rank holds, of base and adapters, and the logits with the adapters on and off."""
    hf = mm.hf_model(case.kind, **case.hf)
    chunks = mm.megatron(case.kind, hf, case.grid, form=case.form)
    answer: dict[str, Any] = {"base": mm.logits(chunks, TOKENS)}
    if case.style:
        docs_code.names_of("megatron.md")
        mm.adapt(chunks, case.style)
    before = [p.data_ptr() for c in chunks for p in c.parameters()]
    model = read(chunks, vocab_size=101)
    assert before == [p.data_ptr() for c in chunks for p in c.parameters()]
    if case.style:
        answer["logits"] = mm.logits(chunks, TOKENS)
        with contextlib.suppress(KeyError), adapters_off(chunks):
            answer["off"] = mm.logits(chunks, TOKENS)
            raise KeyError
        answer["on again"] = mm.logits(chunks, TOKENS)
    found: dict[int, dict[str, Any]] = {}

    def once(shard: Shard) -> dict[str, Any]:
        return found.setdefault(id(shard), boxes(shard))

    storages = {p.untyped_storage().data_ptr() for c in chunks for p in c.parameters()}
    for name, shard in model.tensors:
        for piece in shard.pieces:
            assert piece.tensor.untyped_storage().data_ptr() in storages, f"{name} is a copy"
    deltas = {name: [(once(f.lora_A), once(f.lora_B), f.scaling) for f in model.deltas[name]] for name in model.deltas}
    return answer | {
        "tensors": {name: boxes(shard) for name, shard in model.tensors},
        "deltas": deltas,
        "groups": model.groups,
        "layers": model.layers,
    }


# ---- and on all of them together -------------------------------------------------------------------------------------


def assemble(what: str, parts: list[dict[str, Any]]) -> Tensor:
    """The whole tensor: every element held, the same by all that hold it; `whole` means in one piece."""
    shape = parts[0]["shape"]
    out = torch.zeros(shape, dtype=next(t for p in parts for _, t in p["pieces"]).dtype)
    seen = torch.zeros(shape, dtype=torch.int32)
    for part in parts:
        assert part["shape"] == shape, f"{what}: {part['shape']} and {shape}"
        mine = torch.zeros(shape, dtype=torch.int32)
        for start, tensor in part["pieces"]:
            at = tuple(slice(s, s + n) for s, n in zip(start, tensor.shape, strict=True))
            held = seen[at] > 0
            assert_same_bits(tensor[held], out[at][held], f"{what}, on two ranks")
            out[at] = tensor
            mine[at] += 1
        assert int(mine.max()) <= 1, f"{what}: a rank's pieces overlap"
        assert part["whole"] == (bool(mine.all()) and len(part["pieces"]) == 1), f"{what}: whole={part['whole']}"
        seen += mine
    assert seen.all(), f"{what}: {int((seen == 0).sum())} of {seen.numel()} elements are on no rank"
    return out


def check(case: Case) -> list[dict[str, Any]]:
    """The pieces of all ranks are the HF model, bit for bit; with the adapters they give the forward's logits."""
    ranks = POOL.run(case.world, collect, case)
    hf = mm.hf_model(case.kind, **case.hf)
    wanted = mm.checkpoint(hf)
    names = {name for rank in ranks for name in rank["tensors"]}
    assert names == set(wanted), f"only here: {sorted(names - set(wanted))}, missing: {sorted(set(wanted) - names)}"
    merged = {}
    for name, value in wanted.items():
        whole = assemble(name, [rank["tensors"][name] for rank in ranks if name in rank["tensors"]])
        assert_same_bits(whole, value, name)
        merged[name] = whole.double()
        holders = [rank["deltas"][name] for rank in ranks if name in rank["deltas"]]
        for i, (_, _, scaling) in enumerate(holders[0] if holders else ()):
            a = assemble(f"{name} lora_A", [h[i][0] for h in holders]).double()
            b = assemble(f"{name} lora_B", [h[i][1] for h in holders]).double()
            merged[name] += scaling * b @ a
    if hf.dtype == torch.float32:
        compare_logits(case, hf, merged, ranks)
    return ranks


def compare_logits(case: Case, hf: Any, merged: dict[str, Tensor], ranks: list[dict[str, Any]]) -> None:
    """HF with the merged weights says what the adapter model's own forward says; with adapters off, the base."""
    base, ours = hf(TOKENS).logits.detach(), mm.with_weights(hf, merged)(TOKENS).logits.detach()
    effect = (ours - base).abs().max()
    for rank in ranks:
        assert (rank["base"][..., :101] - base).abs().max() < 1e-5, "the loader of the test is wrong"
        if case.style:
            assert effect > 0.02, f"the adapters do nothing: {effect}"
            error = (rank["logits"][..., :101] - ours).abs().max()
            assert error < 1e-5 * max(1.0, float(ours.abs().max())), f"off by {error}, on an effect of {effect}"
            assert_same_bits(rank["off"], rank["base"], "logits with the adapters off")
            assert_same_bits(rank["on again"], rank["logits"], "logits after")


BF16 = {"dtype": torch.bfloat16}
DENSE = [
    Case("llama", Grid(), 1, "bridge"),
    Case("llama", Grid(), 1, "canonical"),
    Case("qwen3", Grid(tp=2), 2, "bridge", hf={"tied": True}),
    Case("qwen2", Grid(tp=2), 2, "canonical"),
    Case("qwen2", Grid(tp=2), 2, "mcore", "te", hf={"tied": True}),
    Case("llama", Grid(tp=2), 2, "bridge", "te"),
    Case("qwen3", Grid(tp=2), 4, "bridge"),  # and two data-parallel replicas
    Case("llama", Grid(tp=4), 4, "bridge"),
    Case("qwen3", Grid(tp=4), 4, "canonical"),
    Case("qwen2", Grid(tp=4), 4, "mcore"),
    Case("qwen2", Grid(tp=4), 4, "mcore", hf=BF16),
    Case("llama", Grid(tp=2), 2, "several"),
]
GROUPS = [
    Case("llama", Grid(tp=tp), tp, style, hf={"heads": heads})
    for tp, heads, style in [(2, (4, 1), "bridge"), (4, (8, 2), "mcore"), (4, (4, 1), "bridge"), (4, (8, 2), "bridge")]
]
STAGES = [
    Case("llama", Grid(tp=2, pp=2), 4, "bridge", hf={"tied": True}),
    Case("qwen3", Grid(tp=2, pp=2, vpp=2), 4, "mcore", hf={"layers": 4}),
    Case("qwen2", Grid(pp=2), 4, "bridge", hf=BF16),
    Case("qwen3_moe", Grid(pp=2, ep=2), 4, "bridge"),
]
EXPERTS = [
    Case("qwen3_moe", Grid(), 1, "bridge"),
    Case("qwen3_moe", Grid(tp=2, ep=2, etp=1), 2, "bridge"),
    Case("mixtral", Grid(ep=2), 2, "mcore"),
    Case("mixtral", Grid(tp=2, etp=2), 2, "fc1"),
    Case("mixtral", Grid(tp=2, etp=1, ep=2), 2, "router"),
    Case("qwen2_moe", Grid(tp=2, ep=2, etp=1), 4, "bridge"),
]
GROUPED = [
    Case("qwen3_moe", Grid(ep=2), 2, "attention", "grouped", hf=BF16),
    Case("mixtral", Grid(tp=2, etp=2), 2, None, "grouped", hf=BF16),
    Case("qwen3_moe", Grid(ep=2), 2, "bridge", "te"),
    Case("mixtral", Grid(tp=2, ep=2, etp=1), 2, "mcore", "te"),
]


@pytest.mark.parametrize("case", DENSE, ids=str)
def test_dense_models_with_a_tied_or_an_untied_head(case: Case) -> None:
    ranks = check(case)
    for rank in ranks:
        first = {name: deltas[0][0]["pieces"][0][1].data_ptr() for name, deltas in rank["deltas"].items()}
        qkv = {first[f"model.layers.0.self_attn.{key}_proj.weight"] for key in "qkv"}
        assert len(qkv) == (3 if case.style == "canonical" else 1), "q, k and v share lora_A unless each has its own"


@pytest.mark.parametrize("case", GROUPS, ids=str)
def test_shards_that_cut_through_query_groups(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", STAGES, ids=str)
def test_layers_keep_their_global_number_on_every_stage(case: Case) -> None:
    ranks = check(case)
    layers = case.hf.get("layers", 2)
    copies = case.world // case.grid.pp
    assert sorted(n for rank in ranks for n in rank["layers"]) == sorted(list(range(layers)) * copies)


@pytest.mark.parametrize("case", EXPERTS, ids=str)
def test_experts_keep_their_global_number_and_get_the_names_that_engines_know(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", GROUPED, ids=str)
def test_grouped_experts(case: Case) -> None:
    check(case)


def test_the_style_of_the_documentation() -> None:
    check(Case("llama", Grid(tp=2), 2, "third"))


# ---- bad input -------------------------------------------------------------------------------------------------------


def refused(case: Case, damage: str) -> str:
    from megatron.core import parallel_state

    hf = mm.hf_model(case.kind, **case.hf)
    chunks: list[Any] = mm.megatron(case.kind, hf, case.grid)
    if case.style:
        mm.adapt(chunks, case.style)
    layers = innermost(chunks[0]).decoder.layers
    match damage:
        case "unknown parameter":
            layers[0].extra = torch.nn.Linear(2, 2)
        case "unknown linear":
            layers[0].self_attention.linear_proj = mm.own_linear(layers[0].self_attention.linear_proj)
        case "groups":
            layers[1].self_attention.linear_qkv.config.num_query_groups = 2
        case "hidden":
            layers[0].mlp.linear_fc2.config = replace(layers[0].mlp.linear_fc2.config, hidden_size=128)
        case "rank":
            adapter = layers[0].mlp.linear_fc1.adapter
            adapter.linear_in.weight = torch.nn.Parameter(adapter.linear_in.weight[1:])
        case "rows":
            adapter = layers[0].mlp.linear_fc1.adapter
            adapter.linear_out.weight = torch.nn.Parameter(adapter.linear_out.weight[1:])
        case "swish":
            layers[0].mlp.linear_fc1.adapter.activation = torch.nn.SiLU()
        case "merged":
            layers[0].mlp.linear_fc1.merged_adapters.append("default")
        case "bias":
            layers[0].mlp.linear_fc1.lora_B["default"].bias = torch.nn.Parameter(torch.ones(3))
        case "stage":
            del chunks[1]
        case "groups of Megatron":
            del innermost(chunks[0]).pg_collection
            parallel_state.destroy_model_parallel()
        case "twice":
            chunks.append(chunks[0])
            innermost(chunks[0]).config.virtual_pipeline_model_parallel_size = 2
    try:
        read(chunks, vocab_size=500 if damage == "vocabulary" else 101)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


LLAMA, LLAMA2 = Case("llama", Grid(), 1), Case("llama", Grid(tp=2), 2)


BAD = [
    (LLAMA, "unknown parameter", r"InvalidInput: rank 0: decoder\.layers\.0\.extra\.weight: .* pass names="),
    (LLAMA2, "unknown linear", r"InvalidInput: rank \d: .*linear_proj\.weight: .* class .*OwnLinear"),
    (LLAMA, "groups", r"InvalidInput: rank 0: decoder\.layers\.0\.self_attention\.linear_qkv\.weight: 128 rows"),
    (LLAMA2, "hidden", r"InvalidInput: rank \d: .*layers\.0\.mlp\.linear_fc2\.weight: .* fit hidden_size=128"),
    (LLAMA, "vocabulary", r"InvalidInput: rank 0: embedding.* 128 rows, fewer than the vocabulary of 500"),
    (replace(LLAMA, style="bridge"), "rank", r"InvalidInput: rank 0: .*layers\.0\.mlp\.linear_fc1: lora_A"),
    (replace(LLAMA2, style="bridge"), "rows", r"InvalidInput: rank \d: .*linear_fc1: lora_B has 94 rows .* 96"),
    (replace(LLAMA, style="bridge"), "swish", r"UnsupportedAdapter: rank 0: .*linear_fc1: .* a SiLU between"),
    (replace(LLAMA, style="dora"), "dora", r"UnsupportedAdapter: rank 0: .*: adapters of class .*DoRALinear cannot"),
    (replace(LLAMA, style="mcore"), "merged", r"AlreadyMerged: rank 0: .*linear_fc1: .* holds the adapters default"),
    (replace(LLAMA, style="mcore"), "bias", r"UnsupportedAdapter: rank 0: .*linear_fc1: .* has lora_bias"),
    (
        replace(LLAMA, style="output_layer", hf={"tied": True}),
        "tied head",
        r"UnsupportedAdapter: rank 0: output_layer: .*share_embeddings_and_output_weights",
    ),
    (
        replace(LLAMA2, style="canonical", hf={"heads": (4, 1)}),
        "canonical below tp",
        r"UnsupportedAdapter: rank \d: .*linear_qkv: separate adapters .*1 query groups over 2 ranks: train LoRA on ",
    ),
    (
        Case("qwen3_moe", Grid(tp=2, etp=2), 2, "bridge"),
        "experts fc2",
        r"UnsupportedAdapter: rank \d: .*linear_fc2: .*expert tensor parallelism 2: its own forward does not",
    ),
    (Case("llama", Grid(pp=2, vpp=2), 2, hf={"layers": 4}), "stage", r"InvalidInput: rank \d: .*2 virtual stages"),
    (LLAMA, "groups of Megatron", r"InvalidInput: .* initialize_model_parallel first"),
    (LLAMA, "twice", r"InvalidInput: rank 0: .*model\.embed_tokens\.weight was found twice"),
]


@pytest.mark.parametrize(("case", "damage", "wanted"), BAD, ids=[damage for _, damage, _ in BAD])
def test_bad_input(case: Case, damage: str, wanted: str) -> None:
    for said in POOL.run(case.world, refused, case, damage):
        assert re.match(wanted, said), said
