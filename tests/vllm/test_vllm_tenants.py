"""Several adapters served at once, one of them merged: each tenant's answers are those of its own policy, whichever is
merged, and whatever became of the pushes before."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import models
import pytest
import torch
from engines import GREEDY, LINEARS, ask, assert_answers, engine, log_prob_errors, prompts, train
from peft import LoraConfig
from trainer_benchmark import ran
from vllm import AsyncEngineArgs, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineGenerateError

from lora_merge import InvalidInput, PushFailed, PushRefused, UnsupportedAdapter, VllmSync
from lora_merge.engine.tenants import tenant_id
from lora_merge.engine.vllm import worker as vllm_worker
from lora_merge.engine.vllm.kept_requests import lora_merge_tenants, put_door
from lora_merge.engine.vllm.mixed_batches import _leaving, own
from lora_merge.engine.vllm.sync import VllmSync as Sync

NAMES = ("hot", "a", "b")
OPTIONS = {
    "enable_lora": True,
    "max_lora_rank": 16,
    "max_loras": 1,  # fewer than tenants beside the merged one: vLLM fills its slot again for each batch
    "max_cpu_loras": 4,
    "worker_extension_cls": "faulty.Faulty",
    "enable_prefix_caching": True,
}
TOLERANCE = 3e-5
"""In float32. As of `assert_answers`, and of the product that is added and taken off: two more sums of its size."""


def policy(seed: int = 0) -> Any:
    """Three tenants: of other ranks, scalings and modules, also parts of what vLLM packs into one layer."""
    model = models.with_lora(engines.qwen2, seed=seed, adapters=("hot",), target_modules=LINEARS)
    own = {"init_lora_weights": False}
    model.add_adapter("a", LoraConfig(r=6, lora_alpha=3, target_modules=["q_proj", "down_proj", "up_proj"], **own))
    model.add_adapter("b", LoraConfig(r=8, lora_alpha=4, use_rslora=True, target_modules=["k_proj", "o_proj"], **own))
    train(model, seed)
    return model.eval()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with engine(policy(), tmp_path_factory.mktemp("tenants") / "base", **OPTIONS) as llm:
        yield llm


def assert_own(outputs: list[Any], model: Any, tenant: str, asked: Any = None) -> None:
    """The answers are those of the model with this tenant alone."""
    model.base_model.set_adapter(tenant)
    assert_answers(outputs, model, asked, tolerance=TOLERANCE)


def assert_one_of(output: Any, model: Any, tenants: Sequence[str], asked: Any) -> None:
    """The whole answer is one tenant's, where a busy machine decides whose."""
    errors = []
    for tenant in tenants:
        try:
            return assert_own([output], model, tenant, asked)
        except AssertionError as error:
            errors.append(f"{tenant}: {error}")
    raise AssertionError("; ".join(errors))


def assert_all(sync: Sync, llm: Any, model: Any) -> None:
    """Each tenant by itself, then all in one batch, where each prompt is in the prefix cache under the others."""
    for tenant in NAMES:
        assert_own(ask(llm, sync.lora_request(tenant=tenant)), model, tenant)
    whose, one = [*NAMES] * 2, prompts()[0]
    asked = [{"prompt_token_ids": list(one)} for _ in whose]
    mixed = sync.generate(asked, GREEDY, use_tqdm=False, tenant=whose)
    for tenant, output in zip(whose, mixed, strict=True):
        assert_own([output], model, tenant, [one])


