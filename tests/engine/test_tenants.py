"""Tenants: factors relative to the merged adapter, which requests a change of tenants ends, and which ones name an
adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import models
import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from workers import worker

from lora_merge import InvalidInput, MergedWeights, PushFailed, PushRefused, train_merged
from lora_merge.engine.control.base import Call
from lora_merge.engine.control.calls import drive
from lora_merge.engine.payload.adapter import AdapterBuilder, AdapterSource
from lora_merge.engine.payload.base import Terms
from lora_merge.engine.payload.tenants import (
    TenantsSource,
    module_of,
    nothing,
    own_name,
    rank_of,
    relative,
    side_by_side,
    tables_of,
)
from lora_merge.engine.push.replica import Replica
from lora_merge.engine.push.sequence import EngineSequence, _end_wrong_mode_requests
from lora_merge.engine.state import State
from lora_merge.engine.tenants import StaleRequests, Tenants, stale_requests, tenant_id
from lora_merge.engine.transport.routing import Route
from tests.engine.test_steps import Engine

NAMES = ("hot", "a", "b")


def model(dtype: torch.dtype = torch.float32) -> Any:
    """Tenants of other ranks, scalings, modules and kinds of these: linear layers and an embedding."""
    made = models.with_lora(models.qwen2, adapters=("hot",), dtype=dtype, target_modules=["q_proj", "embed_tokens"])
    own = {"init_lora_weights": False}
    made.add_adapter("a", LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"], **own))
    made.add_adapter(
        "b", LoraConfig(r=2, use_rslora=True, target_modules=["embed_tokens", "o_proj"], lora_alpha=7, **own)
    )
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    return made


def sources(policy: Any, dtype: torch.dtype) -> list[AdapterSource]:
    streams = [MergedWeights(policy, adapter_names=[name]) for name in NAMES]
    return [AdapterBuilder(stream)(dtype) for stream in streams]


def received(sent: TenantsSource) -> list[dict[str, Tensor]]:
    """What a worker makes of the buckets, by what it was told of them."""
    op = sent.transfer_op(Terms(State("merged", 1, tenants=NAMES), None, {}, False), Route(frozenset(), ()), None)
    assert op is not None
    table = tables_of(op.message["layouts"], op.message["which"])
    assert table == sent.table
    found = []
    for index, slots in enumerate(table):
        buffer = torch.full((sent.capacity,), 0xA5, dtype=torch.uint8)
        sent.fill(index, buffer, {})
        found.append({own_name(slot): slot.view(buffer) for slot in slots})
    return found


def delta(policy: Any, module: str, name: str) -> tuple[Tensor, Tensor]:
    """What PEFT adds for an adapter, in float64 `[out, in]`, and the sum of magnitudes of its products."""
    layer = policy.get_submodule(f"base_model.model.{module}")
    factors = (layer.lora_A, layer.lora_B) if name in layer.lora_A else (layer.lora_embedding_A, layer.lora_embedding_B)
    if name not in factors[0]:
        shape = layer.get_base_layer().weight.shape
        shape = shape[::-1] if "embed" in module else shape
        return torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    a, b = (getattr(f[name], "weight", f[name]).detach().double() for f in factors)
    return layer.scaling[name] * b @ a, layer.scaling[name] * b.abs() @ a.abs()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relative_factors_are_the_difference(dtype: torch.dtype) -> None:
    """In float64: rounding is that of each factor to the engine's dtype, and of nothing else."""
    policy = model()
    merged, *others = received(TenantsSource(NAMES, sources(policy, dtype)))
    unit = torch.finfo(dtype).eps / 2
    for name, own in zip(NAMES[1:], others, strict=True):
        made = relative(own, merged)
        modules = {module_of(factor) for factor in made}
        ranks = rank_of({key: factor.shape for key, factor in made.items()})
        assert max(ranks.values()) == side_by_side(
            *(rank_of({key: factor.shape for key, factor in one.items()}) for one in (own, merged))
        )
        assert modules == {module_of(factor) for factor in (*own, *merged)}
        for module in modules:
            a, b = (
                next(made[f"{module}.{n}"] for n in kinds if f"{module}.{n}" in made).double()
                for kinds in (("lora_A.weight", "lora_embedding_A"), ("lora_B.weight", "lora_embedding_B"))
            )
            (wanted, size), (hot, of_hot) = delta(policy, module, name), delta(policy, module, "hot")
            assert a.shape[0] == b.shape[1] == ranks[module]
            # lora_A and the scaled lora_B are each rounded once, the product with the scaling in float32 before that.
            bound = (2 * unit + unit**2 + 2**-23) * (size + of_hot) + 1e-30
            assert ((b @ a - (wanted - hot)).abs() <= bound).all(), (name, module)
    assert side_by_side({"x": 3, "y": 9}, {"x": 4, "z": 2}) == 9


