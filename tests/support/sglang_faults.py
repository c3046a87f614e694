"""Faults in the phases of a push into SGLang while requests are in flight, for engines of one and of two schedulers."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import policies
import pytest
from sglang_engines import GREEDY, ado, ask, assert_answers, do, flying, spans

from lora_merge import PushFailed, PushRefused, SglangSync

BUCKET = 1 << 16
"""Small buckets: there is a middle of a push."""
PAUSES = ["keep", "wait", "abort"]
TOKENS = 40


class Phase(NamedTuple):
    """Where a scheduler fails.

    Args:
        merge: who merges: "trainer", "engine", or "pull": schedulers do, from the trainer's memory; or "adapter":
            nobody, in adapter mode.
        fresh: whether it is what a trainer's first push alone does.
        after: how often it works before.
        verify: whether it is of pushes that compare.
        stood: whether generation stands still by then.
        writes: whether weights are neither old nor new then.
        moves: whether the trainer's weights lie elsewhere than at the push before.
    """

    merge: str = "trainer"
    fresh: bool = False
    after: int = 0
    verify: bool = False
    stood: bool = True
    writes: bool = True
    moves: bool = False


PHASES = {
    "hello": Phase(stood=False, writes=False),
    "dry_run": Phase(fresh=True, stood=False, writes=False),
    "check_update": Phase("engine", fresh=True, stood=False, writes=False),
    "export_memory": Phase(fresh=True, stood=False, writes=False),
    "blocked_tensors": Phase("pull", fresh=True, stood=False, writes=False),
    "unmap_source": Phase("pull", stood=False, writes=False, moves=True),
    "connect": Phase(fresh=True, stood=False, writes=False),
    "map_source": Phase("pull", fresh=True, stood=False, writes=False),
    "note_pause": Phase(stood=False, writes=False),
    "requests": Phase(stood=False, writes=False),
    "receive_update": Phase("engine", writes=False),
    "begin_full": Phase(),
    "receive": Phase(),
    "bucket": Phase(after=1),
    "pull": Phase("pull"),
    "flush_cache": Phase(),
    "finish": Phase(),
    "commit": Phase(),
    "merge": Phase("engine"),
    "products": Phase("engine"),
    "checksums": Phase(verify=True),
    "received_checksums": Phase(verify=True),
    "receive+abort": Phase(),
    "receive+disconnect": Phase(),
}
"""("abort" and "disconnect" are what a push that has failed calls.)"""
ADAPTER_PHASES = {
    "unserved_modules": Phase("adapter", stood=False, writes=False),
    "receive_adapter": Phase("adapter"),
    "load adapter": Phase("adapter"),
}
"""Of pushes in adapter mode. (When SGLang fails to load it, the one before is gone already.)"""
PAUSED = {"requests": "wait"} | dict.fromkeys(
    ["blocked_tensors", "unmap_source", "receive+abort", "receive+disconnect"], "keep"
)
"""Phases with one of the pauses alone. ("requests" is asked to wait for them; to the others it does not matter.)"""
FLIGHTS = [(where, pause) for where in PHASES for pause in PAUSES if PAUSED.get(where, pause) == pause]
"""Phases, and what becomes of requests in flight."""
WIDE_FLIGHTS = [
    (where, pause) for where, pause in FLIGHTS if where not in ("export_memory", "blocked_tensors", "unmap_source")
]
"""Those in which several schedulers are more than one."""


def fail_in_flight(started: Any, model: Any, where: str, rank: int, pause: str) -> None:
    """A scheduler fails in a phase of a push with requests in flight. Where nothing had been written they, and one that
    comes after, are answered by the old weights. Else all of them are answered when a push of another trainer has
    healed the engine, whatever its `pause` is; but "abort" is SGLang's own way of ending all that have come by then
    (0.5.23: all that it has begun).

    Args:
        model: that the engine serves; it is trained here.
        where: of `PHASES`.
        rank: which scheduler.
        pause: of the push that fails; that of the one that heals is the next of `PAUSES`.
    """
    phase, process = (PHASES | ADAPTER_PHASES)[where], do(started, "process")
    mode = "adapter" if phase.merge == "adapter" else "merged"
    settings = {"mode": mode, "merge": "engine" if phase.merge == "engine" else "trainer"}
    if phase.merge == "pull":
        model.share_memory()
    sync = SglangSync(model, started, bucket_bytes=BUCKET, pause=pause, **settings)
    sync.push()
    if phase.merge == "pull" and not phase.fresh:
        sync.push()  # by now it is known where the weights lie
    held, old = sync.states(), copy.deepcopy(model)
    policies.train(model, size=0.2)
    if phase.moves:
        assert do(started, "pulls") == 1
        for parameter in model.parameters():
            parameter.data = parameter.detach().clone()
    if phase.fresh and phase.merge != "pull":
        sync.close()
        sync = SglangSync(model, started, bucket_bytes=BUCKET * 2, pause=pause, **settings)
    heal = PAUSES[(PAUSES.index(pause) + 1) % 3]
    healing = SglangSync(model, started, bucket_bytes=BUCKET, pause=heal, mode=mode)
    named = {"lora_path": sync.lora_path()}

    async def scenario() -> tuple[list[Any], Any]:
        tasks = await flying(started, TOKENS, **named)
        await ado(started, "fail", where, [rank], phase.after)
        with pytest.raises(PushFailed if phase.writes else PushRefused, match="injected"):
            await sync.apush(verify=phase.verify)
        await ado(started, "mend")
        assert any(task.done() for task in tasks) == (pause != "keep" and phase.stood)
        late = asyncio.ensure_future(said(started, **named))
        if phase.writes:
            await asyncio.sleep(0.3)
            assert not late.done(), "a dirty engine answers nothing"
        else:
            await ado(started, "slow", 0)
            await asyncio.gather(late, *tasks)
            assert await sync.astates() == held
        await (sync if phase.moves else healing).apush()
        await ado(started, "slow", 0)
        return await asyncio.gather(*tasks), await asyncio.gather(late, return_exceptions=True)

    outputs, late = started.loop.run_until_complete(asyncio.wait_for(scenario(), 120))
    if phase.writes and heal == "abort":
        if type(late[0]).__name__ != "RequestAbortedError":  # SGLang 0.5.23 keeps what it had not begun
            assert_answers(late, model, policies.prompts()[3:])
    else:
        assert_answers(late, model if phase.writes else old, policies.prompts()[3:])
    for prompt, output in zip(policies.prompts(), outputs, strict=False):
        if pause == "abort" and phase.stood:
            assert output["meta_info"]["finish_reason"]["type"] == "abort"
            continue
        assert len(output["output_ids"]) == TOKENS
        mine = spans(output, prompt, old, model)
        assert mine == TOKENS if pause == "wait" or not phase.writes else mine < TOKENS
    assert_answers(ask(started, **named), model)
    assert do(started, "process") == process
    assert not phase.moves or do(started, "pulls") == 0
    sync.close()
    healing.close()


def said(started: Any, **more: Any) -> Any:
    """What comes of one more request, to be awaited."""
    prompt = policies.prompts()[3]
    return started.async_generate(input_ids=prompt, sampling_params=GREEDY, return_logprob=True, **more)


CALLS = {
    "pause": ["pause_generation"],
    "label": ["update_weight_version", "_update_weight_version_if_provided"],
    "resume": ["continue_generation"],
}
"""Of SGLang's own, by which a push pauses an engine, names its weights and lets it go on."""