@pytest.mark.parametrize("merge", ["trainer", "engine"])
def test_every_tenant_answers_as_its_own_policy(llm: Any, merge: Any) -> None:
    model = policy()
    sync = VllmSync(model, llm, tenants=NAMES, merge=merge)
    with pytest.raises(PushRefused, match=r"push\(\) first"):
        sync.lora_request(tenant="a")
    report = sync.push(verify=True)
    assert report.tenants == NAMES
    assert "hot, and 2 tenants beside it" in str(report)
    assert str(sync.states()[0]).endswith("(merged: hot; beside it: a, b)")
    assert sync.lora_request(tenant="hot") is None, "at base-model speed"
    assert_all(sync, llm, model)

    # What the hot one's push leaves beside it is never that of the push before.
    train(model, 5, size=0.02)
    sync.push()
    assert_all(sync, llm, model)

    # Another one is merged. Requests that were made before carry ids, and stay their tenant's.
    stale = sync.lora_request(tenant="a")
    assert sync.push(hottest="a").tenants == ("a", "hot", "b")
    assert sync.lora_request(tenant="a") is None
    assert sync.lora_request(tenant="hot").lora_int_id == tenant_id("hot")
    assert_all(sync, llm, model)
    assert_own(ask(llm, stale), model, "a")
    assert sync.push(verify=True).tenants[0] == "a", "as before"
    assert_all(sync, llm, model)

    # Alone again, by a sync of one adapter: the answers that a fresh engine with that one merged gives.
    alone = {}
    for tenant in NAMES:
        with VllmSync(model, llm, adapter_names=[tenant], merge=merge) as other:
            other.push()
            assert other.states()[0].tenants == ()
            assert not llm.llm_engine.list_loras(), "slots that were relative to other weights"
            alone[tenant] = ask(llm)
    with pytest.raises(PushRefused, match="not the merged@"):
        sync.generate([{"prompt_token_ids": [5]}], GREEDY, tenant="a")
    sync.push(hottest="hot")
    for tenant in NAMES:
        outputs = ask(llm, sync.lora_request(tenant=tenant))
        said = [(list(o.outputs[0].token_ids)) for o in outputs]
        assert said == [list(o.outputs[0].token_ids) for o in alone[tenant]]
        for one, other_one in zip(outputs, alone[tenant], strict=True):
            for token, step, wanted in zip(
                one.outputs[0].token_ids, one.outputs[0].logprobs, other_one.outputs[0].logprobs, strict=True
            ):
                assert abs(step[token].logprob - wanted[token].logprob) < TOLERANCE
    sync.close()


def test_failures_leave_the_engine_dirty_or_as_it_was(llm: Any) -> None:
    model = policy(1)
    sync = VllmSync(model, llm, tenants=NAMES)
    sync.push()
    for where, after, hottest in (
        ("receive_tenants", 0, None),
        ("receive_tenants", 0, "b"),
        ("commit", 1, "hot"),
        ("begin_full", 0, "a"),
    ):
        train(model, after + 7, size=0.02)
        before = sync.states()[0].version
        assert llm.collective_rpc("fail", args=(where, [0], after)) == ["broken"]
        with pytest.raises(PushFailed, match=f"injected into {where}"):
            sync.push(hottest=hottest)
        assert llm.collective_rpc("mend") == ["well"]
        assert sync.states()[0].kind == "dirty", "the slots are no longer relative to what is merged"
        with pytest.raises(PushRefused, match="dirty"):
            sync.generate([{"prompt_token_ids": [5]}], GREEDY, tenant="a")
        report = sync.push()  # heals, and merges the one that was asked for
        assert report.version > before
        assert hottest in (None, report.tenants[0])
        assert_all(sync, llm, model)

    # A refusal changes nothing, nor which one is merged.
    held, requests = sync.states(), {name: sync.lora_request(tenant=name) for name in NAMES}
    llm.collective_rpc("fail", args=("unserved_modules", [0], 0))
    sync._planner._slots._served = ()  # type: ignore[attr-defined]
    with pytest.raises(PushRefused, match="injected"):
        sync.push(hottest="b")
    llm.collective_rpc("mend")
    assert sync.states() == held
    assert {name: sync.lora_request(tenant=name) for name in NAMES} == requests
    assert_all(sync, llm, model)

    # Adapter mode takes base and slots of its own.
    model.base_model.set_adapter("b")
    other = VllmSync(model, llm, mode="adapter")
    other.push()
    assert llm.llm_engine.list_loras() == {other.lora_request().lora_int_id}
    assert_answers(ask(llm, other.lora_request()), model, tolerance=TOLERANCE)
    sync.push()
    assert_all(sync, llm, model)
    sync.close()


def test_tenants_that_vllm_has_dropped_are_loaded_again(llm: Any, tmp_path: Path) -> None:
    """Adapters of the user's own take their places: `max_cpu_loras` is smaller than all of them."""
    model = policy(6)
    sync = VllmSync(model, llm, tenants=NAMES)
    sync.push()
    state, ids = sync.states(), set(map(tenant_id, NAMES))
    model.save_pretrained(tmp_path, selected_adapters=["a"])
    for round_ in range(2):
        for number in range(1, OPTIONS["max_cpu_loras"] + 1):
            ask(llm, LoRARequest(f"own {number}", number, str(tmp_path / "a")))
        assert not ids & llm.llm_engine.list_loras(), "vLLM has dropped them"
        sync.check()
        assert sync.states() == state
        assert_all(sync, llm, model)
        train(model, round_, size=0.02)
        sync.push()
        state = sync.states()
    assert llm.llm_engine.remove_lora(tenant_id("b"))
    assert_all(sync, llm, model)
    stale = sync.lora_request(tenant="b")
    model.base_model.set_adapter("b")
    with VllmSync(model, llm, merge="engine") as other:  # theirs is no longer in the worker's memory either
        other.push()
        with pytest.raises(ValueError, match="no tenant of this engine"):
            ask(llm, stale)
        assert_answers(ask(llm), model, tolerance=TOLERANCE)
    sync.close()


