"""An `AsyncLLM` with requests in flight: a user's own pauses, pauses that fail, pushes that are cancelled."""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
from engines import assert_answers, train
from vllm import AsyncEngineArgs, SamplingParams
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from lora_merge import PushFailed, PushRefused, VllmSync
from lora_merge.engine import lease as claim
from lora_merge.engine.payload.adapter import AdapterSource
from lora_merge.engine.push import heartbeat, introduction
from lora_merge.engine.push.sequence import EngineSequence
from lora_merge.engine.transport.sender import Sender
from lora_merge.stream.bucket_writer import BucketWriter

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers
Scenario = Callable[[AsyncLLM, Any], Awaitable[None]]


async def request(llm: AsyncLLM, name: str, tokens: int, begun: asyncio.Event | None = None, lora: Any = None) -> Any:
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=1)
    prompt = {"prompt_token_ids": engines.prompts(1)[0]}
    async for output in llm.generate(prompt, sampling, name, lora_request=lora):
        last = output
        if begun is not None:
            begun.set()
    return last


async def in_flight(llm: AsyncLLM, name: str, lora: Any = None) -> asyncio.Task[Any]:
    """A request that has begun, and takes longer than a push."""
    begun = asyncio.Event()
    task = asyncio.create_task(request(llm, name, 100, begun, lora))
    await asyncio.wait([task, asyncio.ensure_future(begun.wait())], return_when=asyncio.FIRST_COMPLETED)
    return task


async def assert_serves(llm: AsyncLLM, model: Any, name: str) -> None:
    assert_answers([await request(llm, name, 10)], model, engines.prompts(1))


async def users_pauses(llm: AsyncLLM, model: Any) -> None:
    """What a user's "keep" holds is in the cache, whatever the push would have done: the engine was dirty each time."""
    for pause in ("wait", "abort", "keep"):
        sync = VllmSync(model, llm, pause=pause, bucket_bytes=1 << 17)
        await sync.apush()
        running = await in_flight(llm, f"kept by the user, {pause}")
        await llm.pause_generation(mode="keep", clear_cache=False)
        train(model)
        assert (await sync.apush()).mode == "merged"
        assert await llm.is_paused(), "the user paused and did not ask to go on"
        assert (await sync.astates())[0].kind == "merged"
        await llm.resume_generation()
        assert len((await running).outputs[0].token_ids) == 100
        await assert_serves(llm, model, f"after {pause}")
        await sync.aclose()


async def pauses_that_fail(llm: AsyncLLM, model: Any) -> None:
    """Not a byte has moved: the weights are as valid as before, and the engine goes on."""
    sync = VllmSync(model, llm, bucket_bytes=1 << 17)
    await sync.apush()
    before = await sync.astates()
    control = sync._trainer.controls[0]
    works = control.pause

    async def late(mode: str) -> None:
        await works(mode)
        raise TimeoutError("injected")

    control.pause = late  # type: ignore[method-assign]
    control._reaches_core = lambda: False  # type: ignore[attr-defined]  # call by call, as over HTTP
    with pytest.raises(PushRefused, match=r"engine 0 holds what it held before: TimeoutError: injected"):
        await sync.apush()
    del control.pause, control._reaches_core  # type: ignore[attr-defined,method-assign]
    assert await sync.astates() == before
    assert not await llm.is_paused()
    await assert_serves(llm, model, "after a pause that failed")
    await sync.apush()
    await sync.aclose()


