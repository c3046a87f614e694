"""One engine of two schedulers: faults on one and on both, with requests in flight, and what users do beside pushes."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from typing import Any

import models
import policies
import pytest
import sglang_engines
from sglang_engines import GREEDY, ado, ask, assert_answers, do, engine, flying, spans
from sglang_faults import BUCKET, PAUSES, TOKENS, WIDE_FLIGHTS, fail_at_the_end, fail_in_flight
from torch import nn

from lora_merge import PushFailed, PushRefused, SglangSync
from lora_merge.engine.push.sequence import EngineSequence
from tests.sglang.test_sglang_models import DENSE, push_and_ask

no_leftovers = sglang_engines.no_leftovers


def policy(seed: int = 0) -> Any:
    return models.with_lora(policies.llama, seed=seed, **DENSE)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Prompts of 12 tokens are computed in two pieces."""
    folder = tmp_path_factory.mktemp("wide") / "base"
    with engine(policy(), folder, tp_size=2, chunked_prefill_size=8) as one:
        yield one


@pytest.fixture(autouse=True)
def mended(wide: Any) -> Iterator[None]:
    """The next test finds the engine well."""
    yield
    sglang_engines.mend(wide, policy())


def run(wide: Any, scenario: Any) -> Any:
    """What a coroutine returns in the engine's event loop; one that hangs ends in an error."""
    return wide.loop.run_until_complete(asyncio.wait_for(scenario, 120))


def test_tensor_parallel(wide: Any) -> None:
    push_and_ask(policy(), wide, bucket_bytes=1 << 17)


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
@pytest.mark.parametrize("where", ["hello", "begin_full", "bucket", "finish", "commit"])
def test_one_or_all_schedulers_fail(wide: Any, where: str, ranks: list[int]) -> None:
    model = policy()
    sync = SglangSync(model, wide, bucket_bytes=BUCKET)
    sync.push()
    before = copy.deepcopy(model)
    policies.train(model)
    do(wide, "fail", where, ranks, 1 if where == "bucket" else 0)
    with pytest.raises((PushFailed, PushRefused), match="injected"):
        sync.push()
    do(wide, "mend")
    if where == "hello":
        assert_answers(ask(wide), before)
    else:
        assert sync.states()[0].kind == "dirty"
    sync.push(verify=True)
    assert_answers(ask(wide), model)
    sync.close()


@pytest.mark.parametrize(("where", "pause"), WIDE_FLIGHTS)
def test_a_scheduler_fails_with_requests_in_flight(wide: Any, where: str, pause: str) -> None:
    fail_in_flight(wide, policy(), where, 1, pause)


@pytest.mark.parametrize("pause", PAUSES)
def test_a_scheduler_fails_at_the_end(wide: Any, pause: str) -> None:
    fail_at_the_end(wide, policy(), 1, pause)


@pytest.mark.parametrize("pause", PAUSES)
def test_what_a_failed_push_has_kept(wide: Any, pause: str) -> None:
    """Requests that stand still in a dirty engine go on, or are aborted; none is waited for."""
    model = policy()
    sync = SglangSync(model, wide, bucket_bytes=BUCKET)
    sync.push()
    old = copy.deepcopy(model)
    policies.train(model, size=0.2)
    healing = SglangSync(model, wide, pause=pause)

    async def scenario() -> list[Any]:
        tasks = await flying(wide, TOKENS)
        await ado(wide, "fail", "bucket", [0], 1)
        with pytest.raises(PushFailed, match="injected"):
            await sync.apush()
        await ado(wide, "mend")
        await healing.apush()
        await ado(wide, "slow", 0)
        return await asyncio.gather(*tasks)

    for prompt, output in zip(policies.prompts(), run(wide, scenario()), strict=False):
        if pause == "abort":
            assert output["meta_info"]["finish_reason"]["type"] == "abort"
        else:
            assert spans(output, prompt, old, model) < TOKENS
    assert_answers(ask(wide), model)
    sync.close()
    healing.close()