def test_adapters_of_others_on_top_of_pushed_weights(llm: Any, tmp_path: Path) -> None:
    """Of a server that was started with `--lora-modules`: they answered on top of the policy, without a word."""
    model = policy(8)
    model.save_pretrained(tmp_path, selected_adapters=["a"])
    for number in llm.llm_engine.list_loras():
        llm.llm_engine.remove_lora(number)
    own = LoRARequest("own", 1, str(tmp_path / "a"))
    ask(llm, own)
    sync = VllmSync(model, llm)
    with pytest.warns(UserWarning, match="has not loaded the adapters 1. Requests that name them"):
        report = sync.push(mode="merged")
    assert report.others == "1"
    assert "adapters of others (1)" in str(report)
    assert sync.push().others == "", "vLLM drops what it has loaded at a push"
    ask(llm, own)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert sync.push().others == "1"
    assert not [one for one in told if "has not loaded" in str(one.message)], "said once"
    ask(llm, own)
    assert sync.push(mode="adapter").others == "", "the base lies beneath it"
    llm.llm_engine.remove_lora(1)
    assert sync.push(mode="merged").others == ""
    sync.close()


def test_what_is_refused_by_name(llm: Any) -> None:
    model = policy(2)
    sync = VllmSync(model, llm, tenants=NAMES)
    sync.push()
    held = sync.states()

    def refused(match: str, error: type[Exception] = PushRefused, names: Any = ("hot", "c"), **config: Any) -> None:
        settings = {"r": 4, "init_lora_weights": False, "target_modules": ["q_proj"]} | config
        if config:
            model.add_adapter("c", LoraConfig(**settings))
        with pytest.raises(error, match=match):
            VllmSync(model, llm, tenants=names).push()
        if config:
            model.delete_adapter("c")
        assert sync.states() == held, "nothing was written"

    refused(r"'c' beside the merged 'hot' has rank 17 .*max_lora_rank 16.*max_lora_rank=32", r=13)
    refused(r"tenants \(seen at 'c'\): .*DoRA", UnsupportedAdapter, use_dora=True)
    refused(r"tenants \(seen at 'c'\): .*lora_bias", UnsupportedAdapter, lora_bias=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_worker, "unserved_modules", lambda manager, modules: [m for m in modules if "o_proj" in m])
        refused(r"tenant 'hot': vLLM has no LoRA layer for model\.layers\.0\.self_attn\.o_proj", r=2)
        # An engine that was started anew with less, in the middle of a sync's life.
        patch.setattr(vllm_worker, "limits", lambda config: {"max_rank": 8, "dtype": "float32", "room": 4})
        with pytest.raises(PushRefused, match=r"tenant 'a' beside the merged 'hot' has rank 10 .*max_lora_rank 8"):
            sync.push()
        assert sync.states() == held
    refused("there is no adapter 'd'", InvalidInput, names=("hot", "d"))
    for name in "cdef":
        model.add_adapter(name, LoraConfig(r=2, target_modules=["q_proj"]))
    refused("keeps 4 adapters .*5 tenants.*max_cpu_loras=5", names=("hot", "a", "c", "d", "e"))

    for wrong, match in (
        ({"tenants": "hot"}, "list of names"),
        ({"tenants": ["a", "a"]}, "each once"),
        ({"tenants": NAMES, "mode": "adapter"}, "mode must be 'merged'"),
        ({"tenants": NAMES, "adapter_names": ["a"]}, "one of both"),
        ({"tenants": NAMES, "share": True}, "share=True"),
    ):
        with pytest.raises(InvalidInput, match=match):
            VllmSync(model, llm, **wrong)
    with pytest.raises(InvalidInput, match="hottest='z' is no tenant"):
        sync.push(hottest="z")
    with pytest.raises(InvalidInput, match="mode must be 'merged'"):
        sync.push(mode="adapter")
    with pytest.raises(InvalidInput, match="whose policy"):
        sync.generate([{"prompt_token_ids": [5]}], GREEDY)
    with pytest.raises(InvalidInput, match="has none"):
        VllmSync(model, llm).push(hottest="hot")
    assert_all(sync, llm, model)
    model.delete_adapter("c")
    # PEFT leaves its wrapper of the module where it was.
    refused("ModulesToSave", UnsupportedAdapter, modules_to_save=["norm"])
    sync.close()