async def cancelled(llm: AsyncLLM, model: Any) -> None:
    """Once, twice, many times, while a thread fills: when the push has ended, nothing of it runs any more."""
    sync = VllmSync(model, llm, bucket_bytes=1 << 17)
    await sync.apush()
    fill, filling, inside = BucketWriter.fill, threading.Event(), []

    def slow(self: BucketWriter, *args: Any) -> None:
        inside.append(args)
        filling.set()
        time.sleep(0.3)
        fill(self, *args)
        inside.pop()

    for times in (1, 2, 5):
        filling.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BucketWriter, "fill", slow)
            push = asyncio.ensure_future(sync.apush())
            while not filling.is_set():
                await asyncio.sleep(0.01)
            for _ in range(times):
                push.cancel()
                await asyncio.sleep(0.02)
            with pytest.raises(asyncio.CancelledError):
                await push
            assert not inside, "a thread fills on"
        assert (await sync.astates())[0].kind == "dirty"
        train(model)
        await sync.apush(verify=True)
        await assert_serves(llm, model, f"after {times} cancellations")
    await sync.aclose()


@contextmanager
def failing(cls: type, at: int) -> Iterator[None]:
    """`fill` of a source raises at a bucket."""
    fill = cls.fill  # type: ignore[attr-defined]

    def broken(self: Any, index: int, *args: Any) -> None:
        if index == at:
            raise MemoryError("injected")
        fill(self, index, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, "fill", broken)
        with pytest.raises(PushFailed, match="injected"):
            yield


async def healed_in_the_other_mode(llm: AsyncLLM, model: Any) -> None:
    """Requests that stand still since a push that failed began with an adapter, or without one, that the next push
    leaves no weights for: they end, and the engine lives."""
    sync = VllmSync(model, llm, bucket_bytes=1 << 17)
    for mode, other, source in (("adapter", "merged", AdapterSource), ("merged", "adapter", BucketWriter)):
        await sync.apush(mode=mode)
        lora = sync.lora_request() if mode == "adapter" else None
        running = await in_flight(llm, f"begun in mode {mode}", lora)
        train(model, 3)
        with failing(source, 0):
            await sync.apush(mode=mode)
        assert (await sync.astates())[0].kind == "dirty"
        await sync.apush(mode=other)
        assert (await running).outputs[0].finish_reason == "abort"
        lora = sync.lora_request() if other == "adapter" else None
        assert_answers([await request(llm, f"after {other}", 10, lora=lora)], model, engines.prompts(1))
    await sync.apush(mode="merged")
    await sync.aclose()


async def healed_by_one_who_waits(llm: AsyncLLM, model: Any) -> None:
    """Nothing runs to its end on weights that are neither old nor new."""
    sync = VllmSync(model, llm, pause="keep", bucket_bytes=1 << 17)
    await sync.apush()
    running = await in_flight(llm, "stands still")
    train(model, 4)
    with failing(BucketWriter, 4):
        await sync.apush()
    other = VllmSync(model, llm, pause="wait", bucket_bytes=1 << 17)
    await other.apush()
    output = (await running).outputs[0]
    versions = getattr(output, "weight_versions", None)
    if versions is not None:
        states = await other.astates()
        assert [span.version for span in versions][-1] == str(states[0])
    # From the push on each token is the new policy's.
    errors = engines.log_prob_errors([await running], model, engines.prompts(1))
    assert errors[-20:].max() < 1e-4
    assert len(output.token_ids) == 100
    await sync.aclose()
    await other.aclose()


async def cancelled_before_the_first_byte(llm: AsyncLLM, model: Any) -> None:
    """The engine holds what it held, and goes on; so does one that has all of an update already."""
    sync = VllmSync(model, llm, pause="wait", bucket_bytes=1 << 17)
    await sync.apush()
    await llm.collective_rpc("slow", args=(True,))
    running = await in_flight(llm, "is waited for")
    before = (await sync.astates())[0]
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(sync.apush(), 0.3)
    assert (await sync.astates())[0] == before
    assert not await llm.is_paused()
    await llm.collective_rpc("slow", args=(False,))
    await running
    await assert_serves(llm, model, "after a push that was cancelled in its pause")
    await sync.aclose()

    sync = VllmSync(model, llm, merge="engine", bucket_bytes=1 << 17)
    await sync.apush()
    before, serve = (await sync.astates())[0], Sender.serve

    def too_late(self: Sender, *args: Any) -> None:
        serve(self, *args)
        time.sleep(0.3)  # workers have all of it meanwhile
        raise MemoryError("injected")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sender, "serve", too_late)
        with pytest.raises(PushRefused, match="holds what it held before"):
            await sync.apush()
    assert (await sync.astates())[0] == before
    output = (await request(llm, "its name is the old one", 5)).outputs[0]
    for span in getattr(output, "weight_versions", None) or ():
        assert span.version == str(before)
    await sync.aclose()


