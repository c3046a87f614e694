"""Requests in flight, and pushes in which a process is killed: real engines in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
from engines import ask, assert_answers, engine, train
from vllm import LLM, SamplingParams

from lora_merge import PushFailed, PushRefused, VllmSync
from lora_merge.stream.bucket_writer import BucketWriter

DENSE = {"target_modules": engines.LINEARS}
BUCKET = 1 << 16
"""Small buckets: there is a middle of a push."""
pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers


def policy(seed: int = 0) -> Any:
    return models.with_lora(engines.qwen2, seed=seed, **DENSE)


def worker_of(llm: LLM) -> int:
    """Process id of the engine."""
    (answer,) = llm.collective_rpc("lora_merge", args=(json.dumps({"op": "hello"}),))
    return int(json.loads(answer)["pid"])


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def in_the_middle(do: Callable[[], None]) -> Callable[..., None]:
    """In the place of `BucketWriter.fill`: does something before the fourth bucket."""
    fill = BucketWriter.fill

    def instead(self: BucketWriter, index: int, *args: Any) -> None:
        if index == 3:
            do()
        fill(self, index, *args)

    return instead


# Requests in flight


class Engine:
    """An AsyncLLM in an event loop of its own."""

    def __init__(self, folder: Path, model: torch.nn.Module) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        self.loop, self.count = asyncio.new_event_loop(), 0
        options = engines.engine_options(model) | {"enable_lora": True, "max_lora_rank": 8, "max_model_len": 256}
        options["worker_extension_cls"] = "engines.Slow"

        async def start() -> AsyncLLM:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(str(folder), **options))

        self.llm = self.run(start())

    async def stop(self) -> None:
        """In its loop: elsewhere its sockets are left to the loop to close, and who collects their context waits."""
        self.llm.shutdown()

    def run(self, what: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(what, 240))

    async def slow(self, on: bool) -> None:
        await self.llm.collective_rpc("slow", args=(on,))

    async def flying(self, sync: VllmSync, count: int = 4) -> list[asyncio.Task[Any]]:
        """Requests in flight, each of which has said something; the next push finds them so."""
        control = sync._trainer.controls[0]
        pause, begun = control.pause, [asyncio.Event() for _ in range(count)]

        async def full_speed(mode: str) -> None:
            if mode == "wait":
                await self.slow(False)
            await pause(mode)
            await self.slow(False)

        control.pause = full_speed  # type: ignore[method-assign]
        control._reaches_core = lambda: False  # type: ignore[attr-defined]  # call by call, as over HTTP
        await self.slow(True)
        tasks = [asyncio.create_task(self.request(i, 200, sync.lora_request(), begun[i])) for i in range(count)]
        all_begun = asyncio.gather(*(event.wait() for event in begun))
        await asyncio.wait([all_begun, *tasks], return_when=asyncio.FIRST_COMPLETED)
        assert not any(task.done() for task in tasks), "the scenario has requests in flight"
        return tasks

    async def request(self, number: int, tokens: int, lora: Any = None, begun: asyncio.Event | None = None) -> Any:
        self.count += 1
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=1)
        prompt = {"prompt_token_ids": engines.prompts()[number]}
        async for output in self.llm.generate(prompt, sampling, str(self.count), lora_request=lora):
            last = output
            if begun is not None:
                begun.set()
        return last


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("async") / "base"
    engines.save_base(engines.qwen2(), folder)
    engine = Engine(folder, engines.qwen2())
    yield engine
    engine.run(engine.stop())
    engine.loop.close()


@pytest.mark.parametrize("mode", ["merged", "adapter"])
@pytest.mark.parametrize("pause", ["wait", "abort"])
def test_requests_in_flight_end_with_the_weights_they_began_with(running: Engine, pause: str, mode: str) -> None:
    """`wait` lets them finish, `abort` ends them where they are; what comes after is the new policy's alone."""
    model = policy()
    sync = VllmSync(model, running.llm, mode=mode, pause=pause, bucket_bytes=BUCKET)

    async def scenario() -> tuple[list[Any], list[Any]]:
        await sync.apush()
        flying = await running.flying(sync)
        before = torch.nn.utils.parameters_to_vector(model.parameters())
        train(model)
        push = asyncio.create_task(sync.apush())
        late = [asyncio.create_task(running.request(i, 10, sync.lora_request())) for i in range(4)]
        await push
        after = await asyncio.gather(*late, *(running.request(i, 10, sync.lora_request()) for i in range(4)))
        torch.nn.utils.vector_to_parameters(before, model.parameters())
        return await asyncio.gather(*flying), after

    old, new = running.run(scenario())
    for output in old:
        completion = output.outputs[0]
        assert completion.finish_reason == ("length" if pause == "wait" else "abort")
        assert (len(completion.token_ids) == 200) == (pause == "wait"), "no token is lost, none is made up"
    assert_answers(old, model)
    with torch.no_grad():
        train(model)
    assert_answers(new[4:], model)
    for output in new[:4]:  # came in while the push was under way
        spans = output.outputs[0].weight_versions
        # One that was in time to be aborted, but not to say anything, has none.
        assert len(spans) == 1 or (pause == "abort" and not output.outputs[0].token_ids), "no mixing of versions"