def test_vllms_own_kernels_still_mix_rows_up() -> None:
    """A row without a slot (-1) gets the last slot's adapter on CPUs: once this fails, mixed_batches.py can go."""
    from vllm.lora.ops.torch_ops import lora_ops

    rows, slots = torch.ones(2, 3), torch.tensor([0, -1])
    for kernel, mixed in ((own(lora_ops.bgmv_shrink), True), (_leaving(own(lora_ops.bgmv_shrink)), False)):
        made = torch.zeros(2, 4)
        kernel(rows, torch.ones(2, 1, 4, 3), made, slots, 1.0)
        assert made[0].eq(3).all()
        assert made[1].eq(3 if mixed else 0).all()
        # What another tenant has become is nothing to these rows.
        weights, out = torch.full((1, 1, 5, 4), torch.nan), torch.full((3, 5), 7.0)
        _leaving(own(lora_ops.bgmv_expand))(torch.ones(3, 4), weights, out, torch.tensor([-1, 0, -1]), True)
        assert out.isnan().any(-1).tolist() == [False, True, False]
        _leaving(own(lora_ops.bgmv_expand))(torch.ones(3, 4), weights, out, torch.tensor([-1, -1, -1]), False)
        assert out[0].eq(7).all()


def test_bfloat16_is_right_up_to_its_rounding(tmp_path: Path) -> None:
    """Slots are no further from a policy than merging it is, as counted by the same prompts."""
    model = policy(3).to(torch.bfloat16)
    with engine(model, tmp_path / "base", **OPTIONS) as llm:
        sync = VllmSync(model, llm, tenants=NAMES)
        sync.push()
        for tenant in NAMES[1:]:
            beside = ask(llm, sync.lora_request(tenant=tenant))
            model.base_model.set_adapter(tenant)
            slots = log_prob_errors(beside, model.float()).mean()
            sync.push(hottest=tenant)
            merged = log_prob_errors(ask(llm), model).mean()
            assert slots < 4 * merged, (tenant, slots, merged)
        sync.close()
    with engine(model, tmp_path / "base") as llm:
        with pytest.raises(PushRefused, match="without enable_lora=True"):
            VllmSync(model, llm, tenants=NAMES).push()
        assert VllmSync(model, llm).states()[0].kind == "nothing"


def test_requests_of_other_tenants_end() -> None:
    """In the core: those that name no adapter where another one is merged now, and those of tenants that have gone."""
    requests = {
        name: SimpleNamespace(lora_request=lora and SimpleNamespace(lora_int_id=lora))
        for name, lora in {"bare": 0, "a": tenant_id("a"), "gone": tenant_id("b"), "user's": 7}.items()
    }
    ended: list[str] = []
    scheduler = SimpleNamespace(requests=requests, finish_requests=lambda names, status: ended.extend(names))
    core = SimpleNamespace(scheduler=scheduler)
    lora_merge_tenants(core, False, [], [])
    assert not ended
    lora_merge_tenants(core, False, [tenant_id("b")], [])
    assert ended == ["gone"]
    ended.clear()
    lora_merge_tenants(core, True, [], [])
    assert ended == ["bare"]


