"""A live Megatron model that changed is read again, whatever changed; one that did not is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("megatron.core", reason="the megatron tests run in an environment of their own")

import megatron_models as mm
import torch
import torch.distributed as dist
from megatron_models import Grid
from megatron_processes import POOL
from torch import Tensor, nn

import lora_merge.models.megatron.live
from lora_merge import (
    AlreadyMerged,
    LoraMergeError,
    MergedWeights,
    NotRestored,
    UnsupportedAdapter,
    kept_merges,
    merged,
)
from lora_merge.kernels.segments import raw
from lora_merge.megatron import Chunks
from lora_merge.models import snapshot
from lora_merge.models.megatron import read as megatron
from lora_merge.names import innermost, walk
from tests.megatron.test_megatron_read import Case


def fc1(model: Any) -> Any:
    """The adapter layer of a linear."""
    return model.decoder.layers[0].mlp.linear_fc1


def parameter(like: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.randn_like(like))


def numbered(model: Any, *numbers: int) -> None:
    for layer, number in zip(model.decoder.layers, numbers, strict=True):
        layer.layer_number = number


def swapped(model: Any) -> None:
    layers = model.decoder.layers._modules
    layers["0"], layers["1"] = layers["1"], layers["0"]


def switched(model: Any) -> None:
    fc1(model)._active_adapter = ["other"]


BRIDGE, MCORE = Case("qwen2", Grid(), 1, "bridge"), Case("llama", Grid(), 1, "several")
EXPERTS = Case("qwen3_moe", Grid(), 1, "bridge", "te")
CHANGES: dict[str, tuple[Case, Callable[[Any], object]]] = {
    "alpha": (BRIDGE, lambda m: setattr(fc1(m).adapter, "alpha", 9)),
    "dim": (BRIDGE, lambda m: setattr(fc1(m).adapter, "dim", 8)),
    "adapter disabled": (BRIDGE, lambda m: setattr(fc1(m), "_adapter_enabled", False)),
    "adapter removed": (BRIDGE, lambda m: setattr(m.decoder.layers[0].mlp, "linear_fc1", fc1(m).to_wrap)),
    "lora_A moved": (BRIDGE, lambda m: setattr(fc1(m).adapter.linear_in.weight, "data", torch.randn(4, 64))),
    "lora_B replaced": (
        BRIDGE,
        lambda m: setattr(fc1(m).adapter.linear_out, "weight", parameter(fc1(m).adapter.linear_out.weight)),
    ),
    "an activation": (BRIDGE, lambda m: setattr(fc1(m).adapter, "activation", nn.SiLU())),
    "base moved": (BRIDGE, lambda m: setattr(fc1(m).to_wrap.weight, "data", torch.randn(96, 64))),
    "base replaced": (BRIDGE, lambda m: setattr(fc1(m).to_wrap, "weight", parameter(fc1(m).to_wrap.weight))),
    "base of another dtype": (BRIDGE, lambda m: m.to(torch.bfloat16)),
    "norm replaced": (BRIDGE, lambda m: setattr(m.decoder, "final_layernorm", nn.RMSNorm(64))),
    "layers renumbered": (BRIDGE, lambda m: numbered(m, 2, 1)),
    "layers swapped": (BRIDGE, swapped),
    "a parameter more": (BRIDGE, lambda m: setattr(m.decoder.layers[1], "extra", nn.Linear(2, 2))),
    "a buffer more": (BRIDGE, lambda m: m.decoder.layers[1].register_buffer("extra", torch.ones(2))),
    "groups": (BRIDGE, lambda m: setattr(m.config, "num_query_groups", 2)),
    "heads": (BRIDGE, lambda m: vars(m.config).update(num_attention_heads=12, num_query_groups=2)),
    "another config": (BRIDGE, lambda m: setattr(fc1(m).to_wrap, "config", replace(m.config, hidden_size=32))),
    "tied": (BRIDGE, lambda m: setattr(m, "share_embeddings_and_output_weights", True)),
    "scaling": (MCORE, lambda m: fc1(m).scaling.update(default=0.5)),
    "another adapter": (MCORE, switched),
    "disabled": (MCORE, lambda m: setattr(fc1(m), "_disable_adapters", True)),
    "merged": (MCORE, lambda m: fc1(m).merged_adapters.append("default")),
    "an expert's adapter": (
        EXPERTS,
        lambda m: setattr(m.decoder.layers[0].mlp.experts.linear_fc2.adapter, "alpha", 9),
    ),
    "an expert": (
        EXPERTS,
        lambda m: setattr(m.decoder.layers[0].mlp.experts.linear_fc2.to_wrap.weight3, "data", torch.randn(64, 24)),
    ),
}


def outcome(work: Callable[[], Any]) -> Any:
    """What comes of it: tensors bit by bit, or an error."""
    try:
        return {name: (t.dtype, t.shape, raw(t.detach().clone()).flatten().tolist()) for name, t in work()}
    except LoraMergeError as error:
        return type(error), str(error)


def made(case: Case) -> list[Any]:
    chunks = mm.megatron(case.kind, mm.hf_model(case.kind, **case.hf), case.grid, form=case.form)
    assert case.style
    mm.adapt(chunks, case.style)
    return chunks


def inside(model: Chunks) -> list[tuple[str, Tensor]]:
    with merged(model):
        return [(f"{i}.{key}", p.detach().clone()) for i, c in enumerate(model.list) for key, p in c.named_parameters()]


def anew(model: Chunks) -> Any:
    """What the first entry of a process would do."""
    kept_merges._kept.clear()
    snapshot._indices.clear()
    return outcome(lambda: inside(model))


def unread() -> Any:
    return mock.patch.object(
        lora_merge.models.megatron.live, "read", side_effect=AssertionError("read again: nothing has changed")
    )


def facts_of(model: Chunks) -> Any:
    try:
        return lora_merge.models.megatron.live.Megatron(model).snapshot().facts
    except LoraMergeError as error:
        return str(error)


def see(change: str) -> bool:
    """What has run before does after a change what something new does. Whether something has changed in the stream."""
    case, apply = CHANGES[change]
    chunks = made(case)
    model = Chunks(chunks, vocab_size=101)
    weights, bare = (MergedWeights(model, bucket_bytes=1 << 14, adapters=adapters) for adapters in (True, False))
    before = outcome(lambda: weights), outcome(lambda: bare)
    assert (outcome(lambda: weights), outcome(lambda: bare)) == before
    with unread():
        weights.bucket_writer(whole=True), bare.bucket_writer(whole=True)
    entered = outcome(lambda: inside(model))
    with unread():
        assert outcome(lambda: inside(model)) == entered
    facts = facts_of(model)
    assert facts == facts_of(model)
    apply(innermost(chunks[0]))
    assert facts != facts_of(model)
    after = outcome(lambda: weights), outcome(lambda: bare)
    assert after[0] == outcome(lambda: MergedWeights(model))
    fresh = outcome(lambda: MergedWeights(model, adapters=False))
    # A new stream of the base reads the adapters, too, and refuses what it does not know; one that has run need not.
    assert after[1] == fresh or (after[1] == before[1] and fresh[0] is UnsupportedAdapter)
    assert outcome(lambda: inside(model)) == anew(model)
    return after != before


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_push_and_the_next_entry_see_a_change(change: str) -> None:
    (changed,) = POOL.run(1, see, change)
    assert changed or change == "layers swapped", "they keep their numbers"


def train(case: Case) -> None:
    """Values, gradients and what requires them change from step to step; a weight moves while it is merged."""
    (chunk,) = made(case)
    model = Chunks([chunk], vocab_size=101)
    inside(model)
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.mul_(1.25)
            parameter.requires_grad_(not parameter.requires_grad)
            parameter.grad = torch.ones_like(parameter)
    base = [p.detach().clone() for p in chunk.parameters()]
    with unread():
        entered = outcome(lambda: inside(model))
    assert entered == anew(model)
    for _ in range(2):  # read, and as it is known
        with merged(model):
            weight = fc1(innermost(chunk)).to_wrap.weight
            weight.data = weight.data.clone()
        assert all(torch.equal(raw(p.detach()), raw(was)) for p, was in zip(chunk.parameters(), base, strict=True))
        assert outcome(lambda: inside(model)) == entered
    with pytest.raises(NotRestored, match=r"mlp\.gate_proj\.weight, .*\.up_proj\.weight: the memory"), merged(model):
        weight.untyped_storage().resize_(0)


def replaced(case: Case) -> None:
    """Another module in the place of one that was merged, around its adapter or in it; and a copy."""
    (chunk,) = made(case)
    model = Chunks([chunk], vocab_size=101)
    base, mlp = [p.detach().clone() for p in chunk.parameters()], innermost(chunk).decoder.layers[0].mlp
    layer, told = mlp.linear_fc1, r"mlp\.gate_proj\.weight, .*\.up_proj\.weight: another module"
    parts: list[tuple[Any, str]] = [(mlp, "linear_fc1"), (layer, "to_wrap" if case.style == "bridge" else "base_layer")]
    for _ in range(2):  # read, and as it is known
        for owner, key in parts:
            there = getattr(owner, key)
            with pytest.raises(NotRestored, match=told), merged(model):
                setattr(owner, key, torch.nn.Linear(4, 4))
            setattr(owner, key, there)
        with merged(model):
            for copied in (layer, mlp):
                with pytest.raises(AlreadyMerged, match="Copy it before or after"):
                    copy.deepcopy(copied)
            owner, key = parts[0]
            setattr(owner, key, torch.nn.Sequential(layer))
        setattr(owner, key, layer)
        assert all(torch.equal(raw(p.detach()), raw(was)) for p, was in zip(chunk.parameters(), base, strict=True))
    assert "__getstate__" not in vars(layer)


def test_another_module_inside() -> None:
    for style in ("bridge", "mcore"):
        POOL.run(1, replaced, Case("llama", Grid(), 1, style))


def test_a_model_in_training_is_not_read_again() -> None:
    POOL.run(1, train, BRIDGE)


def other_chunks(case: Case) -> bool:
    """A rank of two has a weight elsewhere, or another chunk in the place of one."""
    from megatron.core import parallel_state

    chunks = made(case)
    parallel_state.destroy_model_parallel()
    with torch.no_grad():
        others = made(case)
        for parameter in (p for chunk in others for p in chunk.parameters()):
            parameter.mul_(1.25)
    model = Chunks(chunks, vocab_size=101)
    entered = outcome(lambda: inside(model))
    assert outcome(lambda: inside(model)) == entered
    if dist.get_rank() == 0:
        weight = fc1(innermost(chunks[0])).to_wrap.weight
        weight.data = weight.data.clone()
    assert outcome(lambda: inside(model)) == entered == anew(model)
    chunks[1] = others[1]
    after = outcome(lambda: inside(model))
    assert after == anew(model)
    with unread():
        assert outcome(lambda: inside(model)) == after
    return after != entered


def test_one_rank_alone_sees_a_change_and_a_chunk_is_exchanged() -> None:
    assert all(POOL.run(2, other_chunks, Case("llama", Grid(pp=2, vpp=2), 2, "bridge", hf={"layers": 4})))


def asked(case: Case) -> tuple[set[str], bool]:
    """What reading asks of configurations, and whether a snapshot holds tensors or modules."""
    from megatron.core.transformer import TransformerConfig

    chunks, seen = made(case), set[str]()
    megatron.read(chunks, vocab_size=101)  # what depends on classes is known from here on

    def look(config: Any, name: str) -> Any:
        seen.add(name)
        return object.__getattribute__(config, name)

    with mock.patch.object(TransformerConfig, "__getattribute__", look):
        megatron.read(chunks)

    def held(value: Any) -> bool:
        nested = isinstance(value, list | tuple | dict | set | frozenset)
        return isinstance(value, Tensor | nn.Module) or (nested and any(map(held, value)))

    snapshot = lora_merge.models.megatron.live.Megatron(Chunks(chunks, vocab_size=101)).snapshot()
    walked = {id(module) for chunk in chunks for _, module in walk(chunk)}
    assert walked <= {fact for fact in snapshot.facts if isinstance(fact, int)}
    return {name for name in seen if not name.startswith("__")}, held(snapshot.facts)


@pytest.mark.parametrize("case", [BRIDGE, MCORE, EXPERTS, Case("mixtral", Grid(), 1, "attention", "grouped")], ids=str)
def test_a_snapshot_has_what_reading_asks_of_configurations_and_keeps_nothing_alive(case: Case) -> None:
    ((names, held),) = POOL.run(1, asked, case)
    assert names <= set(megatron._CONFIG)
    assert not held