@contextmanager
def failing_call(started: Any, where: str, late: bool) -> Iterator[None]:
    """Meanwhile one of `CALLS` raises: before it has done anything, or `late`, when it has taken effect."""
    manager = started.tokenizer_manager
    name = next(name for name in CALLS[where] if hasattr(manager, name))
    works = getattr(manager, name)

    def called(*args: Any) -> None:
        if late:
            works(*args)
        raise MemoryError(f"injected into {where}")

    async def awaited(*args: Any) -> None:
        if late:
            await works(*args)
        raise MemoryError(f"injected into {where}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, name, awaited if inspect.iscoroutinefunction(works) else called)
        yield


def fail_in_a_call(started: Any, model: Any, where: str, late: bool, pause: str) -> None:
    """A call of SGLang's own fails with requests in flight: one that pauses, before anything is written; the weight
    version, after it; going on, with all that has come. The next push finds the engine, and all requests go on.

    Args:
        model, pause: as of `fail_in_flight`.
        where, late: as of `failing_call`.
    """
    sync = SglangSync(model, started, bucket_bytes=BUCKET, pause=pause)
    healing = SglangSync(model, started, bucket_bytes=BUCKET)
    sync.push()
    held, old, process = sync.states(), copy.deepcopy(model), do(started, "process")
    policies.train(model, size=0.2)
    stands = where == "label" or (where == "resume" and not late)
    why = r"holds merged@\d+, but going on with it failed: .*injected" if where == "resume" else "injected"

    async def scenario() -> tuple[list[Any], Any]:
        tasks = await flying(started, TOKENS)
        with (
            failing_call(started, where, late),
            pytest.raises(PushRefused if where == "pause" else PushFailed, match=why),
        ):
            await sync.apush()
        await ado(started, "slow", 0)
        other, (state,) = asyncio.ensure_future(said(started)), await sync.astates()
        if stands:
            await asyncio.sleep(0.3)
            assert not other.done(), "it stands still"
        else:
            await asyncio.gather(other, *tasks)
        assert [state] == held if where == "pause" else state.kind == ("dirty" if where == "label" else "merged")
        await healing.apush()
        assert not started.tokenizer_manager.is_pause
        return await asyncio.gather(*tasks), await other

    outputs, other = started.loop.run_until_complete(asyncio.wait_for(scenario(), 120))
    assert_answers([other], old if where == "pause" else model, policies.prompts()[3:])
    for prompt, output in zip(policies.prompts(), outputs, strict=False):
        if pause == "abort" and (late or where != "pause"):
            assert output["meta_info"]["finish_reason"]["type"] == "abort"
            continue
        mine, count = spans(output, prompt, old, model), len(output["output_ids"])
        assert count == TOKENS
        assert mine == TOKENS if pause == "wait" or where == "pause" else mine < TOKENS
    assert_answers(ask(started), model)
    assert do(started, "process") == process
    sync.close()
    healing.close()


def fail_at_the_end(started: Any, model: Any, rank: int, pause: str) -> None:
    """A scheduler fails when all has come, and requests go on already: the error says so, and the next push is as any
    other.

    Args:
        model, rank, pause: as of `fail_in_flight`.
    """
    sync = SglangSync(model, started, bucket_bytes=BUCKET, pause=pause)
    sync.push()
    old = copy.deepcopy(model)
    policies.train(model, size=0.2)

    async def scenario() -> list[Any]:
        tasks = await flying(started, TOKENS)
        await ado(started, "fail", "end", [rank])
        with pytest.raises(PushFailed, match=r"engine 0 holds merged@\d+, but going on with it failed: .*injected"):
            await sync.apush()
        await ado(started, "mend")
        await ado(started, "slow", 0)
        return await asyncio.gather(*tasks)

    outputs = started.loop.run_until_complete(asyncio.wait_for(scenario(), 120))
    for prompt, output in zip(policies.prompts(), outputs, strict=False):
        mine, count = spans(output, prompt, old, model), len(output["output_ids"])
        assert mine < count == TOKENS if pause == "keep" else mine == count
    assert_answers(ask(started), model)
    policies.train(model)
    sync.push()
    assert_answers(ask(started), model)
    sync.close()