async def in_flight_scenario(llm: Any, model: Any) -> None:
    sync = VllmSync(model, llm, tenants=NAMES)
    one = prompts(1)

    async def request(name: str, lora: Any, tokens: int, begun: asyncio.Event | None = None) -> Any:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=1)
        last = None
        async for output in llm.generate({"prompt_token_ids": list(one[0])}, sampling, name, lora_request=lora):
            last = output
            if begun is not None:
                begun.set()
        return last

    async def running(name: str, lora: Any) -> asyncio.Task[Any]:
        begun = asyncio.Event()
        task = asyncio.create_task(request(name, lora, 60, begun))
        await begun.wait()
        return task

    await sync.apush()
    bare, beside = sync.lora_request(tenant="hot"), sync.lora_request(tenant="a")
    assert bare is None
    early = {name: await running(f"early {name}", sync.lora_request(tenant=name)) for name in NAMES}
    push = asyncio.create_task(sync.apush(hottest="a"))
    while sync.lora_request(tenant="hot") is None:
        await asyncio.sleep(0)
    late = {name: sync.lora_request(tenant=name) for name in NAMES}
    assert {lora.lora_int_id for lora in late.values()} == set(map(tenant_id, NAMES)), "right before and after"
    await asyncio.sleep(0.2)  # the engine lets requests end, and begins none
    assert not push.done()
    stranger = asyncio.create_task(request("named none", bare, 10))
    queued = {name: asyncio.create_task(request(f"late {name}", late[name], 10)) for name in NAMES}
    await push
    for name in NAMES:
        assert_own([await early[name]], model, name, one)
        assert_own([await queued[name]], model, name, one)
    ended = await stranger
    if ended is not None and ended.outputs[0].finish_reason != "abort":  # made for the other one that was merged
        assert_one_of(ended, model, ("hot", "a"), one)  # it came before the pause, or behind the push
    assert sync.lora_request(tenant="a") is None
    assert_own([await request("merged", None, 10)], model, "a", one)
    assert_own([await request("stale", beside, 10)], model, "a", one)

    # The same tenants: requests go on where they were, under the new weights of their own.
    going = {name: await running(f"going {name}", sync.lora_request(tenant=name)) for name in NAMES}
    train(model, 11, size=0.02)
    await sync.apush()
    for name in NAMES:
        assert len((await going[name]).outputs[0].token_ids) == 60
        assert_own([await request(f"after {name}", sync.lora_request(tenant=name), 10)], model, name, one)

    # Somebody pushes one policy: tenants' requests end first, or are ended; the engine lives.
    last = await running("last", sync.lora_request(tenant="b"))
    model.base_model.set_adapter("b")
    other = VllmSync(model, llm)
    push = asyncio.create_task(other.apush())
    await asyncio.sleep(0.2)
    gone = asyncio.create_task(request("gone", sync.lora_request(tenant="b"), 10))
    await push
    assert_own([await last], model, "b", one)
    (ended,) = await asyncio.gather(gone, return_exceptions=True)
    if isinstance(ended, BaseException):
        assert isinstance(ended, EngineGenerateError), ended
        assert "lora_merge/b is no tenant of this engine (any more)" in str(ended.__cause__)  # it came behind the push
    elif ended is not None and ended.outputs[0].finish_reason != "abort":  # it came before the pause
        assert_own([ended], model, "b", one)
    assert_own([await request("alone", None, 10)], model, "b", one)
    with pytest.raises(EngineGenerateError) as refused:
        await request("too late", late["a"], 10)
    assert "lora_merge/a is no tenant of this engine (any more)" in str(refused.value.__cause__)
    put_door(llm, tenants=[tenant_id("a")])  # as where another process has pushed
    refusal = await request("too late for the core", late["a"], 10)
    assert refusal is None or refusal.outputs[0].finish_reason == "error"
    assert_own([await request("still alone", None, 10)], model, "b", one)
    await other.aclose()
    await sync.aclose()


def test_requests_in_flight_while_another_one_is_merged(tmp_path: Path) -> None:
    model = policy(4)
    engines.save_base(model.get_base_model(), tmp_path / "base")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"

    async def run() -> None:
        options = engines.engine_options(model) | OPTIONS | {"max_model_len": 256, "max_loras": 3}
        options["worker_extension_cls"] = "engines.Slow"
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(str(tmp_path / "base"), **options))
        try:
            await llm.collective_rpc("slow", args=(True,))
            await in_flight_scenario(llm, model)
        finally:
            llm.shutdown()

    asyncio.run(run())


@pytest.mark.whole
def test_the_benchmark(tmp_path: Path) -> None:
    """benchmarks/tenants.py on a tiny shape, as a user runs it."""
    short = ("--repeats", "1", "--prompt-tokens", "4", "--new-tokens", "4", "--requests", "6", "--rank", "4")
    record, printed = ran("tenants", tmp_path, "--device", "cpu", "--shape", "tiny", "--tenants", "1", "3", *short)
    for way in record["ways"].values():
        assert [(found["tenants"], found["skew"], found["hottest"]) for found in way["speed"]] == [
            (1, None, 6), (3, 1.0, 3), (3, 2.0, 4),
        ]  # fmt: skip
        assert all(found["tokens_s"] > 0 for found in way["speed"])
        assert min(way["memory"]["slots"], way["memory"]["kept"]) > 0
    assert set(record["ways"]["beside"]["push_ms"]) == {"1", "3"}
    assert "3 tenants, Zipf 2, hottest 4" in " ".join(printed.split())
