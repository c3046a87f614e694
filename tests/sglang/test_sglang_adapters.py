"""Adapters beside their base in one engine of two schedulers: the live scaling, what is refused, changes of the mode,
requests in flight, faults."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import policies
import pytest
import sglang_engines
from safetensors.torch import load_file
from sglang_engines import (
    LORA,
    ado,
    ask,
    assert_answers,
    do,
    engine,
    flying,
    follow_the_scaling,
    pushed_in_flight,
    spans,
)
from sglang_faults import ADAPTER_PHASES, BUCKET, PAUSES, TOKENS, fail_in_flight
from torch import nn

from lora_merge import LoraMergeError, PushFailed, SglangSync
from lora_merge.engine.sglang import internals

DENSE = {"target_modules": policies.LINEARS}
INSTEAD = 'push with mode="merged" instead'
no_leftovers = sglang_engines.no_leftovers


def untied() -> nn.Module:
    return policies.qwen2(tied=False)


def policy(**config: Any) -> Any:
    return models.with_lora(untied, **DENSE | config)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with engine(policy(), tmp_path_factory.mktemp("adapters") / "base", tp_size=2, **LORA) as one:
        yield one


@pytest.fixture(autouse=True)
def mended(started: Any) -> Iterator[None]:
    """The next test finds the engine well."""
    yield
    sglang_engines.mend(started, policy())


def test_adapters(started: Any) -> None:
    """The base once, then adapters with the live scaling; back and forth."""
    model = policy()
    sync = SglangSync(model, started, mode="adapter")
    follow_the_scaling(started, sync, model, assert_answers)
    with model.disable_adapter():
        assert_answers(ask(started), model)
    sync.push(mode="merged")
    assert sync.lora_path() is None
    assert_answers(ask(started), model)
    with pytest.raises(ValueError, match="loaded"):
        ask(started, lora_path="lora_merge")
    sync.push(mode="adapter")
    outputs = ask(started, lora_path=sync.lora_path())
    assert_answers(outputs, model)
    assert {output["meta_info"]["weight_version"] for output in outputs} == {f"adapter@{sync.states()[0].version}"}
    sync.close()


def test_an_adapter_of_somebody_else(started: Any, tmp_path: Path) -> None:
    """Requests for it are answered on top of merged weights, and the push says so; in adapter mode on the base."""
    model, theirs = policy(), policy()
    policies.train(model)
    policies.train(theirs, 7)
    theirs.save_pretrained(tmp_path)
    sync = SglangSync(model, started, mode="adapter")
    sync.push()
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert started.load_lora_adapter_from_tensors("theirs", tensors, settings).success
    try:
        assert not sync.push().others
        assert_answers(ask(started, lora_path="theirs"), theirs)
        with pytest.warns(UserWarning, match="not loaded the adapters theirs.*on top of the pushed"):
            assert sync.push(mode="merged").others == "theirs"
        assert_answers(ask(started), model)
        with pytest.raises(AssertionError):
            assert_answers(ask(started, lora_path="theirs"), theirs)
    finally:
        started.unload_lora_adapter("theirs")
    sync.close()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "v alone": (lambda: policy(target_modules=["v_proj"]), "no LoRA layer for .*v_proj"),
    "up alone": (
        lambda: policy(target_modules=["q_proj", "k_proj", "v_proj", "up_proj"]),
        "no LoRA layer for .*up_proj",
    ),
    "a high rank": (lambda: policy(r=16), "rank 16 is above the engine's max_lora_rank 8"),
    "embeddings": (
        lambda: policy(target_modules=[*policies.LINEARS, "embed_tokens"]),
        "no LoRA layer for .*embed_tokens",
    ),
    "the head": (lambda: policy(target_modules=[*policies.LINEARS, "lm_head"]), "no LoRA layer for lm_head"),
    "DoRA": (lambda: policy(use_dora=True), "cannot serve DoRA"),
    "lora_bias": (
        lambda: policy(target_modules=["q_proj", "k_proj", "v_proj"], lora_bias=True),
        "cannot serve lora_bias",
    ),
    "trainable tokens": (
        lambda: policy(trainable_token_indices={"embed_tokens": [3, 17]}),
        "cannot serve TrainableTokens",
    ),
    "modules_to_save": (lambda: policy(modules_to_save=["lm_head"]), "cannot serve ModulesToSave"),
    "experts": (
        lambda: models.with_lora(
            policies.qwen3_moe,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=policies.EXPERTS,
        ),
        r"nothing would fill .*self_attn\.qkv_proj\.bias",
    ),
}
"""(The engine has no experts, so that first of all the base is another one: the first lines of many say so.)"""


@pytest.mark.parametrize("what", REFUSED)
def test_what_sglang_would_pass_over(started: Any, what: str) -> None:
    model = policy()
    sync = SglangSync(model, started, mode="adapter")
    sync.push()
    held, (bad, why) = sync.states(), REFUSED[what]
    with pytest.raises(LoraMergeError, match=why if what == "experts" else f"{why}.*{INSTEAD}"):
        SglangSync(bad(), started, mode="adapter").push()
    assert sync.states() == held
    assert_answers(ask(started, lora_path=sync.lora_path()), model)
    sync.close()


# Requests in flight


@pytest.mark.parametrize("pause", PAUSES)
def test_requests_in_flight(started: Any, pause: str) -> None:
    """They go on with the adapter that a push brings, or end before."""
    model = policy()
    sync = SglangSync(model, started, mode="adapter", pause=pause)
    before, old = sync.push().version, copy.deepcopy(model)
    policies.train(model, size=0.2)
    for prompt, output in zip(policies.prompts(), pushed_in_flight(started, sync, TOKENS), strict=False):
        assert output["meta_info"]["weight_version"] == f"adapter@{before + (pause == 'keep')}", "that at its end"
        if pause == "abort":
            assert output["meta_info"]["finish_reason"]["type"] == "abort"
            continue
        mine, count = spans(output, prompt, old, model), len(output["output_ids"])
        assert mine < count == TOKENS if pause == "keep" else mine == count == TOKENS
    assert_answers(ask(started, lora_path=sync.lora_path()), model)
    sync.close()


OTHER = {"merged": "adapter", "adapter": "merged"}


@pytest.mark.parametrize("pause", PAUSES)
@pytest.mark.parametrize("mode", OTHER)
def test_a_change_of_the_mode_with_requests_in_flight(started: Any, mode: str, pause: str) -> None:
    """A request keeps the adapter, or none, with which it began: it ends first, with the old weights and their
    version."""
    model = policy()
    sync = SglangSync(model, started, mode=mode, pause=pause)
    before, old = sync.push().version, copy.deepcopy(model)
    policies.train(model, size=0.2)
    outputs = pushed_in_flight(started, sync, TOKENS, mode=OTHER[mode])
    for prompt, output in zip(policies.prompts(), outputs, strict=False):
        assert output["meta_info"]["weight_version"] == f"{mode}@{before}"
        if pause == "abort":
            assert output["meta_info"]["finish_reason"]["type"] == "abort"
        else:
            assert spans(output, prompt, old, model) == len(output["output_ids"]) == TOKENS
    assert sync.states()[0].kind == OTHER[mode]
    assert_answers(ask(started, lora_path=sync.lora_path()), model)
    sync.close()


@pytest.mark.parametrize("mode", OTHER)
def test_requests_that_come_while_the_mode_changes(started: Any, mode: str) -> None:
    """Those that were made for the mode before are ended, and hear so: they were answered by the bare base. Those of
    the new mode wait for it."""
    model, other = policy(), OTHER[mode]
    sync, manager = SglangSync(model, started, mode=mode), started.tokenizer_manager
    sync.push()
    old, prompts = sync.lora_path(), policies.prompts()

    async def scenario() -> list[Any]:
        flown = await flying(started, TOKENS, lora_path=old)
        policies.train(model, size=0.2)
        push = asyncio.ensure_future(sync.apush(mode=other))
        while not manager.is_pause:
            await asyncio.sleep(0.01)
        new = sync.lora_path()  # which the push is about to bring
        assert new != old
        asked = [(prompts[0], old), (prompts[:2], old), (prompts[1], new)]
        greedy = sglang_engines.GREEDY
        late = [
            asyncio.ensure_future(
                started.async_generate(input_ids=ids, sampling_params=greedy, lora_path=path, return_logprob=True)
            )
            for ids, path in asked
        ]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in late)
        await ado(started, "slow", 0)
        await push
        await asyncio.gather(*flown)
        return await asyncio.gather(*late, return_exceptions=True)

    *ended, waited = started.loop.run_until_complete(asyncio.wait_for(scenario(), 120))
    for error in ended:
        assert isinstance(error, Exception), error
        assert any(word in str(error) for word in ("was aborted", "never been loaded", "for weights that are gone"))
    assert_answers([waited], model, [prompts[1]])
    assert_answers(ask(started, lora_path=sync.lora_path()), model)
    sync.close()


def test_where_the_door_is_needed(started: Any) -> None:
    """SGLang 0.5.17 itself looks, when it holds a request back no longer, whether that was ended meanwhile."""
    looks = hasattr(type(started.tokenizer_manager), "_raise_if_logical_request_aborted")
    assert looks == (internals.installed() == "0.5.17"), "the door is not needed any more in 0.5.23"


@pytest.mark.parametrize("pause", ["keep", "wait"])
@pytest.mark.parametrize("mode", OTHER)
def test_a_change_of_the_mode_after_a_push_that_broke_off(started: Any, mode: str, pause: str) -> None:
    """Requests that it has kept end with what they have: the weights that they need are gone."""
    model = policy()
    sync = SglangSync(model, started, mode=mode, bucket_bytes=BUCKET)
    before = sync.push().version
    policies.train(model, size=0.2)
    healing = SglangSync(model, started, mode=OTHER[mode], pause=pause)

    async def scenario() -> list[Any]:
        tasks = await flying(started, TOKENS, lora_path=sync.lora_path())
        await ado(started, "fail", "bucket" if mode == "merged" else "load adapter", [1])
        with pytest.raises(PushFailed, match="injected"):
            await sync.apush()
        await ado(started, "mend")
        assert not any(task.done() for task in tasks), "they are kept"
        await healing.apush()
        await ado(started, "slow", 0)
        return await asyncio.gather(*tasks)

    for output in started.loop.run_until_complete(asyncio.wait_for(scenario(), 120)):
        assert output["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < output["meta_info"]["completion_tokens"] < TOKENS
        assert output["meta_info"]["weight_version"] == f"{mode}@{before}"
    assert_answers(ask(started, lora_path=healing.lora_path()), model)
    sync.close()
    healing.close()


# Faults


@pytest.mark.parametrize("pause", PAUSES)
@pytest.mark.parametrize("where", ADAPTER_PHASES)
def test_a_scheduler_fails_with_requests_in_flight(started: Any, where: str, pause: str) -> None:
    fail_in_flight(started, policy(), where, 1, pause)


@pytest.mark.parametrize("ranks", [[0], [0, 1]])
@pytest.mark.parametrize("where", ADAPTER_PHASES)
def test_one_or_all_schedulers_fail(started: Any, where: str, ranks: list[int]) -> None:
    model = policy()
    sync = SglangSync(model, started, mode="adapter")
    sync.push()
    held, before = sync.states(), copy.deepcopy(model)
    policies.train(model)
    do(started, "fail", where, ranks)
    with pytest.raises(LoraMergeError, match="injected"):
        sync.push()
    do(started, "mend")
    if ADAPTER_PHASES[where].writes:
        assert sync.states()[0].kind == "dirty"
    else:
        assert sync.states() == held
        assert_answers(ask(started, lora_path=sync.lora_path()), before)
    assert sync.push(verify=True).base_sent == ADAPTER_PHASES[where].writes
    assert_answers(ask(started, lora_path=sync.lora_path()), model)
    sync.close()
