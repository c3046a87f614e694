"""An `AsyncLLM` with requests in flight: a user's own pauses, pauses that fail, pushes that are cancelled."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import engines
import models
import pytest
from engines import assert_answers, train
from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from lora_merge import PushRefused, VllmSync
from lora_merge.stream.filler import Filler

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers
Scenario = Callable[[AsyncLLM, Any], Awaitable[None]]


async def request(llm: AsyncLLM, name: str, tokens: int, begun: asyncio.Event | None = None) -> Any:
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=1)
    prompt = {"prompt_token_ids": engines.prompts(1)[0]}
    async for output in llm.generate(prompt, sampling, name):
        last = output
        if begun is not None:
            begun.set()
    return last


async def in_flight(llm: AsyncLLM, name: str) -> asyncio.Task[Any]:
    """A request that has begun, and takes longer than a push."""
    begun = asyncio.Event()
    task = asyncio.create_task(request(llm, name, 100, begun))
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
    with pytest.raises(PushRefused, match=r"engine 0 holds what it held before: TimeoutError: injected"):
        await sync.apush()
    del control.pause  # type: ignore[method-assign]
    assert await sync.astates() == before
    assert not await llm.is_paused()
    await assert_serves(llm, model, "after a pause that failed")
    await sync.apush()
    await sync.aclose()


async def cancelled(llm: AsyncLLM, model: Any) -> None:
    """Once, twice, many times, while a thread fills: when the push has ended, nothing of it runs any more."""
    sync = VllmSync(model, llm, bucket_bytes=1 << 17)
    await sync.apush()
    fill, filling, inside = Filler.fill, threading.Event(), []

    def slow(self: Filler, *args: Any) -> None:
        inside.append(args)
        filling.set()
        time.sleep(0.3)
        fill(self, *args)
        inside.pop()

    for times in (1, 2, 5):
        filling.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Filler, "fill", slow)
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


@pytest.mark.parametrize("scenarios", [(users_pauses, pauses_that_fail, cancelled)])
def test_an_async_engine(scenarios: tuple[Scenario, ...], tmp_path: Path) -> None:
    model = models.with_lora(engines.qwen2, target_modules=engines.LINEARS)
    engines.save_base(model.get_base_model(), tmp_path / "base")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"

    async def run() -> None:
        options = engines.engine_options(model) | {"max_model_len": 256, "worker_extension_cls": "engines.Slow"}
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(str(tmp_path / "base"), **options))
        try:
            for scenario in scenarios:
                await scenario(llm, model)
        finally:
            llm.shutdown()

    asyncio.run(run())