def test_merged_weights_and_a_slot_compute_a_tenants_own_policy() -> None:
    """As an engine does, in float32: the merged weights, and beside each layer the product of what lies in its slot."""
    policy = model()
    for name, parameter in policy.named_parameters():
        if "_B" in name:
            parameter.data *= 0.02  # to the size of the base: of what is added and taken off, the rounding stays
    merged, *others = received(TenantsSource(NAMES, sources(policy, torch.float32)))
    served = models.qwen2()
    served.load_state_dict(dict(MergedWeights(policy, adapter_names=["hot"])))
    ids = torch.arange(3, 40)[None]

    def slot(a: Tensor, b: Tensor) -> Any:
        return lambda layer, args, out: (
            out + (a.T[args[0]] @ b.T if isinstance(layer, torch.nn.Embedding) else args[0] @ a.T @ b.T)
        )

    for name, own in zip(NAMES, [merged, *others], strict=True):
        made, hooks = nothing(merged) if name == "hot" else relative(own, merged), []
        for module in {module_of(factor) for factor in made}:
            kind = "lora_embedding_{}" if "embed" in module else "lora_{}.weight"
            a, b = (made[f"{module}.{kind.format(which)}"] for which in "AB")
            hooks.append(served.get_submodule(module).register_forward_hook(slot(a, b)))
        policy.base_model.set_adapter(name)
        with torch.no_grad():
            got, wanted = served.eval()(ids).logits, policy.eval()(ids).logits
        for hook in hooks:
            hook.remove()
        # Logits of this size out of some ten layers' sums, each rounded in its own order.
        assert (got - wanted).abs().max() < 2e-5 * wanted.abs().max(), name


def test_a_layout_of_many_tenants_is_said_once() -> None:
    policy = models.with_lora(models.qwen2, adapters=("hot",))
    for name in "abcd":
        policy.add_adapter(name, LoraConfig(r=4, target_modules="all-linear"))
    streams = [MergedWeights(policy, adapter_names=[name]) for name in ("hot", *"abcd")]
    made = TenantsSource(("hot", *"abcd"), [AdapterBuilder(s)(torch.float32) for s in streams])
    assert len(made._layouts) == 1
    assert made._which == [0] * 5
    assert len({slot.name for slots in made.table for slot in slots}) == sum(map(len, made.table))


@pytest.mark.parametrize(
    ("before", "after", "stale"),
    [
        ((), (), None),
        ((), NAMES, None),
        (NAMES, NAMES, None),
        (NAMES, ("hot", "b", "a", "c"), None),
        (NAMES, ("a", "hot", "b"), (True, [])),
        (NAMES, ("hot", "a"), (False, ["b"])),
        (NAMES, ("b",), (True, ["hot", "a"])),
        (NAMES, (), (False, ["hot", "a", "b"])),
    ],
)
@pytest.mark.parametrize("pause", ["keep", "abort"])
def test_which_requests_end_where_tenants_change(
    before: Sequence[str], after: Sequence[str], stale: Any, pause: Any
) -> None:
    """Those end before the weights change; what came meanwhile is ended before the engine goes on."""
    wanted = None if stale is None else StaleRequests(stale[0], [tenant_id(name) for name in stale[1]])
    assert stale_requests(before, after) == wanted
    modes: list[str] = []

    class Noting(Engine):
        async def pause(self, mode: str) -> None:
            modes.append(mode)
            await super().pause(mode)

    state = State("merged", 6, tenants=tuple(before)).to_json()
    # Which requests there are is what generation went on with, not what a push has left there since.
    for held in (state, State("merged", 7).to_json(), State("dirty", 6, reason="broke off").to_json()):
        known = {"served_tenants": list(before), "state": held, "paused": held["kind"] == "dirty"}
        one = Replica(0, Noting(), [worker(**known)])
        steps = EngineSequence("mine", pause)
        drive(steps.pause(one, "merged", brought=State("merged", 1, tenants=after)))
        drive(steps.make(one, []))
        dirty = held["kind"] == "dirty"  # what is half written computes nothing any more
        ends = "abort" if dirty or pause == "abort" else "wait"
        assert modes.pop() == (ends if stale else pause)
        ended, served = StaleRequests(False, []) if wanted is None else wanted, [tenant_id(name) for name in after]
        told = [Call("end_tenants_requests", (*ended, served))] if before or after else []
        assert _end_wrong_mode_requests(one) == told
        # Also where an interrupt came between the new weights and the resume.
        with pytest.MonkeyPatch.context() as patch:
            made: list[Call] = []
            patch.setattr(type(one.control), "chain", _noting(made))
            drive(steps.catch_up(one, State("merged", 1, tenants=after), "merged@1"))
        assert [call for call in made if call.method == "end_tenants_requests"] == told
    if stale is not None:
        one = Replica(0, Engine(paused=True), [worker(served_tenants=list(before), state=state)])
        with pytest.raises(PushRefused, match=r"tenants hot, a, b and was paused .* changes the tenants"):
            drive(EngineSequence("mine", pause).pause(one, "merged", brought=State("merged", 1, tenants=after)))
    if stale is not None and stale[0]:

        class Actor(Engine):
            ends_requests = False  # type: ignore[assignment]

        one = Replica(0, Actor(), [worker(served_tenants=list(before), state=state)])
        with pytest.raises(PushRefused, match=f"tenant 'hot' merged, .* while '{after[0]}' takes its place"):
            drive(EngineSequence("mine", pause).pause(one, "merged", brought=State("merged", 1, tenants=after)))
        assert not one.queued_calls
    to_adapter = Replica(0, Engine(), [worker(served_tenants=list(before), state=state)])
    drive(EngineSequence("mine", pause).pause(to_adapter, "adapter", brought=State("adapter", 7)))
    assert len(_end_wrong_mode_requests(to_adapter)) == 1 + bool(before), "requests without an adapter, and tenants'"


