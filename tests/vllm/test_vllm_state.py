"""What an engine holds, what is refused before the first byte, and what happens when a push breaks; in process."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import models
import pytest
import torch
from engines import ask, assert_answers, engine, train
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from vllm import LLM
from vllm.lora.request import LoRARequest

import lora_merge
import lora_merge.engine.sync
import lora_merge.engine.vllm.session
from lora_merge import InvalidInput, MergedWeights, PushFailed, PushRefused, UnsupportedAdapter, VllmSync
from lora_merge.engine.adapter_versions import CONSTANT_PATH
from lora_merge.engine.payload.adapter import AdapterSource
from lora_merge.engine.push.planner import PushPlanner
from lora_merge.engine.vllm.adapter import ADAPTER_ID
from lora_merge.engine.vllm.loading.loader import Loader
from lora_merge.stream.weights import BucketWriter

DENSE = {"target_modules": engines.LINEARS}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """One engine for all tests here: each of them starts from whatever the one before left."""
    base = models.with_lora(engines.qwen2, **DENSE)
    folder = tmp_path_factory.mktemp("engine") / "base"
    with engine(base, folder, enable_lora=True, max_lora_rank=8, max_loras=1) as llm:
        with pytest.raises(ValueError, match="or was started anew"):  # before any push
            ask(llm, LoRARequest("lora_merge", ADAPTER_ID, CONSTANT_PATH))
        assert not llm.llm_engine.has_unfinished_requests(), "the next call would wait for it for ever"
        yield llm


def policy(seed: int = 0, build: Any = engines.qwen2, **config: Any) -> PeftModel:
    return models.with_lora(build, seed=seed, **(DENSE | config))


def held(llm: LLM) -> str:
    return str(VllmSync(engines.qwen2(), llm).states()[0])


def test_resume_against_a_living_engine_counts_the_adapter_once(llm: LLM) -> None:
    """A peer's trainer resumed and laid the adapter on top of an already merged base. Train, push, checkpoint, new
    trainer from the checkpoint, same engine, many pushes in adapter mode: right in every batch (a peer broke from the
    second batch on)."""
    first = policy()
    VllmSync(first, llm).push(mode="merged")
    assert_answers(ask(llm), first)
    resumed = copy.deepcopy(first)  # what a checkpoint brings back: same base, same adapter, new objects
    del first
    sync = VllmSync(resumed, llm, mode="adapter")
    for batch in range(4):
        train(resumed, batch)
        report = sync.push()
        assert report.base_sent == (batch == 0), "the merged base must go, and the base must not be sent again"
        assert_answers(ask(llm, sync.lora_request()), resumed)
    again = copy.deepcopy(resumed)
    another = VllmSync(again, llm, mode="adapter")
    assert not another.push().base_sent, "the engine vouches for the same base, and a new trainer asks it"
    assert_answers(ask(llm, another.lora_request()), again)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_inits_that_shift_the_base(llm: LLM, init: str) -> None:
    torch.manual_seed(5)
    model = get_peft_model(engines.qwen2(), LoraConfig(r=4, init_lora_weights=init, **DENSE)).eval()
    sync = VllmSync(model, llm)
    for mode in ("adapter", "merged", "adapter"):
        train(model, 1, 0.01)
        sync.push(mode=mode)
        assert_answers(ask(llm, sync.lora_request()), model)


def test_rescaled_modules_and_several_adapters_in_adapter_mode(llm: LLM) -> None:
    """vLLM recomputes alpha / r; the live scaling is what the trainer computes with."""
    model = models.with_lora(engines.qwen2, adapters=("one", "two"), r=3, **DENSE)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.scaling["one"] *= 3
    sync = VllmSync(model, llm, mode="adapter")
    sync.push()
    assert_answers(ask(llm, sync.lora_request()), model)


def test_a_cached_adapter_is_that_of_the_stream_as_it_is_now(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are made anew when a scaling changes, and the next one may lie where one before it lay: an `id` says
    nothing of an object that is gone."""
    monkeypatch.setattr(lora_merge.engine.sync, "id", lambda stream: 0, raising=False)
    model = policy()
    sync = VllmSync(model, llm, mode="adapter")
    for factor in (1, 3, 0.5):
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.scaling["default"] *= factor
        sync.push()
        assert_answers(ask(llm, sync.lora_request()), model)