@pytest.mark.parametrize("pause", PAUSES)
def test_prompts_that_are_half_computed(wide: Any, pause: str) -> None:
    """A push between the two pieces of a prompt."""
    model = policy()
    sync = SglangSync(model, wide, pause=pause)
    sync.push()
    old = copy.deepcopy(model)
    policies.train(model, size=0.2)

    async def scenario() -> list[Any]:
        await ado(wide, "slow", 0.3)
        tasks = [
            asyncio.ensure_future(wide.async_generate(input_ids=prompt, sampling_params=GREEDY))
            for prompt in policies.prompts()
        ]
        await asyncio.sleep(0.15)
        await sync.apush()
        await ado(wide, "slow", 0)
        return await asyncio.gather(*tasks)

    for prompt, output in zip(policies.prompts(), run(wide, scenario()), strict=True):
        if pause == "keep":
            assert spans(output, prompt, old, model) < len(output["output_ids"])
        elif pause == "wait":
            assert spans(output, prompt, old, model) in (0, len(output["output_ids"]))
    assert_answers(ask(wide), model)
    sync.close()


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("pause", PAUSES)
def test_a_users_own_pause_with_requests_in_flight(wide: Any, pause: str, mode: str) -> None:
    """The push waits for none of them and ends none; they go on with the new weights when the user says so."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    model, manager = policy(), wide.tokenizer_manager
    sync = SglangSync(model, wide, pause=pause)
    sync.push()
    old = copy.deepcopy(model)
    policies.train(model, size=0.2)

    async def scenario() -> list[Any]:
        tasks = await flying(wide, TOKENS)
        await manager.pause_generation(PauseGenerationReqInput(mode=mode))
        await sync.apush()
        await ado(wide, "slow", 0)
        assert manager.is_pause
        assert not any(task.done() for task in tasks)
        await manager.continue_generation(ContinueGenerationReqInput())
        return await asyncio.gather(*tasks)

    for prompt, output in zip(policies.prompts(), run(wide, scenario()), strict=False):
        assert len(output["output_ids"]) == TOKENS
        assert spans(output, prompt, old, model) < TOKENS
    assert_answers(ask(wide), model)
    sync.close()


def test_somebody_resumes_it_in_the_middle(wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it answers then is no policy's: the push says so, and the engine stands still until the next one."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput

    model, manager, settle = policy(), wide.tokenizer_manager, EngineSequence.settle
    sync = SglangSync(model, wide, bucket_bytes=BUCKET)
    sync.push()
    policies.train(model, size=0.2)

    async def meddled(self: EngineSequence, *args: Any, **options: Any) -> None:
        await manager.continue_generation(ContinueGenerationReqInput())
        await asyncio.sleep(0.5)
        await settle(self, *args, **options)

    async def scenario() -> list[Any]:
        tasks = await flying(wide, TOKENS)
        with monkeypatch.context() as patch:
            patch.setattr(EngineSequence, "settle", meddled)
            with pytest.raises(PushFailed, match=r"engine 0 is dirty: .*somebody has resumed it"):
                await sync.apush()
        assert manager.is_pause
        assert (await sync.astates())[0].kind == "dirty"
        await sync.apush()
        assert not manager.is_pause
        await ado(wide, "slow", 0)
        return await asyncio.gather(*tasks)

    run(wide, scenario())
    assert_answers(ask(wide), model)
    sync.close()


def test_two_trainers_at_the_same_time(wide: Any) -> None:
    """One of them is refused, and the engine has the other's policy."""
    trained = [policy(0), policy(1)]
    syncs = [SglangSync(model, wide, bucket_bytes=BUCKET) for model in trained]
    syncs[0].push()

    async def scenario() -> list[Any]:
        tasks = await flying(wide, TOKENS)
        done = await asyncio.gather(*(sync.apush() for sync in syncs), return_exceptions=True)
        await ado(wide, "slow", 0)
        await asyncio.gather(*tasks)
        return done

    done = run(wide, scenario())
    refused = [error for error in done if isinstance(error, PushRefused)]
    assert len(refused) == 1, done
    assert "in the middle of another trainer's push" in str(refused[0])
    assert_answers(ask(wide), trained[done.index(refused[0]) ^ 1])
    for sync in syncs:
        sync.push()
    assert_answers(ask(wide), trained[1])
    for sync in syncs:
        sync.close()


@pytest.mark.parametrize("tags", [None, ["kv_cache"], ["weights"]])
def test_a_push_that_fails_while_memory_is_released(wide: Any, tags: list[str] | None) -> None:
    """The next one heals it, and all memory is there again that the user has not released."""
    model = policy()
    sync = SglangSync(model, wide, bucket_bytes=BUCKET)
    sync.push()
    policies.train(model)
    wide.release_memory_occupation(tags)
    do(wide, "fail", "bucket", [1], 1)
    with pytest.raises(PushFailed, match="injected"):
        sync.push()
    do(wide, "mend")
    assert sync.states()[0].kind == "dirty"
    sync.push(verify=True)
    if tags == ["kv_cache"]:  # the weights were there: nothing was for the push to wake
        wide.resume_memory_occupation(tags)
    assert_answers(ask(wide), model)
    sync.close()


def test_a_model_of_another_size_is_refused(wide: Any) -> None:
    """Of a larger one each of two schedulers would cut its part out."""
    model = policy()
    sync = SglangSync(model, wide)
    sync.push()
    bad = policies.llama()
    bad.model.layers[0].mlp.gate_proj = nn.Linear(128, 512, bias=False)
    with pytest.raises(PushRefused):
        SglangSync(bad, wide).push()
    assert_answers(ask(wide), model)
    sync.close()


def test_a_release_that_lacks_something(wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process of the handle, and in a scheduler: refused by name, before anything is written."""
    model = policy()
    sync = SglangSync(model, wide)
    sync.push()
    held, manager = sync.states(), type(wide.tokenizer_manager)
    with monkeypatch.context() as patched:
        for name in ("update_weight_version", "_update_weight_version_if_provided"):
            for kind in manager.__mro__:
                if name in vars(kind):
                    patched.delattr(kind, name)
        with pytest.raises(PushRefused, match=r"runs SGLang .* TokenizerManager\.update_weight_version; 0\.5\.17"):
            SglangSync(model, wide)
    do(wide, "lack", "is_fully_idle")
    with pytest.raises(PushRefused, match=r"does not offer \w+\.is_fully_idle; 0\.5\.17"):
        sync.push()
    do(wide, "mend")
    assert sync.states() == held
    assert_answers(ask(wide), model)
    sync.close()