def _noting(made: list[Call]) -> Any:
    async def chain(self: Any, calls: Sequence[Call], returned: list[Any]) -> list[Any]:
        made.extend(calls)
        returned += [True] * len(calls)
        return returned

    return chain


def test_requests_name_no_adapter_only_while_all_engines_have_merged_theirs() -> None:
    stream = MergedWeights(model(), adapter_names=["hot"])
    beside = stream.beside()
    tenants = Tenants(NAMES, stream.model)

    def push(hottest: str | None = None, error: type[BaseException] | None = None) -> None:
        with tenants.pushing(hottest, stream):
            assert stream.adapter_names == beside.adapter_names == (hottest or tenants.merged,)
            if hottest not in (None, before):
                assert not any(map(tenants.bare, NAMES)), "a request may come before the push or after it"
            if error is not None:
                raise error("injected")

    before = tenants.merged
    with pytest.raises(PushRefused, match=r"push\(\) first"):
        tenants.bare("hot")
    with pytest.raises(PushFailed):
        push(None, PushFailed)
    with pytest.raises(PushRefused, match=r"push\(\) first"):
        tenants.bare("hot")
    push()
    assert [tenants.bare(name) for name in NAMES] == [True, False, False]
    for refusal in (PushRefused, InvalidInput):
        with pytest.raises(refusal):
            push("a", refusal)
        assert tenants.order == ("hot", "a", "b")
        assert stream.adapter_names == ("hot",)
        assert tenants.bare("hot"), "every engine is as before"
    for failure in (PushFailed, KeyboardInterrupt):
        with pytest.raises(failure):
            push("a", failure)
        assert tenants.order == ("a", "hot", "b"), "some engine may have it"
        assert not any(map(tenants.bare, NAMES))
        with pytest.raises(PushRefused):
            push("b", PushRefused)
        assert not any(map(tenants.bare, NAMES)), "still"
        before = "a"
        push()
        assert tenants.bare("a")
        before = "a"
        push("hot")
        before = "hot"
        assert [tenants.bare(name) for name in NAMES] == [True, False, False]
    with pytest.raises(PushFailed):
        push(None, PushFailed)
    assert tenants.bare("hot"), "engines that serve have this one merged"


def test_arguments_and_ids() -> None:
    policy = model()
    for names in ("hot", [], ["a", "a"], [1], {"a"}):
        with pytest.raises(InvalidInput, match="tenants must be"):
            Tenants(names, policy)
    ids = [tenant_id(f"tenant {index}") for index in range(1000)]
    assert 2**30 <= min(ids) <= max(ids) < 2_020_202_020 - 2**28, "a range of their own"
    assert tenant_id("a") == 1_073_741_824 + 0x_CA978112 % (1 << 29), "of the name alone, in every process"
    state = State("merged", 3, tenants=NAMES)
    assert State(**state.to_json() | {"tenants": list(NAMES)}) == state, "as JSON has it"
    assert str(state) == "merged@3 (merged: hot; beside it: a, b)"
    alone = models.with_lora(models.qwen2)
    with train_merged(alone), pytest.raises(InvalidInput, match="leave tenants out"):
        Tenants(["default"], alone)
    later = Tenants(["default"], alone)
    with train_merged(alone), pytest.raises(InvalidInput, match="leave tenants out"):
        later.check_model()