def test_what_the_trainer_lets_go_of_between_pushes_is_freed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a push that sent no weights, and after one that was refused: trainers offload there."""
    model = policy()
    sync = VllmSync(model, llm, mode="adapter")

    plan = PushPlanner.__call__

    async def after_planning(self: PushPlanner, *args: Any) -> Any:
        await plan(self, *args)
        raise PushRefused("injected")

    def refused() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(PushPlanner, "__call__", after_planning)
            with pytest.raises(PushRefused, match="injected"):
                sync.push(mode="merged")

    for push in (sync.push, sync.push, lambda: sync.push(mode="merged"), refused):
        push()
        left = []
        for name, parameter in model.named_parameters():
            if "lora_" not in name:  # adapters, which are small, stay at hand
                left.append((name, StorageWeakRef(parameter.untyped_storage())))
                parameter.data = parameter.data.clone()
        assert [name for name, memory in left if not memory.expired()] == []


def test_adapters_on_modules_of_unlike_rank(llm: LLM) -> None:
    model = policy(rank_pattern={"q_proj": 2, "down_proj": 7})
    sync = VllmSync(model, llm, mode="adapter")
    sync.push()
    assert_answers(ask(llm, sync.lora_request()), model)


def test_the_request_name_and_id_never_change(llm: LLM) -> None:
    """A peer's adapter was loaded under one name and asked for under another."""
    model = policy()
    sync = VllmSync(model, llm, mode="adapter")
    sync.push()
    request = sync.lora_request()
    train(model)
    sync.push()
    assert sync.lora_request() == request
    assert (request.lora_name, request.lora_int_id) == (VllmSync(model, llm, mode="adapter").lora_request().lora_name,
                                                       request.lora_int_id)  # fmt: skip
    assert VllmSync(model, llm).lora_request() is None


def test_merged_mode_leaves_no_adapter_behind(llm: LLM) -> None:
    model = policy()
    sync = VllmSync(model, llm, mode="adapter")
    sync.push()
    assert llm.llm_engine.list_loras()
    sync.push(mode="merged")
    assert not llm.llm_engine.list_loras(), "a late request with the adapter would count it twice"
    assert_answers(ask(llm), model)


@pytest.mark.parametrize("before", ["adapter", "merged"])
def test_a_change_of_mode_that_is_refused_changes_no_request(llm: LLM, before: str) -> None:
    """The engine holds what it held, which is what its requests have to be for."""
    model = policy()
    sync = VllmSync(model, llm, mode=before)
    sync.push()
    llm.sleep(level=0)
    with pytest.raises(PushRefused, match="paused by somebody else"):
        sync.push(mode="merged" if before == "adapter" else "adapter")
    llm.wake_up(tags=["scheduling"])
    sync.check()
    assert (sync.lora_request() is None) == (before == "merged")
    assert_answers(ask(llm, sync.lora_request()), model)
    assert sync.push().mode == before


