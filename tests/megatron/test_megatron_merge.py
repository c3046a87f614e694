"""`merged` and `MergedWeights` on real megatron-core models over gloo.

Expected values come from the model in HF form: the adapters' halves, put together by the test's own code, merged into
the HF tensors by `lora_merge.merge`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("megatron.core", reason="the megatron tests run in an environment of their own")

import megatron_models as mm
import torch
import torch.distributed as dist
from held import assert_held
from helpers import assert_same_bits
from megatron_models import Grid
from megatron_peft import exported, with_peft
from megatron_processes import POOL
from torch import Tensor

import lora_merge
from lora_merge import MergedWeights, merged
from lora_merge.errors import LoraMergeError, UnsupportedAdapter
from lora_merge.models.megatron.groups import Groups, ProcessGroups
from lora_merge.models.megatron.live import _replica
from lora_merge.models.megatron.read import Chunks, read
from lora_merge.names import innermost
from lora_merge.shards.ranks import Ranks
from lora_merge.stream.buckets import extent
from lora_merge.stream.held import HeldWriter
from tests.megatron.test_megatron_read import TOKENS, Case, assemble, boxes

BF16 = {"dtype": torch.bfloat16}


def work(case: Case, bucket_bytes: int) -> dict[str, Any]:
    """On each rank: logits with adapters, inside `merged` and after it; the stream; and the adapters as they lie."""
    hf = mm.hf_model(case.kind, **case.hf)
    chunks = mm.megatron(case.kind, hf, case.grid, form=case.form)
    assert case.style
    mm.adapt(chunks, case.style)
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    before = [p.detach().clone() for p in parameters]
    model = Chunks(chunks, vocab_size=101)
    answer: dict[str, Any] = {"adapters": mm.logits(chunks, TOKENS)}
    for _ in range(2):  # the second time with the plans of the first
        with merged(model):
            answer["merged"] = mm.logits(chunks, TOKENS)
    answer["after"] = mm.logits(chunks, TOKENS)
    with merged(model, strategy="unshard"):
        assert_same_bits(mm.logits(chunks, TOKENS), answer["merged"], 'merged with strategy="unshard"')
    stream = MergedWeights(model, bucket_bytes=bucket_bytes)
    answer["stream"] = {name: tensor.clone() for name, tensor in stream}
    again = {name: tensor.clone() for name, tensor in stream}
    assert answer["stream"].keys() == again.keys()
    for name, tensor in answer["stream"].items():
        assert_same_bits(again[name], tensor, f"{name}, the second time")
    for name, tensor in MergedWeights(model, strategy="unshard"):
        assert_same_bits(tensor, answer["stream"][name], f'{name} with strategy="unshard"')
    answer["metadata"] = [tuple(meta) for meta in stream.metadata()]
    writer = stream.bucket_writer()
    answer["sends"] = sum(slot.nbytes for index in range(len(writer.table)) for slot in writer.mine(index))
    answer["ranks"] = writer.ranks.size
    assert_held(stream, answer["stream"], writer.ranks, str(case))
    for p, was in zip(parameters, before, strict=True):
        assert_same_bits(p.detach(), was, "a shard after everything")
    found = read(chunks, vocab_size=101)
    answer["deltas"] = {
        name: [(boxes(f.lora_A), boxes(f.lora_B), f.scaling) for f in factors] for name, factors in found.deltas.items()
    }
    return answer


def check(
    case: Case, bucket_bytes: int = 20_000, *, run: Callable[..., list[Any]] = POOL.run, device: str = "cpu"
) -> None:
    """What all ranks answered, against the model in HF form, merged on `device`."""
    ranks = run(case.world, work, case, bucket_bytes)
    hf = mm.hf_model(case.kind, **case.hf)
    wanted = mm.checkpoint(hf)
    for name, value in wanted.items():
        holders = [rank["deltas"][name] for rank in ranks if name in rank["deltas"]]
        if holders:
            pairs = [
                (assemble(name, [h[i][0] for h in holders]), assemble(name, [h[i][1] for h in holders]), scaling)
                for i, (_, _, scaling) in enumerate(holders[0])
            ]
            wanted[name] = merge(value, pairs, device)
    tolerance = 1e-5 if hf.dtype == torch.float32 else 0.0
    replicas = case.world // ranks[0]["ranks"]
    assert sum(rank["sends"] for rank in ranks) == replicas * sum(value.nbytes for value in wanted.values()), (
        "of each replica, one rank sends each element"
    )
    for rank in ranks:
        assert set(rank["stream"]) == set(wanted)
        for name, value in wanted.items():
            assert_same_bits(rank["stream"][name], value, name)
        assert {name: (dtype, shape) for name, dtype, shape in rank["metadata"]} == {
            name: (value.dtype, tuple(value.shape)) for name, value in wanted.items()
        }
        assert [name for name, _, _ in rank["metadata"]] == list(rank["stream"])
        assert_same_bits(rank["after"], rank["adapters"], "logits after")
        if tolerance:
            inside, outside = (rank[key][..., :101] for key in ("merged", "adapters"))  # NaN beyond the vocabulary
            scale = max(1.0, float(outside.abs().max()))
            error = (inside - outside).abs().max()
            assert error < tolerance * scale, f"merged: off by {error}"
            assert not torch.equal(inside, outside), "sums in another order would differ somewhere: nothing was merged"
    ours = mm.with_weights(hf, wanted)(TOKENS).logits.detach()
    if tolerance:
        for rank in ranks:
            assert (rank["merged"][..., :101] - ours).abs().max() < 1e-5 * max(1.0, float(ours.abs().max()))


def merge(weight: Tensor, pairs: list[tuple[Tensor, Tensor, float]], device: str) -> Tensor:
    """Several adapters side by side in float32, as everywhere, with the largest scaling apart: one rounding."""
    if len(pairs) == 1:
        ((a, b, scaling),) = pairs
    else:
        a = torch.cat([a.float() for a, _, _ in pairs])
        scaling = max(abs(scaling) for _, _, scaling in pairs)
        b = torch.cat([b.float() * (own / scaling) for _, b, own in pairs], 1)
    return lora_merge.merge(weight.to(device), a.to(device), b.to(device), scaling).cpu()


CASES = [
    Case("llama", Grid(), 1, "bridge"),
    Case("qwen2", Grid(tp=2), 2, "bridge", hf={"tied": True}),
    Case("qwen3", Grid(tp=2), 2, "canonical", hf=BF16),
    Case("qwen2", Grid(tp=4), 4, "mcore", "te", hf=BF16),
    Case("llama", Grid(tp=2), 2, "several"),
    Case("llama", Grid(tp=4), 4, "bridge", hf={"heads": (8, 2)}),
    Case("llama", Grid(tp=2), 4, "bridge"),
    Case("qwen2", Grid(tp=2, sp=True), 2, "canonical"),
    Case("llama", Grid(tp=2, pp=2, sp=True), 4, "bridge"),
    Case("llama", Grid(tp=2, cp=2), 4, "bridge"),
    Case("qwen3_moe", Grid(cp=2, ep=2), 2, "bridge"),
    Case("qwen3_moe", Grid(tp=2, ep=2, etp=1, sp=True), 2, "bridge"),
    Case("qwen3_moe", Grid(tp=2, ep=4, etp=1, sp=True), 4, "bridge"),
    Case("llama", Grid(tp=2, pp=2), 4, "bridge", hf={"tied": True}),
    Case("qwen3", Grid(tp=2, pp=2, vpp=2), 4, "bridge", hf={"layers": 4} | BF16),
    Case("qwen2", Grid(pp=2), 2, "several"),
    Case("mixtral", Grid(tp=2, ep=2, etp=1), 2, "several"),
    Case("mixtral", Grid(tp=2, etp=2), 2, "fc1"),
    Case("qwen2_moe", Grid(ep=2), 2, "mcore", hf=BF16),
    Case("qwen3_moe", Grid(ep=2), 2, "bridge", "te"),
    Case("qwen3_moe", Grid(pp=2, ep=2), 4, "bridge"),
    Case("mixtral", Grid(ep=2), 2, "attention", "grouped", hf=BF16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_merged_in_place_and_streamed(case: Case) -> None:
    check(case)


def moved(case: Case) -> dict[str, int]:
    """Bytes that a rank gets from others as it takes its own layers, by layer."""
    chunks = mm.megatron(case.kind, mm.hf_model(case.kind, **case.hf), case.grid)
    writer = MergedWeights(Chunks(chunks, vocab_size=101))._open(held=True)[0]
    assert isinstance(writer, HeldWriter)
    comes = [[extent(slots) for slots in rows] for rows in writer._comes]
    return {layer[0]: sum(n) - n[writer.ranks.rank] for layer, n in zip(writer.layers, comes, strict=True) if sum(n)}


@pytest.mark.parametrize("grid", [Grid(pp=2), Grid(ep=2)], ids=str)
def test_what_a_rank_has_whole_stays_there(grid: Grid) -> None:
    """Stages of a pipeline, and experts; the norm behind the last layer goes to all."""
    for got in POOL.run(2, moved, Case("qwen3_moe", grid, 2)):
        assert {name: nbytes for name, nbytes in got.items() if nbytes and "layers" in name} == {}


def slots(case: Case) -> dict[str, int]:
    """In how many slots each tensor travels."""
    chunks = mm.megatron(case.kind, mm.hf_model(case.kind, **case.hf), case.grid)
    table = MergedWeights(Chunks(chunks, vocab_size=101)).bucket_writer().table
    return Counter(slot.name.rpartition("layers.0.")[2] for part in table for slot in part)


@pytest.mark.parametrize(("grid", "world"), [(Grid(), 1), (Grid(tp=2), 2)])
def test_query_groups_that_are_neighbours_travel_in_one_slot(grid: Grid, world: int) -> None:
    for counted in POOL.run(world, slots, Case("llama", grid, world)):
        assert {counted[f"self_attn.{key}_proj.weight"] for key in "qkvo"} == {world}
        assert {counted[f"mlp.{key}_proj.weight"] for key in ("gate", "up", "down")} == {world}
        assert counted["input_layernorm.weight"] == 1


def talk(case: Case) -> dict[str, list[tuple[int, int]]]:
    """`(ranks, bytes that come from others)` of the gathers of a `with merged` and of a pass, with plans at hand."""
    chunks = mm.megatron(case.kind, mm.hf_model(case.kind), case.grid)
    assert case.style
    mm.adapt(chunks, case.style)
    model = Chunks(chunks, vocab_size=101)
    stream, said, through = MergedWeights(model), list[tuple[int, int]](), Ranks.all_gather_parts

    def listen(ranks: Ranks, buffer: Tensor, sizes: Sequence[int]) -> Callable[[], None]:
        said.append((ranks.size, sum(sizes) - sizes[ranks.rank]))
        return through(ranks, buffer, sizes)

    answer: dict[str, list[tuple[int, int]]] = {}
    with mock.patch.object(Ranks, "all_gather_parts", listen):
        for _ in range(2):
            for what, entry in (("merged", lambda: enter(model)), ("streamed", lambda: list(stream))):
                said.clear()
                entry()
                answer[what] = list(said)
    return answer


@pytest.mark.parametrize(("style", "halves"), [("bridge", 4), ("mcore", 0)])
def test_adapters_are_gathered_over_tensor_parallel_ranks_in_one_collective(style: str, halves: int) -> None:
    """Of Megatron-Bridge's, of one layer on each stage: half of lora_A `[4, 64]` of two linears, of lora_B `[64, 4]` of
    two others. Of mcore-bridge's, nothing. Buckets go to all stages."""
    wanted = [(2, halves * 4 * 64 // 2 * 4)] if halves else []
    for said in POOL.run(4, talk, Case("llama", Grid(tp=2, pp=2), 4, style)):
        assert said["merged"] == wanted
        assert [call for call in said["streamed"] if call[0] < 4] == wanted
        assert any(ranks == 4 for ranks, _ in said["streamed"])


# ---- adapters --------------------------------------------------------------------------------------------------------


def export(case: Case) -> dict[str, Any]:
    """The adapters in PEFT's names, as adapter mode sends them (or why not), and the logits with them."""
    chunks = mm.megatron(case.kind, mm.hf_model(case.kind, **case.hf), case.grid, form=case.form)
    assert case.style
    mm.adapt(chunks, case.style)
    try:
        tensors = exported(Chunks(chunks, vocab_size=101))
    except UnsupportedAdapter as error:
        return {"refused": str(error)}
    return {"tensors": tensors, "logits": mm.logits(chunks, TOKENS)}


@pytest.mark.parametrize(
    "case",
    [
        Case("qwen2", Grid(tp=2), 2, "bridge", hf={"tied": True}),
        Case("qwen3", Grid(tp=2, pp=2), 4, "canonical"),
        Case("llama", Grid(pp=2), 2, "several"),
        Case("llama", Grid(tp=4), 4, "mcore", hf={"heads": (8, 2)}),
        Case("qwen3_moe", Grid(tp=2, ep=2, etp=1), 2, "bridge"),
        Case("qwen3_moe", Grid(ep=2), 2, "bridge", "te"),
        Case("mixtral", Grid(tp=2, ep=2, etp=1), 2, "mcore", "te"),
        Case("mixtral", Grid(pp=2), 2, "canonical"),
    ],
    ids=str,
)
def test_peft_loads_the_adapters_as_a_checkpoint_of_its_own(case: Case) -> None:
    ranks = POOL.run(case.world, export, case)
    tensors, hf = ranks[0]["tensors"], mm.hf_model(case.kind, **case.hf)
    linears = 4 + 3 * (getattr(hf.config, "num_experts", None) or getattr(hf.config, "num_local_experts", 1))
    assert len(tensors) == 2 * linears * 2, f"lora_A and lora_B of {linears} linears in two layers"
    wanted = with_peft(hf, tensors)(TOKENS).logits.detach()
    for rank in ranks:
        assert all(torch.equal(rank["tensors"][name], tensor) for name, tensor in tensors.items())
        error = (rank["logits"][..., :101] - wanted).abs().max()
        assert error < 1e-5 * max(1.0, float(wanted.abs().max())), f"off by {error}"


def test_experts_are_adapted_all_or_none() -> None:
    """vLLM packs gate, up and down of every expert of a layer; it fails an assertion where one of them is missing."""
    for rank in POOL.run(2, export, Case("mixtral", Grid(ep=2), 2, "fc1")):
        assert re.fullmatch(r'model\.layers\.0\..*experts\.0\.w2: .* push with mode="merged" instead', rank["refused"])


# ---- bad input: one error on every rank, naming the parameter and the rank; nothing is changed -----------------------


def refused(case: Case, damage: str, rank: int) -> list[str]:
    hf = mm.hf_model(case.kind, **case.hf)
    chunks: list[Any] = mm.megatron(case.kind, hf, case.grid)
    assert case.style
    mm.adapt(chunks, case.style)
    layers = innermost(chunks[0]).decoder.layers
    if dist.get_rank() == rank:
        match damage:
            case "no adapters":
                for layer in layers:
                    linear = layer.self_attention.linear_proj
                    layer.self_attention.linear_proj = getattr(linear, "to_wrap", None) or linear.base_layer
            case "other scaling":
                layers[0].mlp.linear_fc1.adapter.alpha = 7
            case "unknown parameter":
                layers[0].extra = torch.nn.Linear(2, 2)
            case "a stage that is missing":
                del innermost(chunks[0]).decoder.layers[0]
            case "other heads":  # as many rows in all: (12 + 2 * 2) heads for (8 + 2 * 4)
                config = innermost(chunks[0]).config
                config.num_attention_heads, config.num_query_groups = 12, 2
            case "other groups":
                innermost(chunks[0]).config.num_query_groups = 2
            case "a virtual stage that is missing":
                del chunks[1]
            case "a vocabulary that the weights do not have":
                return [attempt(chunks, entry, 500) for entry in (enter, iterate)]
            case "other vocabulary":
                return [attempt(chunks, entry, 100) for entry in (enter, iterate)]
    said = [attempt(chunks, entry, 101) for entry in (enter, iterate)]
    assert all(bool(torch.isfinite(p).all()) for c in chunks for p in c.decoder.parameters())
    return said


def attempt(chunks: list[Any], entry: Callable[[Chunks], None], vocabulary: int) -> str:
    before = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
    try:
        entry(Chunks(chunks, vocab_size=vocabulary))
    except LoraMergeError as error:
        for was, p in zip(before, (p for chunk in chunks for p in chunk.parameters()), strict=True):
            assert_same_bits(p.detach(), was, "after an error")
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def enter(model: Chunks) -> None:
    with merged(model):
        pass


def iterate(model: Chunks) -> None:
    list(MergedWeights(model))


LLAMA = Case("llama", Grid(tp=2), 2, "bridge")
STAGES = Case("llama", Grid(pp=2), 2, "bridge")
BAD = [
    (LLAMA, "no adapters", 1, r"layers\.0\.self_attn\.o_proj\.weight: rank 0 has .*lora_A.*, rank 1 .* without an"),
    (
        Case("llama", Grid(tp=2, pp=2), 4, "mcore"),
        "no adapters",
        3,
        r"layers\.1\.self_attn\.o_proj\.weight: rank 2 .*lora_A.*, rank 3 .* without an",
    ),
    (LLAMA, "other scaling", 1, r"layers\.0\.mlp\.gate_proj\.weight: rank 0 .* x 1\.5, rank 1 .* x 1\.75"),
    (STAGES, "unknown parameter", 1, r"rank 1.*decoder\.layers\.1\.extra\.weight"),
    (STAGES, "a stage that is missing", 1, r"layers 1 of 2 are on none of the ranks 0, 1"),
    (Case("qwen2", Grid(tp=2), 2, "bridge"), "other vocabulary", 1, r"embed_tokens.*rank 1 has \[100, 64\]"),
    (LLAMA, "a vocabulary that the weights do not have", 1, r"rank 1: embedding\.word_embeddings\.weight: 128 rows"),
    (LLAMA, "other heads", 1, r"rank 1: decoder\.layers\.0\.self_attention\.linear_proj\.weight: .*heads=12"),
    (LLAMA, "other groups", 1, r"rank 1: decoder\.layers\.0\.self_attention\.linear_qkv\.weight: .*groups=2"),
    (
        Case("llama", Grid(pp=2, vpp=2), 2, "bridge", hf={"layers": 4}),
        "a virtual stage that is missing",
        1,
        r"rank 1: the model has 2 virtual stages on each rank, got 1 chunks",
    ),
]


@pytest.mark.parametrize(("case", "damage", "rank", "wanted"), BAD, ids=[damage for _, damage, _, _ in BAD])
def test_bad_input_is_one_error_on_every_rank(case: Case, damage: str, rank: int, wanted: str) -> None:
    for said in POOL.run(case.world, refused, case, damage, rank):
        assert [re.search(wanted, one, flags=re.DOTALL) is not None for one in said] == [True, True], said


def uneven(folder: Path) -> list[tuple[int, ...]]:
    """Groups of two and of three ranks in a world of four; once more after the world is another."""
    rank, found = dist.get_rank(), []
    for turn in range(2):
        if turn:
            dist.barrier()
            dist.destroy_process_group()
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
        sizes = [[(0, 1), (2, 3)], [(0, 1, 2), (1, 2, 3)]]
        made = [{ranks: dist.new_group(list(ranks)) for ranks in kind} for kind in sizes]
        model, experts = (next(ranks for ranks in kind if rank in ranks) for kind in sizes)
        pg = ProcessGroups(None, None, made[0][model], made[1][experts])
        group = _replica(Groups((0, 1), (0, 1), (0, 1), model, experts), pg)
        assert _replica(Groups((0, 1), (0, 1), (0, 1), model, experts), pg) is group
        dist.barrier(group)
        found.append(tuple(dist.get_process_group_ranks(group)))
    return found


def test_groups_that_do_not_fit_into_one_another_and_a_new_world(tmp_path: Path) -> None:
    assert POOL.run(4, uneven, tmp_path) == [[(0, 1, 2, 3)] * 2] * 4
