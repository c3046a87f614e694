"""`merged` and `MergedWeights` on real megatron-core models over gloo.

Expected values come from the model in HF form: the adapters' halves, put together by the test's own code, merged into
the HF tensors by `lora_merge.merge`.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="the megatron tests run in an environment of their own")

import megatron_models as mm
import torch
from helpers import assert_same_bits
from megatron_models import Grid
from megatron_processes import POOL
from test_megatron_read import TOKENS, Case, assemble, boxes
from torch import Tensor

import lora_merge
from lora_merge import MergedWeights, merged
from lora_merge.shards.megatron import Chunks, read

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
    stream = MergedWeights(model, bucket_bytes=bucket_bytes)
    answer["stream"] = {name: tensor.clone() for name, tensor in stream}
    again = {name: tensor.clone() for name, tensor in stream}
    assert answer["stream"].keys() == again.keys()
    for name, tensor in answer["stream"].items():
        assert_same_bits(again[name], tensor, f"{name}, the second time")
    answer["metadata"] = [tuple(meta) for meta in stream.metadata()]
    for p, was in zip(parameters, before, strict=True):
        assert_same_bits(p.detach(), was, "a shard after everything")
    found = read(chunks, vocab_size=101)
    answer["deltas"] = {
        name: [(boxes(f.lora_A), boxes(f.lora_B), f.scaling) for f in factors] for name, factors in found.deltas.items()
    }
    return answer


def check(case: Case, bucket_bytes: int = 20_000) -> None:
    ranks = POOL.run(case.world, work, case, bucket_bytes)
    hf = mm.hf_model(case.kind, **case.hf)
    wanted = mm.checkpoint(hf)
    for name, value in wanted.items():
        holders = [rank["deltas"][name] for rank in ranks if name in rank["deltas"]]
        if holders:
            pairs = [
                (assemble(name, [h[i][0] for h in holders]), assemble(name, [h[i][1] for h in holders]), scaling)
                for i, (_, _, scaling) in enumerate(holders[0])
            ]
            wanted[name] = merge(value, pairs)
    tolerance = 1e-5 if hf.dtype == torch.float32 else 0.0
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
            scale = max(1.0, float(rank["adapters"][..., :101].abs().max()))
            error = (rank["merged"][..., :101] - rank["adapters"][..., :101]).abs().max()
            assert error < tolerance * scale, f"merged: off by {error}"
            assert not torch.equal(rank["merged"], rank["adapters"])
    ours = mm.with_weights(hf, wanted)(TOKENS).logits.detach()
    if tolerance:
        for rank in ranks:
            assert (rank["merged"][..., :101] - ours).abs().max() < 1e-5 * max(1.0, float(ours.abs().max()))


def merge(weight: Tensor, pairs: list[tuple[Tensor, Tensor, float]]) -> Tensor:
    """Several adapters side by side in float32, as everywhere: one rounding."""
    if len(pairs) == 1:
        ((a, b, scaling),) = pairs
        return lora_merge.merge(weight, a, b, scaling)
    a = torch.cat([a.float() for a, _, _ in pairs])
    b = torch.cat([b.float() * scaling for _, b, scaling in pairs], 1)
    return lora_merge.merge(weight, a, b, 1.0)


CASES = [
    Case("llama", Grid(), 1, "bridge"),
    Case("qwen2", Grid(tp=2), 2, "bridge", hf={"tied": True}),
    Case("qwen3", Grid(tp=2), 2, "canonical", hf=BF16),
    Case("qwen2", Grid(tp=4), 4, "mcore", "te", hf=BF16),
    Case("llama", Grid(tp=2), 2, "several"),
    Case("llama", Grid(tp=4), 4, "bridge", hf={"heads": (8, 2)}),
    Case("llama", Grid(tp=2), 4, "bridge"),
    Case("llama", Grid(tp=2, pp=2), 4, "bridge", hf={"tied": True}),
    Case("qwen3", Grid(tp=2, pp=2, vpp=2), 4, "bridge", hf={"layers": 4} | BF16),
    Case("qwen2", Grid(pp=2), 2, "several"),
    Case("qwen3_moe", Grid(tp=2, ep=2, etp=1), 2, "bridge"),
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