@pytest.mark.parametrize("modes", [("merged", "adapter"), ("adapter", "merged")], ids=" to ".join)
def test_requests_in_flight_end_before_the_mode_changes(running: Engine, modes: tuple[str, str]) -> None:
    """Kept ones would go on over a bare base, or with an adapter on top of merged weights."""
    model = policy()
    sync = VllmSync(model, running.llm, mode=modes[0], pause="keep", bucket_bytes=BUCKET)

    async def scenario() -> list[Any]:
        await sync.apush()
        flying = await running.flying(sync)
        await sync.apush(mode=modes[1])
        return await asyncio.gather(*flying)

    outputs = running.run(scenario())
    assert all(len(output.outputs[0].weight_versions) == 1 for output in outputs)
    assert_answers(outputs, model)


# Engines that stand still after a push that failed


def breaks() -> None:
    raise RuntimeError("injected")


def test_a_dirty_engine_generates_nothing_until_a_push_has_healed_it(
    running: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on with half of the new weights, and vLLM called its tokens those of the version before."""
    model = policy()
    sync = VllmSync(model, running.llm, bucket_bytes=BUCKET)

    async def scenario() -> tuple[int, Any, Any]:
        await sync.apush()
        (flying,) = await running.flying(sync, 1)
        train(model)
        with monkeypatch.context() as patched:
            patched.setattr(BucketWriter, "fill", in_the_middle(breaks))
            with pytest.raises(PushFailed, match=r"engine 0 is dirty: .*injected.*stay paused"):
                await sync.apush()
        late = asyncio.create_task(running.request(1, 10))
        await asyncio.sleep(0.3)
        assert await running.llm.is_paused()
        assert not flying.done()
        assert not late.done()
        report = await sync.apush()
        assert not await running.llm.is_paused()
        return report.version, await flying, await late

    version, flying, late = running.run(scenario())
    assert len(flying.outputs[0].token_ids) == 200, "no token is lost"
    assert_answers([late], model, engines.prompts()[1:2])
    spans = [span.version if hasattr(span, "version") else span[0] for span in late.outputs[0].weight_versions]
    assert spans == [f"merged@{version}"]


@pytest.mark.parametrize("late", [False, True], ids=["before it is given up", "after that"])
def test_a_pause_that_times_out_is_ended_by_the_next_push(
    running: Engine, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes effect in the engine nevertheless, and nobody knew whose it was; no byte has moved, so that the weights
    are what they were."""
    model = policy()
    sync = VllmSync(model, running.llm, bucket_bytes=BUCKET)
    control = sync._trainer.controls[0]
    pause = control.pause

    async def slow(mode: str) -> None:
        if not late:
            await pause(mode)
        raise TimeoutError("timed out")

    async def scenario() -> list[Any]:
        await sync.apush()
        before = await sync.astates()
        with monkeypatch.context() as patched:
            patched.setattr(control, "_reaches_core", lambda: False)  # call by call, as over HTTP
            patched.setattr(control, "pause", slow)
            with pytest.raises(PushRefused, match="engine 0 holds what it held before: TimeoutError"):
                await sync.apush()
        assert await sync.astates() == before
        assert not await running.llm.is_paused()
        if late:
            await pause("keep")
        await sync.apush()
        assert not await running.llm.is_paused()
        return await asyncio.gather(*(running.request(i, 10) for i in range(4)))

    assert_answers(running.run(scenario()), model)


# An engine that is killed


def test_an_engine_killed_in_the_middle_of_a_push_and_a_new_one_under_a_living_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, the other replica is valid; a new engine gets the base, and the adapter once, in either mode."""
    model = policy()
    options = {"enable_lora": True, "max_lora_rank": 8}
    with (
        engine(model, tmp_path / "base", processes=True, **options) as victim,
        engine(model, tmp_path / "base", **options) as survivor,
    ):
        sync = VllmSync(model, [survivor, victim], bucket_bytes=BUCKET)
        for mode in ("adapter", "merged"):
            assert sync.push(mode=mode).transports == ("local", "shm")
            for llm in (survivor, victim):
                assert_answers(ask(llm, sync.lora_request()), model)
        pid = worker_of(victim)
        train(model, size=0.01)
        with monkeypatch.context() as patched:
            patched.setattr(BucketWriter, "fill", in_the_middle(lambda: kill(pid)))
            with pytest.raises(PushFailed, match=r"engine 1 is dirty: .*engine 0 is valid"):
                sync.push()
        assert_answers(ask(survivor), model)
        train(model, size=0.01)
        with pytest.raises(PushRefused, match="engine 1 has died, start it anew"):
            sync.push()
    with engine(model, tmp_path / "base", **options) as newcomer:
        sync = VllmSync(model, newcomer, bucket_bytes=BUCKET)
        for step, mode in enumerate(["adapter", "merged", "adapter"]):
            train(model, step, 0.01)
            assert sync.push(mode=mode).base_sent == (mode == "adapter"), "a new engine has no base yet"
            assert_answers(ask(newcomer, sync.lora_request()), model)