REFUSED = {
    "dora": ({"use_dora": True}, "DoRA"),
    "lora_bias": ({"lora_bias": True, "target_modules": ["q_proj", "k_proj"]}, "lora_bias"),
    "modules_to_save": ({"modules_to_save": ["norm"]}, "ModulesToSave"),
    "rank": ({"r": 16}, "max_lora_rank 8"),
    "embeddings": ({"target_modules": ["embed_tokens", "q_proj"]}, "embed_tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_vllm_cannot_serve_as_an_adapter_names_merged_mode(llm: LLM, case: str) -> None:
    config, word = REFUSED[case]
    build = (lambda: engines.qwen2(tied=True)) if case != "embeddings" else engines.qwen2
    before = held(llm)
    model = models.with_lora(build, **(DENSE | config))
    with pytest.raises((PushRefused, UnsupportedAdapter), match=f'(?s){word}.*mode="merged"'):
        VllmSync(model, llm, mode="adapter").push()
    assert held(llm) == before
    if case != "embeddings":
        VllmSync(model, llm).push()
        assert_answers(ask(llm), model)


def test_an_adapter_on_one_of_two_tied_weights_is_refused_by_a_tied_engine(llm: LLM) -> None:
    model = policy(target_modules=["embed_tokens", "q_proj"])
    with pytest.raises(PushRefused, match=r"lm_head.weight is refused: the engine ties it.*tie_word_embeddings=False"):
        VllmSync(model, llm).push()


def test_the_tied_head_follows(llm: LLM) -> None:
    """A peer updated the embedding and not the head tied to it."""
    model = engines.qwen2().eval()
    sync = VllmSync(model, llm)
    sync.push()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(-1.5)
    sync.push()
    assert_answers(ask(llm), model)


def without(model: nn.Module, path: str) -> nn.Module:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, nn.Identity())
    return model


def narrow(model: nn.Module) -> nn.Module:
    model.model.layers[0].mlp.up_proj = nn.Linear(128, 255, bias=False)
    return model


def surplus(model: nn.Module) -> nn.Module:
    model.model.layers[0].mlp.extra = nn.Linear(8, 8)
    return model


def prefixed(model: nn.Module) -> nn.Module:
    """A prefix that no checkpoint has: a peer served the base without a word."""
    return nn.ModuleDict({"policy": model})


BAD = {
    "k_proj missing": (lambda m: without(m, "model.layers.0.self_attn.k_proj"), "qkv_proj"),
    "up_proj missing": (lambda m: without(m, "model.layers.1.mlp.up_proj"), "gate_up_proj"),
    "norm missing": (lambda m: without(m, "model.norm"), "model.norm.weight"),
    "wrong shape": (narrow, "up_proj.weight is refused"),
    "surplus": (surplus, "extra"),
    "prefix": (prefixed, "policy"),
}


@pytest.mark.parametrize("case", BAD)
def test_names_shapes_and_fused_groups_are_checked_before_the_first_byte(llm: LLM, case: str) -> None:
    """vLLM itself takes a fused layer with a part missing, and its outputs are silently wrong."""
    good = engines.qwen2().eval()
    VllmSync(good, llm).push()
    before, answers = held(llm), ask(llm)
    change, word = BAD[case]
    with pytest.raises(PushRefused, match=word):
        VllmSync(change(copy.deepcopy(good)), llm).push()
    assert held(llm) == before
    assert [o.outputs[0].token_ids for o in ask(llm)] == [o.outputs[0].token_ids for o in answers]
    assert_answers(answers, good)


def test_engines_are_judged_anew_when_something_changed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judging looks at every name; what stream and engines said at the last push need not be looked at again."""
    judged = []
    real = lora_merge.engine.push.compatibility.evaluate
    monkeypatch.setattr(
        lora_merge.engine.push.compatibility, "evaluate", lambda *args: (judged.append(args), real(*args))[1]
    )
    model = policy()
    sync = VllmSync(model, llm)
    counts = []
    for mode in ("merged", "merged", "adapter", "merged", "adapter"):
        sync.push(mode=mode)
        counts.append(len(judged))
    assert counts == [1, 1, 2, 2, 2], "once the merged stream, once the base"
    model.base_model.model.model.norm = nn.Identity()
    with pytest.raises(PushRefused, match="norm"):
        sync.push(mode="merged")
    assert len(judged) == 3
    sync.close()


@pytest.mark.parametrize("pause", ["keep", "wait", "abort"])
def test_every_pause_is_the_same_for_an_engine_that_works_in_calls(llm: LLM, pause: str) -> None:
    model = policy()
    VllmSync(model, llm, pause=pause).push()
    assert_answers(ask(llm), model)


def test_the_mode_changes_when_the_weights_do(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A push that was refused, or that still checks, had lora_request() say None: the bare base answered."""
    model = policy()
    sync, seen = VllmSync(model, llm, mode="adapter"), []
    sync.push()
    request, layer = sync.lora_request(), model.base_model.model.model.layers[0].mlp
    layer.extra = nn.Linear(8, 8)
    with pytest.raises(PushRefused, match="extra"):
        sync.push(mode="merged")
    del layer.extra
    assert sync.lora_request() == request
    assert_answers(sync.generate([{"prompt_token_ids": p} for p in engines.prompts()], engines.GREEDY), model)
    fill, plan = BucketWriter.fill, PushPlanner.__call__

    def filling(*args: Any) -> None:
        seen.append(sync.lora_request())
        fill(*args)

    def planning(*args: Any) -> Any:
        seen.append(sync.lora_request())
        return plan(*args)

    monkeypatch.setattr(BucketWriter, "fill", filling)
    monkeypatch.setattr(PushPlanner, "__call__", planning)
    sync.push(mode="merged")
    assert seen[0] == request, "while it is checked"
    assert set(seen[1:]) == {None}, "while generation stands still for it"
    assert_answers(ask(llm, sync.lora_request()), model)


@pytest.mark.parametrize(("mode", "where"), [("merged", BucketWriter), ("merged", Loader), ("adapter", Loader)])
def test_a_push_that_breaks_leaves_the_engine_dirty_and_the_next_heals_it(
    llm: LLM, mode: str, where: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = policy()
    sync = VllmSync(model, llm, mode=mode, bucket_bytes=1 << 16)
    sync.push()
    method = "fill" if where is BucketWriter else "load"
    works, calls = getattr(where, method), []

    def broken(self: Any, *args: Any) -> None:
        calls.append(args)
        if len(calls) == 4:
            raise RuntimeError("injected")
        works(self, *args)

    monkeypatch.setattr(where, method, broken)
    with torch.no_grad():
        model.base_model.model.model.norm.weight.mul_(1.01)  # so that adapter mode has to bring the base
    with pytest.raises(PushFailed, match=r"engine 0 is dirty: .*injected"):
        sync.push()
    assert held(llm).startswith("dirty")
    with pytest.raises(PushRefused, match="dirty"):
        sync.generate([{"prompt_token_ids": p} for p in engines.prompts()], engines.GREEDY)
    monkeypatch.undo()
    assert sync.push().base_sent == (mode == "adapter")
    assert_answers(sync.generate([{"prompt_token_ids": p} for p in engines.prompts()], engines.GREEDY), model)


def test_what_slept_wakes_wholly_when_a_push_has_healed_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM resumes by itself when all memory is back. (CPUs have no sleep mode: what it would do is written down.)"""
    model = policy()
    sync, sleeping, woken = VllmSync(model, llm), [True], []

    async def wake(tag: str) -> None:
        woken.append(tag)
        sleeping[0] = False

    def cache_asleep() -> bool:
        return "kv_cache" not in woken

    def breaks(*args: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(lora_merge.engine.vllm.session, "asleep", lambda: sleeping[0])
    monkeypatch.setattr(lora_merge.engine.vllm.session, "cache_asleep", cache_asleep)
    monkeypatch.setattr(sync._trainer.controls[0], "wake", wake)
    with monkeypatch.context() as patched:
        patched.setattr(BucketWriter, "fill", breaks)
        with pytest.raises(PushFailed, match="injected"):
            sync.push()
    assert woken == ["weights"]
    for _ in range(2):
        sync.push()
        assert woken == ["weights", "kv_cache"]
    assert_answers(ask(llm), model)


def test_what_the_engine_holds_as_loaded_is_merged_there(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process no bucket lies between. (A CPU engine packs its linear layers: norms are what it holds as loaded;
    tests/stream/test_weights.py places whole models, tests/gpu/test_vllm_gpu.py does so in an engine.)"""
    model = policy()
    sync, placed, place = VllmSync(model, llm, bucket_bytes=512), [], BucketWriter.write_direct

    def counted(self: BucketWriter, index: int, *args: Any) -> None:
        place(self, index, *args)
        placed.extend(slot.name for slot in self.table[index])

    monkeypatch.setattr(BucketWriter, "write_direct", counted)
    for verify in (False, True):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.mul_(1.5)
        placed.clear()
        sync.push(verify=verify)
        assert "model.norm.weight" in placed
        assert all("norm" in name for name in placed), placed
        assert_answers(ask(llm), model)


def test_two_pushes_at_the_same_time_are_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy()
    sync, inside, go = VllmSync(model, llm), threading.Event(), threading.Event()
    fill = BucketWriter.fill

    def slow(self: BucketWriter, *args: Any) -> None:
        inside.set()
        go.wait(120)
        fill(self, *args)

    monkeypatch.setattr(BucketWriter, "fill", slow)
    errors: list[BaseException] = []

    def second() -> None:
        inside.wait(120)
        try:
            sync.push()
        except PushRefused as error:
            errors.append(error)
        go.set()

    other = threading.Thread(target=second)
    other.start()
    sync.push()
    other.join()
    assert "another push" in str(errors[0])
    assert_answers(ask(llm), model)


def test_two_trainers_cannot_be_in_the_middle_of_one_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both pushes reported success, and the engine served a mixture."""
    model, other = policy(), policy(9)
    first, second = VllmSync(model, llm), VllmSync(other, llm)
    fill, refused = BucketWriter.fill, []

    def interrupted(self: BucketWriter, *args: Any) -> None:
        if not refused:
            with pytest.raises(PushRefused, match="in the middle of another trainer") as raised:
                second.push()
            refused.append(raised)
        fill(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(BucketWriter, "fill", interrupted)
        first.push()
    assert_answers(first.generate([{"prompt_token_ids": p} for p in engines.prompts()], engines.GREEDY), model)
    with monkeypatch.context() as patched:  # whatever ends a push, the engine is free afterwards
        patched.setattr(BucketWriter, "fill", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            first.push()
    second.push()
    assert_answers(ask(llm), other)


def test_only_what_was_pushed_from_here_is_generated_with(llm: LLM) -> None:
    """Versions and modes of two trainers may be equal."""
    model, other = policy(), policy(9)
    first, second = VllmSync(model, llm), VllmSync(other, llm)
    asked = [{"prompt_token_ids": p} for p in engines.prompts()], engines.GREEDY
    first.push()
    with pytest.raises(PushRefused, match=r"merged@\d+ of another trainer, and nothing was pushed from here"):
        second.generate(*asked)
    second.push()
    with pytest.raises(PushRefused, match="of another trainer, not the merged@"):
        first.generate(*asked)
    assert_answers(second.generate(*asked), other)


@pytest.mark.parametrize("merge", ["trainer", "engine"])
def test_adapters_by_name(llm: LLM, merge: Any) -> None:
    """Exactly these are served, whichever act in the trainer, with the copies of modules that are theirs."""
    model: Any = models.with_lora(engines.qwen2, adapters=("one", "two"), **DENSE)
    model.add_adapter("third", LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"]))
    model.set_adapter("third")
    with torch.no_grad():  # now in the place of the base's norms, and trained
        model.base_model.model.model.norm.modules_to_save["third"].weight.add_(0.5)

    def alone(*names: str) -> None:
        model.base_model.set_adapter(list(names))

    with VllmSync(model, llm, merge=merge, adapter_names=["two"]) as sync:
        for number, acting in enumerate(("one", "third")):
            alone(acting)
            sync.push(verify=number == 1)
            assert model.active_adapters == [acting]
            alone("two")
            sync.check()
            assert_answers(ask(llm), model)
            train(model, number)
    with pytest.raises(InvalidInput, match="was closed"):
        sync.push()
    alone("one")
    third = VllmSync(model, llm, merge=merge, adapter_names=("third", "one"))
    third.push()
    alone("third", "one")
    assert_answers(ask(llm), model)
    alone("one")
    with pytest.raises(InvalidInput, match="there is no adapter 'four'; there are one, third, two"):
        VllmSync(model, llm, merge=merge, adapter_names=["four"]).push()
    third.check()


def test_adapters_by_name_beside_the_base(llm: LLM) -> None:
    model: Any = models.with_lora(engines.qwen2, adapters=("one", "two"), **DENSE)
    model.set_adapter("one")
    sync = VllmSync(model, llm, mode="adapter", adapter_names=["two"])
    sync.push()
    model.set_adapter("two")
    assert_answers(ask(llm, sync.lora_request()), model)
    with pytest.raises(InvalidInput, match=r"share=True got adapter_names=.*leave adapter_names out"):
        VllmSync(model, llm, share=True, adapter_names=["two"])
    with lora_merge.train_merged(model), pytest.raises(InvalidInput, match=r"adapter_names=.*would serve another one"):
        VllmSync(model, llm, adapter_names=["one"]).push()


def test_a_reload_behind_its_back_shows_as_dirty(llm: LLM) -> None:
    model = policy()
    sync = VllmSync(model, llm, mode="adapter")
    sync.push()
    assert held(llm).startswith("adapter@")
    other = engines.qwen2()
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(MergedWeights(other))})
    assert "changed by something else" in held(llm)
    assert sync.push().base_sent
    assert_answers(ask(llm, sync.lora_request()), model)


@pytest.mark.parametrize("merge", ["trainer", "engine"])
@pytest.mark.parametrize("use_dora", [False, True])
def test_pushes_inside_of_inference_mode_and_then_outside(llm: LLM, merge: str, use_dora: bool) -> None:
    """A rollout function that is decorated so pushes, and an evaluation that is not: what a push keeps for the next
    one must not be of that mode."""
    model = policy(use_dora=use_dora)
    model.get_base_model().model.norm.requires_grad_(True)  # goes whole where the engine merges
    sync = VllmSync(model, llm, merge=merge)
    for batch in range(5):
        train(model, batch)
        with torch.inference_mode(batch in (0, 1, 3)):
            sync.push()
        assert_answers(ask(llm), model)


def test_pushes_under_another_default_device(llm: LLM) -> None:
    """An engine in this process makes tensors of its own when it lays out what came: on that device they computed
    nothing, or ended it."""
    model = policy()
    sync = VllmSync(model, llm)
    with torch.device("meta"):
        sync.push()
        assert sync.states()
    assert_answers(ask(llm), model)


def test_an_engine_that_computes_otherwise_is_told_of(llm: LLM) -> None:
    """The same names and shapes, and another model: it answered with the right weights and another base of its rotary
    embeddings."""
    model = policy()
    model.config.rms_norm_eps, model.config.sliding_window = 1e-5, 4096
    model.config.rope_parameters = model.config.rope_parameters | {"rope_theta": 5e5}
    sync = VllmSync(model, llm)
    said = r"engine 0 computes otherwise.*rms_norm_eps 1e-05 \(engine: 1e-06\), rope_parameters.rope_theta 500000"
    with pytest.warns(UserWarning, match=said):
        report = sync.push()
    assert "sliding_window 4096 (engine: null)" in report.differs
    assert f"an engine computes otherwise: {report.differs}" in str(report)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sync.push().differs == report.differs  # told of once
        assert not VllmSync(policy(), llm).push().differs


@pytest.mark.parametrize("mode", ["merged", "adapter"])
def test_verify_sees_a_base_that_was_written_through_data(llm: LLM, mode: str) -> None:
    """It changes no version, and a sample of each weight misses most rows."""
    model = policy()
    sync = VllmSync(model, llm, mode=mode, merge="engine")
    sync.push()
    weight = model.get_base_model().model.embed_tokens.weight
    for row in range(3, 9):
        weight.data[row] *= -1.5
        sync.push(verify=True)
        assert_answers(ask(llm, sync.lora_request()), model)


def test_an_evicted_adapter_is_loaded_again(llm: LLM) -> None:
    model = policy()
    sync = VllmSync(model, llm, mode="adapter")
    sync.push()
    state = held(llm)
    assert llm.llm_engine.remove_lora(sync.lora_request().lora_int_id)
    assert held(llm) == state
    assert_answers(ask(llm, sync.lora_request()), model)
    train(model)
    llm.llm_engine.remove_lora(sync.lora_request().lora_int_id)
    assert not sync.push().base_sent
    assert_answers(ask(llm, sync.lora_request()), model)


def test_a_request_for_an_adapter_that_has_gone_is_refused_alone(llm: LLM) -> None:
    model = policy()
    sync = VllmSync(model, llm, mode="adapter")
    sync.push()
    stale = sync.lora_request()
    sync.push(mode="merged")
    with pytest.raises(ValueError, match=r"lora_merge is not in this engine \(any more\).*ask for sync.lora_request"):
        ask(llm, stale)
    assert_answers(ask(llm), model)
    train(model)
    sync.push(mode="adapter")
    assert_answers(ask(llm, stale), model)


def test_requests_in_flight_do_not_change_their_mode(llm: LLM) -> None:
    """Whoever steps an engine has them between two steps: they went on with the bare base, and nobody said so."""
    model, inside = policy(), llm.llm_engine
    VllmSync(model, inside).push()
    sync = VllmSync(model, inside, mode="adapter")
    before = sync.states()
    inside.add_request("in flight", {"prompt_token_ids": engines.prompts()[0]}, engines.GREEDY)
    inside.step()
    for pause in ("keep", "wait"):
        with pytest.raises(PushRefused, match="requests are in flight that have to end first"):
            VllmSync(model, inside, mode="adapter", pause=pause).push()
    assert sync.states() == before
    while inside.has_unfinished_requests():
        inside.step()
    sync.push()
    assert_answers(ask(llm, sync.lora_request()), model)


def test_requests_that_a_push_ends_are_told_to_whoever_steps_the_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In vLLM's own process nobody heard of them, and `has_unfinished_requests` said True for ever."""
    model, inside, prompt = policy(), llm.llm_engine, {"prompt_token_ids": engines.prompts()[0]}
    two = engines.SamplingParams(n=2, max_tokens=10, detokenize=False)

    def ended() -> list[tuple[str, list[str | None]]]:
        found = [output for _ in range(30) for output in inside.step() if output.finished]
        assert not inside.has_unfinished_requests()
        return [(output.request_id, [one.finish_reason for one in output.outputs]) for output in found]

    sync = VllmSync(model, inside, pause="abort")
    sync.push()
    inside.add_request("begun", prompt, engines.GREEDY)
    inside.add_request("twice", prompt, two)
    inside.step()
    inside.add_request("waits", prompt, engines.GREEDY)
    sync.push()
    assert dict(ended()) == {"begun": ["abort"], "twice": ["abort"], "waits": ["abort"]}
    keeps = VllmSync(model, inside)

    def broken(*args: Any) -> None:
        raise MemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(AdapterSource, "fill", broken)
        with pytest.raises(PushFailed, match="injected"):
            keeps.push(mode="adapter")
    assert keeps.states()[0].kind == "dirty"
    inside.add_request("for what did not come", prompt, engines.GREEDY, lora_request=keeps.lora_request())
    keeps.push(mode="merged")
    assert ended() == [("for what did not come", ["abort"])]
    assert_answers(ask(llm), model)


def test_ctrl_c_between_an_adapter_and_the_cache_of_the_one_before(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine held the new one, went on, and answered from what it had cached with the old one."""
    model, long = policy(), [list(range(3, 43))]
    sync = VllmSync(model, llm, mode="adapter")
    sync.push()
    assert_answers(ask(llm, sync.lora_request(), asked=long), model, long)
    train(model, 0, 0.5)
    control, calls = sync._trainer.controls[0], [0]
    reset = control.reset_prefix_cache

    async def interrupted(*args: Any) -> bool:
        calls[0] += 1
        if calls[0] == 1:
            raise KeyboardInterrupt
        return await reset(*args)

    monkeypatch.setattr(control, "reset_prefix_cache", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sync.push()
    assert not llm.llm_engine.is_sleeping()
    assert sync.states()[0].kind == "adapter"
    assert_answers(ask(llm, sync.lora_request(), asked=long), model, long)


def test_cached_prefixes_of_the_old_weights_are_gone(llm: LLM) -> None:
    model = policy()
    sync = VllmSync(model, llm)
    long = [list(range(3, 43))]  # several blocks of cache
    for step in range(2):
        train(model, step, 0.2)
        sync.push()
        assert_answers(ask(llm, asked=long), model, long)


def test_a_hundred_pushes_drift_nowhere(llm: LLM) -> None:
    """`merge_adapter` / `unmerge_adapter` in a loop changed 16.9 % of a peer's bf16 weights."""
    model = models.with_lora(engines.qwen2, dtype=torch.bfloat16, **DENSE)
    before = {name: p.clone() for name, p in model.named_parameters()}
    sync = VllmSync(model, llm)
    for step in range(100):
        sync.push(mode=("merged", "adapter")[step % 10 == 9])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.view(torch.uint8), before[name].view(torch.uint8)), name


UNREACHED = {
    "data parallel": ({"data_parallel_size": 2}, "several data-parallel engines.*one for each"),
    "number 1 of dense ones": ({"data_parallel_index": 1}, "number 1 of several data-parallel engines.*one for each"),
    "one of two that share experts": (
        {"data_parallel_size": 2, "data_parallel_external_lb": True},
        "computes its experts together with 1 other data-parallel engines, and 1 of these have no handle here",
    ),
    "workers that do not answer": ({"world_size": 2}, "2 workers, of which 1 answer"),
    "experts that move": ({"enable_eplb": True}, "enable_eplb=False"),
}
DRAFTS = {"eagle": r"drafts tokens with a model \(eagle\).*ngram", "mtp": "drafts tokens with a model", "ngram": ""}


@pytest.mark.parametrize("case", UNREACHED)
def test_a_handle_that_does_not_reach_all_that_serves(llm: LLM, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls all data-parallel engines and returns what the first one says: two workers took the buckets of one
    mailbox, and both engines served some of the old weights."""
    config, word = UNREACHED[case]
    model = policy()
    VllmSync(model, llm).push()
    before, parallel = held(llm), llm.llm_engine.vllm_config.parallel_config
    with monkeypatch.context() as patched:
        for name, value in config.items():
            patched.setattr(parallel, name, value)
        with pytest.raises(PushRefused, match=word):
            VllmSync(policy(1), llm).push()
        if any(name.startswith("data_parallel") for name in config):
            patched.setattr(parallel, "data_parallel_external_lb", True)  # a handle for each of them
            assert held(llm) == before
    assert held(llm) == before
    assert_answers(ask(llm), model)


@pytest.mark.parametrize("method", DRAFTS)
def test_a_draft_model_would_keep_its_weights(llm: LLM, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """(vLLM 0.32 starts none on a CPU: its configuration says that there is one.)"""
    model = policy()
    speculative = SimpleNamespace(method=method)
    monkeypatch.setattr(llm.llm_engine.vllm_config, "speculative_config", speculative)
    sync, before = VllmSync(model, llm), held(llm)
    if DRAFTS[method]:
        with pytest.raises(PushRefused, match=DRAFTS[method]):
            sync.push()
        assert held(llm) == before
    else:
        sync.push()


TRANSFERS = {
    "nccl": ({"weight_transfer_config": SimpleNamespace(backend="nccl")}, "for vLLM's weight-transfer backend 'nccl'"),
    "none": ({"weight_transfer_config": None}, ""),
}


@pytest.mark.parametrize("case", TRANSFERS)
def test_engines_of_other_backends(llm: LLM, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known when the `VllmSync` is made. One without any is taken, unless it chose what cannot be loaded again."""
    config, word = TRANSFERS[case]
    for name, value in config.items():
        monkeypatch.setattr(llm.llm_engine.vllm_config, name, value)
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    monkeypatch.setattr(worker, "weight_transfer_engine", None)
    if word:
        with pytest.raises(PushRefused, match=word):
            VllmSync(policy(), llm)
        return
    model = policy()
    VllmSync(model, llm).push()
    assert_answers(ask(llm), model)
    experts = type("FlashInferExperts", (), {"__module__": "vllm.model_executor.layers.fused_moe.flashinfer_moe_ep"})
    monkeypatch.setattr(worker.get_model().model.norm, "quant_method", experts(), raising=False)
    with pytest.raises(PushRefused, match=r"model.norm \(FlashInferExperts\) that cannot be loaded again"):
        VllmSync(model, llm).push()


def test_vllms_own_update_comes_first(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    monkeypatch.setattr(worker, "_weight_update_active", True)
    with pytest.raises(PushRefused, match="finish_weight_update"):
        VllmSync(policy(), llm).push()


def pretend_sleep(
    sync: VllmSync, monkeypatch: pytest.MonkeyPatch, *, deaf: bool = False
) -> tuple[list[int], list[Any]]:
    """CPUs have no sleep mode: at which level an engine's weights sleep, and the calls that would change it.

    Args:
        deaf: `sleep` does nothing, as where vLLM 0.26 finds that the KV cache sleeps already.
    """
    level: list[int] = [0]
    calls: list[Any] = []

    async def wake(tag: str) -> None:
        calls.append(tag)
        if tag == "weights":
            level[0] = 0

    async def sleep(to: int) -> None:
        calls.append(to)
        level[0] = level[0] if deaf else to

    monkeypatch.setattr(lora_merge.engine.vllm.session, "asleep", lambda: level[0])
    monkeypatch.setattr(lora_merge.engine.vllm.session, "cache_asleep", lambda: "kv_cache" not in calls)
    monkeypatch.setattr(sync._trainer.controls[0], "wake", wake)
    monkeypatch.setattr(sync._trainer.controls[0], "sleep", sleep)
    return level, calls


def test_weights_that_sleep_threw_away(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Level 2, called by somebody else (verl, TRL): whatever comes back, the same bits in the places that are sampled,
    too, is not the policy, and no base to merge adapters onto. (CPUs have no sleep mode, and keep all bits.)"""
    model = policy()
    sync = VllmSync(model, llm, merge="engine")
    sync.push()
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    level: list[int] = [1]
    monkeypatch.setattr(lora_merge.engine.vllm.session, "asleep", lambda: level[0])
    worker.sleep(1)
    level[0] = 0
    sync.check()
    level[0] = 2
    worker.sleep(level=2)
    for level[0] in (2, 0):
        assert str(*sync.states()) == "dirty (sleep at level 2 threw its weights away)"
        with pytest.raises(PushRefused, match="sleep at level 2"):
            sync.check()
    sync.push()
    assert_answers(ask(llm), model)


def test_tensors_beside_parameters_and_buffers_outlast_level_two(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of ALiBi lie in the attention's implementation: neither vLLM keeps them, nor does a push bring them."""
    sync = VllmSync(policy(), llm)
    sync.push()
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    implementation = worker.get_model().model.layers[0].self_attn.attn.impl
    kept, elsewhere, level = torch.tensor([0.5, 0.25]), torch.ones(2), [0]
    implementation.slopes, implementation.elsewhere = kept, elsewhere

    def sleep(to: int) -> None:
        level[0] = to
        for tensor in (kept, elsewhere):
            tensor.zero_()

    def wake_up(tags: list[str]) -> None:
        level[0] = level[0] if tags == ["kv_cache"] else 0

    try:
        with monkeypatch.context() as patch:
            at = kept.data_ptr()
            patch.setattr(lora_merge.engine.vllm.session, "_weights", lambda: [range(at, at + kept.nbytes)])
            patch.setattr(lora_merge.engine.vllm.session, "asleep", lambda: level[0])
            patch.setattr(worker.sleep, "sleep", sleep)
            patch.setattr(worker.wake_up, "wake_up", wake_up)
            worker.sleep(2)
            worker.sleep(2)  # of memory that is unmapped nothing is read
            worker.wake_up(["kv_cache"])
            assert not kept.any()
            worker.wake_up(["weights"])
        assert kept.tolist() == [0.5, 0.25]
        assert not elsewhere.any(), "what does not sleep with the weights is left alone"
    finally:
        del implementation.slopes, implementation.elsewhere


def test_a_refused_push_leaves_a_sleeping_engine_asleep(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy()
    sync = VllmSync(model, llm)
    level, calls = pretend_sleep(sync, monkeypatch)
    model.base_model.model.model.layers[0].mlp.extra = nn.Linear(8, 8)
    for at in (1, 2):
        level[0] = at
        with pytest.raises(PushRefused, match=r"mlp\.extra"):
            sync.push()
        assert level == [at]
    assert calls == ["weights", 1, "weights", 2]


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_stays_half_awake_after_a_refusal(level: int, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.26 does not put weights to sleep again while the KV cache sleeps: the next push wakes what is left, or
    whoever asks the engine waits for ever."""
    model = policy()
    sync = VllmSync(model, llm)
    weights, calls = pretend_sleep(sync, monkeypatch, deaf=True)
    weights[0] = level
    model.base_model.model.model.layers[0].mlp.extra = nn.Linear(8, 8)
    for _ in range(2):
        with pytest.raises(PushRefused, match=r"mlp\.extra"):
            sync.push()
    assert calls == ["weights", level], "once awake, weights stay it, and nobody puts them to sleep again"
    del model.base_model.model.model.layers[0].mlp.extra
    sync.push()
    assert calls == ["weights", level, "kv_cache"]
    sync.push()
    assert calls == ["weights", level, "kv_cache"], "awake"


def test_engines_that_cannot_be_pushed_to_say_why(tmp_path: Path, llm: LLM) -> None:
    class Deaf:
        llm_engine = None

        def collective_rpc(self, *args: Any, **kwargs: Any) -> None:
            raise AttributeError("no worker method lora_merge")

    with pytest.raises(PushRefused, match="is lora-merge installed where its workers run"):
        VllmSync(engines.qwen2(), Deaf()).push()
    for wrong in (object(), "localhost:8000", []):
        with pytest.raises(ValueError, match="engine must be"):
            VllmSync(engines.qwen2(), wrong)
    with pytest.raises(ValueError, match="mode must be"):
        VllmSync(engines.qwen2(), llm).push(mode="direct")
