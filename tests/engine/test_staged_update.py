"""An update that a worker receives in a thread, and what an engine is asked in which order."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lora_merge.engine.control.calls import drive
from lora_merge.engine.payload.spec import ReceivedUpdate, UpdateSpec
from lora_merge.engine.push.replica import Replica
from lora_merge.engine.push.sequence import EngineSequence
from lora_merge.engine.state import State
from lora_merge.engine.worker import commands, staging
from lora_merge.engine.worker.staging import Staging
from tests.engine.test_steps import UPDATE, Engine, replica

CPU = torch.device("cpu")
RECEIVED = ReceivedUpdate(UpdateSpec("", (), 0, (), (), (), {}, {}), [])


def ended(staged: Staging) -> ReceivedUpdate | None:
    end = time.monotonic() + 20
    while (found := staged.result()) is None and time.monotonic() < end:
        time.sleep(0.01)
    return found


def test_it_comes_beside_other_work() -> None:
    come = threading.Event()

    def receive() -> ReceivedUpdate:
        assert come.wait(20)
        return RECEIVED

    staged = Staging(CPU, receive)
    assert staged.result() is None
    come.set()
    assert ended(staged) is RECEIVED
    staged.end(lambda: pytest.fail("nobody waits for a transfer that is over"))


def test_an_error_is_raised_where_it_is_asked_for() -> None:
    def receive() -> ReceivedUpdate:
        raise OSError("the trainer is gone")

    with pytest.raises(RuntimeError, match="could not be staged: OSError: the trainer is gone"):
        ended(Staging(CPU, receive))


def test_it_ends_when_its_trainer_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    left = threading.Event()

    def receive() -> ReceivedUpdate:
        assert left.wait(20)
        raise OSError("left")

    Staging(CPU, receive).end(left.set)
    assert left.is_set()
    monkeypatch.setattr(staging, "_END_S", 0.05)
    stays = threading.Event()
    with pytest.raises(RuntimeError, match="still receives an update of another push"):
        Staging(CPU, lambda: (stays.wait(20), RECEIVED)[1]).end(lambda: None)
    stays.set()


def test_a_worker_that_has_it_waits_for_the_others() -> None:
    """All are asked again until the last one has it."""
    session: Any = SimpleNamespace(staging=Staging(CPU, lambda: RECEIVED), update=None)
    assert ended(session.staging) is RECEIVED
    for _ in range(3):
        assert commands.staged(None, session) == {"staged": True}  # type: ignore[arg-type]
        assert session.update is RECEIVED
    session.update = None
    with pytest.raises(RuntimeError, match="no update is being staged"):
        commands.staged(None, session)  # type: ignore[arg-type]


# ---- what an engine is asked -----------------------------------------------------------------------------------------

END = ["stands", "note_pause", "pause", "reset_prefix_cache", "merge", "label", "name_adapter", "resume", "end"]


class StagingEngine(Engine):
    """An engine whose workers have the update at the third look."""

    looks = 0

    async def rpc(self, op: str, **message: Any) -> list[dict[str, Any]]:
        if op not in ("stage_update", "staged"):
            return await super().rpc(op, **message)
        self.messages.append([])
        answers = await super().rpc(op, **message)
        self.looks += op == "staged"
        return [answer | {"staged": self.looks > 2} for answer in answers]

    async def rest(self) -> None: ...


def push(engine: Engine) -> tuple[Replica, str]:
    """A staged push into one engine, as `Pusher` and `TransferRun` make it; the error of its steps."""
    one, steps, error = replica(engine), EngineSequence("mine", "keep"), ""

    async def go() -> None:
        await steps.pause(one, "merged", brought=State("merged", 1))
        await steps.stage(one, steps.make_call("stage_update"))
        await steps.finish(one, UPDATE, name="v", ends=True, resets=True)

    try:
        drive(go())
    except Exception as raised:
        error = one.error = f"{type(raised).__name__}: {raised}"
    drive(steps.go_on(one))
    return one, error


def test_the_engine_stands_still_from_the_last_look_to_the_merge() -> None:
    engine = StagingEngine()
    _, error = push(engine)
    assert not error
    assert engine.messages == [["stage_update"], *[["staged"]] * 3, END]
    assert not engine.still
    assert not any("still" in told for told in engine.told[:4])  # it may generate meanwhile


@pytest.mark.parametrize("broken", ["stage_update", "staged", "stands", "pause"])
def test_what_fails_before_the_merge_leaves_the_engine_as_it_was(broken: str) -> None:
    engine = StagingEngine(broken)
    one, error = push(engine)
    assert "injected" in error
    assert not one.begun
    assert "abort" not in itertools.chain(*engine.messages)
    assert not engine.still
    assert engine.messages[-1][-1] == "end"


def test_a_prefix_cache_that_cannot_be_reset_changes_nothing() -> None:
    engine = StagingEngine(forgets=False)
    one, error = push(engine)
    assert "could not be reset" in error
    assert not one.begun
    assert "merge" not in itertools.chain(*engine.messages)
    assert not engine.still


def test_a_merge_that_fails_leaves_the_engine_dirty_and_paused() -> None:
    engine = StagingEngine("merge")
    one, error = push(engine)
    assert "injected" in error
    assert one.begun
    assert engine.still
    assert "abort" in itertools.chain(*engine.messages)