async def resumed_in_the_middle(llm: AsyncLLM, model: Any) -> None:
    """By the rollout's own controller: what it answers then is no policy's. The push says so, and the engine stands."""
    settle, names = EngineSequence.settle, itertools.count()

    async def meddled(self: EngineSequence, *args: Any, **options: Any) -> None:
        await llm.resume_generation()
        await request(llm, f"in the middle, {next(names)}", 3)
        await settle(self, *args, **options)

    for merge in ("trainer", "engine"):
        sync = VllmSync(model, llm, merge=merge, bucket_bytes=1 << 17)
        await sync.apush()
        train(model)
        with torch.no_grad():  # so that the base goes again
            model.base_model.model.model.norm.weight.mul_(1.01)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EngineSequence, "settle", meddled)
            with pytest.raises(PushFailed, match=r"engine 0 is dirty: .*somebody has resumed it"):
                await sync.apush()
        assert (await sync.astates())[0].kind == "dirty"
        assert await llm.is_paused()
        await sync.apush()
        assert not await llm.is_paused()
        await assert_serves(llm, model, f"after a push by the {merge}")
        await sync.aclose()


async def a_users_pause_that_drains(llm: AsyncLLM, model: Any) -> None:
    """Its requests end on the weights that they began with, and it ends when they have; whoever is asked."""
    for where in ("in the core", "by its calls"):
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        control: Any = sync._trainer.controls[0]
        if where == "by its calls":
            control._reaches_core = lambda: False
        await sync.apush()
        old = copy.deepcopy(model)
        await llm.collective_rpc("slow", args=(True,))
        running = await in_flight(llm, f"drains, {where}")
        pausing = asyncio.create_task(llm.pause_generation(mode="wait", clear_cache=False))
        while not await llm.is_paused():
            await asyncio.sleep(0.01)
        train(model, size=-0.05)
        pushing = asyncio.create_task(sync.apush())
        await asyncio.sleep(0.5)
        assert not pausing.done(), "it returns too early"
        assert not pushing.done()
        await llm.collective_rpc("slow", args=(False,))
        assert (await pushing).mode == "merged"
        await asyncio.wait_for(pausing, 5)
        assert engines.log_prob_errors([await running], old, engines.prompts(1)).max() < 1e-4
        assert await llm.is_paused(), "the user paused and did not ask to go on"
        await llm.resume_generation()
        await assert_serves(llm, model, f"after a pause that drained, {where}")
        await sync.aclose()


async def who_waits_on_another_host(llm: AsyncLLM, model: Any) -> None:
    """It keeps its claim while it lives. One of whom nothing is heard loses it, which does the engine no harm."""
    other = copy.deepcopy(model)
    train(other, 5, 0.02)
    first, second = (VllmSync(m, llm, pause=p, bucket_bytes=1 << 17) for m, p in ((model, "wait"), (other, "keep")))
    await first.apush()
    await llm.collective_rpc("silent", args=(1.0,))
    for beat_s in (0.2, 1000.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(heartbeat, "BEAT_S", beat_s)
            for module in (introduction, claim):
                patch.setattr(module, "host_id", lambda: "elsewhere/1/2/3")
            await llm.collective_rpc("slow", args=(True,))
            running = await in_flight(llm, f"is waited for, {beat_s}")
            train(model, size=-0.05)
            pushing = asyncio.create_task(first.apush())
            await asyncio.sleep(2.0)
            assert not pushing.done()
            if beat_s < 1:
                with pytest.raises(PushRefused, match="in the middle of another trainer's push"):
                    await second.apush()
                await llm.collective_rpc("slow", args=(False,))
                await pushing
            else:
                await llm.collective_rpc("slow", args=(False,))
                await second.apush()
                with pytest.raises(PushRefused, match=r"engine 0 was not changed by this push: .*not in the middle of"):
                    await pushing
            await running
        assert not await llm.is_paused()
        await assert_serves(llm, model if beat_s < 1 else other, f"after {beat_s}")
    await llm.collective_rpc("silent", args=(60.0,))
    await first.aclose()
    await second.aclose()


async def streaming_sessions(llm: AsyncLLM, model: Any) -> None:
    """One that waits for more of its input keeps its blocks whatever a push does: the push is refused by its name
    before a byte is written, or ends it."""
    sync = VllmSync(model, llm, bucket_bytes=1 << 17)
    await sync.apush()
    prompt, answered, more = engines.prompts(1)[0], asyncio.Event(), asyncio.Event()

    async def inputs() -> AsyncGenerator[StreamingInput, None]:
        yield StreamingInput({"prompt_token_ids": prompt})  # type: ignore[typeddict-item]
        await more.wait()
        yield StreamingInput({"prompt_token_ids": prompt})  # type: ignore[typeddict-item]

    async def session() -> str | None:
        tokens, reason = 0, None
        deltas = RequestOutputKind.DELTA
        sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False, output_kind=deltas)
        async for output in llm.generate(inputs(), sampling, "a session"):
            tokens, reason = tokens + len(output.outputs[0].token_ids), output.outputs[0].finish_reason
            if tokens >= 3:
                answered.set()
            if reason == "abort":  # vLLM itself would wait for the end of its input
                break
        return reason

    running = asyncio.create_task(session())
    await answered.wait()
    before = await sync.astates()
    for pause in ("keep", "wait"):
        train(model, 5)
        other = VllmSync(model, llm, pause=pause, bucket_bytes=1 << 17)
        with pytest.raises(
            PushRefused, match=r"streaming-input sessions.*\(a session.*pause='abort'.*Nothing was sent"
        ):
            await other.apush()
        await other.aclose()
        assert await sync.astates() == before
        assert not await llm.is_paused()
    keeps = VllmSync(model, llm, cache="keep", bucket_bytes=1 << 17)
    with pytest.raises(PushRefused, match=r"sessions of streamed input \(a session.*cache='reset'.*Nothing was sent"):
        await keeps.apush()
    await keeps.aclose()
    assert await sync.astates() == before
    aborts = VllmSync(model, llm, pause="abort", bucket_bytes=1 << 17)
    await aborts.apush()
    assert await running == "abort"
    await assert_serves(llm, model, "after a session")
    await aborts.aclose()
    await sync.aclose()


@pytest.mark.parametrize(
    "scenarios",
    [
        (
            streaming_sessions,
            users_pauses,
            resumed_in_the_middle,
            a_users_pause_that_drains,
            who_waits_on_another_host,
            pauses_that_fail,
            cancelled,
            healed_in_the_other_mode,
            healed_by_one_who_waits,
            cancelled_before_the_first_byte,
        )
    ],
)
def test_an_async_engine(scenarios: tuple[Scenario, ...], tmp_path: Path) -> None:
    model = models.with_lora(engines.qwen2, target_modules=engines.LINEARS)
    engines.save_base(model.get_base_model(), tmp_path / "base")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"

    async def run() -> None:
        options = engines.engine_options(model) | {"max_model_len": 256, "worker_extension_cls": "engines.Slow"}
        options |= {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(str(tmp_path / "base"), **options))
        try:
            for scenario in scenarios:
                await scenario(llm, model)
        finally:
            llm.shutdown()

    asyncio.run(run())
