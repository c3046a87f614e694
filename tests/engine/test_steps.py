"""What a push asks of one engine: in how many messages, and what an engine is left as when any call of them fails."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from workers import worker

from lora_merge import PushFailed, PushRefused
from lora_merge.engine.adapter_versions import CONSTANT_PATH
from lora_merge.engine.control.base import Call, Control, Moved, NotOurs, WorkerFailed
from lora_merge.engine.control.calls import EngineGone, drive
from lora_merge.engine.payload.base import LocalOp
from lora_merge.engine.push.planner import Transfer
from lora_merge.engine.push.replica import Replica, failure
from lora_merge.engine.push.sequence import EngineSequence
from lora_merge.engine.state import State
from lora_merge.engine.vllm.control import RayControl

NEW = State("merged", 7, trainer="mine")
READ = LocalOp("read", {}, writes=True)
DONE = Transfer(NEW, READ, [])
UPDATE = Transfer(NEW, LocalOp("read", {}, writes=True, merges=True), [])
STEADY = ["stands", "note_pause", "pause", "read", "reset_prefix_cache", "label", "name_adapter", "commit", "resume"]
PULLED = [*STEADY, "end"]
WRITTEN = [["stands", "note_pause", "pause", "begin_full"], ["reset_prefix_cache", "label", "name_adapter"]]
MERGED = ["merge", "label", "name_adapter", "resume", "end"]


_NOTED = {"paused", "stands", "pause", "resume", "label", "name_adapter"}
_NOTED |= {"reset_prefix_cache", "will_keep", "keep_cache"}


class Engine(Control):
    """A handle that notes what it is asked, message by message.

    Args:
        broken: the call that raises.
        late: whether it raises after it has taken effect.
        paused: whether its user has paused it.
        forgets: whether it can reset its prefix cache.
        dies: whether the engine is gone when that call is made: nobody hears what was made before, in that message.
    """

    def __init__(
        self, broken: str = "", *, late: bool = False, paused: bool = False, forgets: bool = True, dies: bool = False
    ) -> None:
        super().__init__(object())
        self.broken, self.late, self.forgets, self.dies = broken, late, forgets, dies
        self.still, self.by_user = paused, paused
        self.messages: list[list[str]] = []
        self.told: list[dict[str, Any]] = []

    refuses: type[WorkerFailed] = WorkerFailed

    async def chain(self, calls: Sequence[Call], returned: list[Any] | None = None) -> list[Any]:
        self.messages.append([])
        heard = list[Any]() if self.dies else returned
        return await super().chain(calls, heard)

    def __getattribute__(self, name: str) -> Any:
        asked = object.__getattribute__(self, name)
        if name not in _NOTED:
            return asked
        return lambda *arguments: self._made(name, asked(*arguments))

    async def _made(self, name: str, call: Any) -> Any:
        self.messages[-1].append(name)
        if name != self.broken:
            return await call
        if self.late:
            await call
        call.close()
        raise EngineGone("dead") if self.dies else TimeoutError("injected")

    async def rpc(self, op: str, **message: Any) -> list[dict[str, Any]]:
        self.messages = self.messages or [[]]
        self.messages[-1].append(op)
        self.told.append(message)
        if op == self.broken:
            raise EngineGone("dead") if self.dies else self.refuses("injected")
        return [{"rank": 0, "state": message.get("state"), "elements": [1, 1], "reloaded": 0}]

    async def paused(self) -> bool:
        return self.still

    async def stands(self) -> bool:
        return self.still

    async def pause(self, mode: str) -> None:
        self.still = True

    async def resume(self) -> None:
        self.still = False

    async def label(self, version: str) -> None: ...

    async def name_adapter(self, there: bool) -> None: ...

    async def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        return self.forgets

    sessions = ""

    async def will_keep(self) -> str:
        return self.sessions

    async def keep_cache(self) -> bool:
        return self.forgets


class Actor(Engine):
    """One that does a call after the other, like a Ray actor around an `LLM`: it always stands still."""

    keeps = False  # type: ignore[assignment]


def replica(engine: Engine, **more: Any) -> Replica:
    return Replica(0, engine, [worker(**{"state": State("merged", 6).to_json(), **more})])


def push(one: Replica, steps: EngineSequence, *, written: bool = False, merges: bool = False, ends: bool = True) -> str:
    """A push into one engine, as `Pusher` makes it; the error of its steps."""

    async def go() -> None:
        await steps.pause(one, "merged", brought=State("merged", 1))
        if written:
            await steps.make(one, [steps.make_call("begin_full")], begins=True)
            await steps.settle(one, DONE, None, name="v", begins=True, commits=False, ends=False)
            await steps.finish(one, DONE, name="v", ends=ends)
        elif merges:
            told = steps.make_call("receive_update")
            await steps.settle(one, UPDATE, told, name="v", begins=False, commits=False, ends=False)
            await steps.finish(one, UPDATE, name="v", ends=ends)
        else:
            await steps.settle(one, DONE, steps.make_call("read"), name="v", begins=True, commits=True, ends=ends)

    try:
        drive(go())
    except Exception as error:
        one.error = f"{type(error).__name__}: {error}"
    try:
        drive(steps.go_on(one))
    except Exception as error:
        one.error = one.error or f"{type(error).__name__}: {error}"
    return one.error


def test_a_steady_push_is_one_message_to_an_engine_that_reads() -> None:
    one = replica(engine := Engine())
    assert not push(one, EngineSequence("mine", "keep"))
    assert engine.messages == [PULLED]
    assert one.resumed
    assert one.state == NEW
    assert not engine.still


def test_a_push_that_is_written_or_merged_there_takes_one_to_begin_and_one_to_end() -> None:
    one = replica(engine := Engine())
    assert not push(one, EngineSequence("mine", "keep"), written=True)
    assert engine.messages == [*WRITTEN, ["commit", "resume", "end"]]
    one = replica(engine := Engine())
    assert not push(one, EngineSequence("mine", "keep"), merges=True)
    assert engine.messages == [["stands", "note_pause", "pause", "receive_update", "reset_prefix_cache"], MERGED]


@pytest.mark.parametrize(
    ("held", "more", "keeps"),
    [
        (State("merged", 6), {}, True),
        (State(), {}, True),
        (State("dirty", 6, reason="broken"), {}, False),
        (State("merged", 6), {"waking": True}, False),
    ],
    ids=["merged", "nothing", "dirty", "slept"],
)
@pytest.mark.parametrize("merges", [False, True])
def test_a_cache_that_is_kept(held: State, more: dict[str, Any], keeps: bool, merges: bool) -> None:
    """In the place of the reset. What dirty weights have computed is not kept, and sleep takes the cache along."""
    one = replica(engine := Engine(), state=held.to_json(), unkept="", **more)
    steps = EngineSequence("mine", "keep", "keep")
    steps.check(one)
    assert not push(one, steps, merges=merges)
    asked = [call for message in engine.messages for call in message]
    assert {"will_keep", "keep_cache"}.intersection(asked) == ({"will_keep", "keep_cache"} if keeps else set())
    assert ("reset_prefix_cache" in asked) != keeps
    assert asked.index("keep_cache" if keeps else "reset_prefix_cache") < asked.index("label") < asked.index("resume")


def test_what_cannot_be_kept_is_refused() -> None:
    one = replica(engine := Engine(), unkept="")
    engine.sessions = "a, b"
    assert "sessions of streamed input (a, b)" in push(one, EngineSequence("mine", "keep", "keep"))
    assert not one.begun
    one = replica(engine := Engine(forgets=False), unkept="")
    assert "the prefix cache could not be reset" in push(one, EngineSequence("mine", "keep", "keep"))
    one = replica(Engine())  # of a lora_merge that does not say
    with pytest.raises(PushRefused, match=r"engine 0 runs a lora_merge that .*Push with cache='reset'"):
        EngineSequence("mine", "keep", "keep").check(one)
    EngineSequence("mine", "keep").check(one)


@pytest.mark.parametrize("pause", ["wait", "abort"])
def test_requests_that_end_are_waited_for_in_a_message_of_its_own(pause: str) -> None:
    one = replica(engine := Engine())
    assert not push(one, EngineSequence("mine", pause))
    assert engine.messages == [STEADY[:3], [*STEADY[3:], "end"]]


def test_what_does_not_go_on_by_itself_waits_for_the_others() -> None:
    one = replica(engine := Engine())
    assert not push(one, EngineSequence("mine", "keep"), ends=False)
    assert engine.messages == [STEADY[:-1], ["renew_lease", "resume", "end"]]


@pytest.mark.parametrize("shape", [{}, {"written": True}, {"merges": True}])
@pytest.mark.parametrize("pause", ["keep", "wait", "abort"])
def test_a_users_own_pause_stays(shape: dict[str, bool], pause: str) -> None:
    one = replica(engine := Engine(paused=True))
    assert not push(one, EngineSequence("mine", pause), **shape)
    asked = [name for message in engine.messages for name in message]
    assert not {"note_pause", "pause", "resume"}.intersection(asked)
    assert engine.still
    assert asked[-1] == "end"


@pytest.mark.parametrize("pause", ["keep", "wait", "abort"])
def test_requests_that_a_user_has_kept_do_not_go_on_in_another_mode(pause: str) -> None:
    """They would, on the bare base, when that user resumes."""
    one = replica(engine := Engine(paused=True))
    with pytest.raises(PushRefused, match="mode 'merged' and was paused by somebody else"):
        drive(EngineSequence("mine", pause).pause(one, "adapter", brought=State("adapter", 1)))
    assert not one.begun
    assert engine.messages == [["stands"]]
    assert engine.still
    slept = replica(Engine(paused=True))
    slept.slept = 1
    drive(
        EngineSequence("mine", pause).pause(slept, "adapter", brought=State("adapter", 1))
    )  # vLLM says so of an engine that a push woke, too
    works_in_calls = replica(Actor(paused=True))
    drive(EngineSequence("mine", pause).pause(works_in_calls, "adapter", brought=State("adapter", 1)))


@pytest.mark.parametrize("shape", [{}, {"written": True}, {"merges": True}])
def test_an_engine_that_stands_since_a_broken_push_goes_on(shape: dict[str, bool]) -> None:
    one = replica(engine := Engine(paused=True), paused=True, state=State("dirty", 6, reason="x").to_json())
    assert not push(one, EngineSequence("mine", "keep"), **shape)
    assert "stands" not in engine.messages[0]
    assert not engine.still


@pytest.mark.parametrize(
    ("instead", "held", "began", "allowed"),
    [
        (None, "base", "base", []),
        (None, "merged", "merged", None),
        ("by versions alone", "base", "base", None),
        ("by versions alone", "adapter", "adapter", []),
        ("by versions alone", "dirty", "adapter", []),
    ],
)
def test_an_engine_that_has_no_adapter_is_told_of_none(
    instead: str | None, held: str, began: str, allowed: list[str] | None
) -> None:
    """A merged push asked a server for its list of adapters after the commit: one with --api-key answered 401, and the
    engine stayed paused."""
    engine = Engine()
    engine.versions, engine.adapters = "", instead
    state = State(held, 6, reason="x" if held == "dirty" else "").to_json()
    one = replica(engine, lora={"max_rank": 8, "dtype": "float32"}, served=began, state=state)
    drive(EngineSequence("mine", "keep").pause(one, "merged", brought=NEW))
    assert one.allowed == allowed


@pytest.mark.parametrize(
    ("held", "more", "paused", "left"),
    [
        ("base", {}, False, []),
        ("merged", {}, False, []),
        ("merged", {}, True, []),
        ("adapter", {"paused": True}, False, [CONSTANT_PATH]),
    ],
    ids=["base", "merged", "merged, its user's pause", "adapter, since a broken push"],
)
def test_an_adapter_that_has_not_come_is_not_asked_for(
    held: str, more: dict[str, Any], paused: bool, left: list[str]
) -> None:
    """Requests that came for it while the engine was paused end, and it takes those for what it holds."""
    engine, doors = Engine("pause", paused=paused), list[tuple[list[str], bool, list[str]]]()

    async def allow_adapters(paths: list[str], end: bool, coming: Sequence[str] = ()) -> list[str]:
        assert engine.still or not end
        assert {"renew_lease", "note_pause"} & {*engine.messages[-1]}, "a push that is over lets nothing in or out"
        doors.append((paths, end, [*coming]))
        return []

    engine.versions, engine.allow_adapters = "", allow_adapters  # type: ignore[method-assign]
    lora = {"max_rank": 8, "dtype": "float32"}
    one = replica(engine, lora=lora, served=held, state=State(held, 6).to_json(), **more)
    engine.late = True
    steps = EngineSequence("mine", "keep")

    async def go() -> None:
        await steps.pause(one, "adapter", brought=State("adapter", 7))
        await steps.make(one, [])

    with pytest.raises(PushRefused if paused else TimeoutError) as failed:
        drive(go())
    one.error = str(failed.value)
    assert doors.pop() == ([], False, [CONSTANT_PATH])
    drive(steps.go_on(one))
    assert doors == [(left, True, [])]
    assert engine.still == paused


FAILING = {
    # call: whether the engine counts as begun, and so is called off, and whether it holds what came
    "stands": (False, False),
    "note_pause": (False, False),
    "pause": (False, False),
    "read": (True, False),
    "reset_prefix_cache": (True, False),
    "label": (True, False),
    "name_adapter": (True, False),
    "commit": (True, False),
    "resume": (True, True),
    "end": (True, True),
}


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("ends", [True, False], ids=["in one message", "in its own"])
@pytest.mark.parametrize("broken", FAILING)
def test_each_call_fails(broken: str, ends: bool, late: bool) -> None:
    """Nothing of an engine that could not be paused has changed: it is not called off, and resumed if it was paused."""
    begun, came = FAILING[broken]
    one = replica(engine := Engine(broken, late=late))
    assert "injected" in push(one, EngineSequence("mine", "keep"), ends=ends)
    asked = [name for message in engine.messages for name in message]
    assert one.begun == begun
    assert ("abort" in asked) == (begun and not came)
    assert (one.state == NEW) == came
    assert not one.resumed
    assert (one.resume_error is not None) == (came and ends)
    if broken in ("note_pause", "pause"):
        assert asked[-2:] == ["resume", "end"]
        assert not engine.still
    if begun and not came:
        assert engine.still, "what is dirty does not generate"


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("broken", ["renew_lease", "note_pause", "read", "commit"])
def test_an_engine_that_another_trainer_holds_is_left_alone(broken: str, ends: bool) -> None:
    """It is that one's to resume, and neither as before nor dirty by this push."""
    one = replica(engine := Engine(broken))
    engine.refuses = NotOurs
    assert bool(push(one, EngineSequence("mine", "keep"), ends=ends)) == (broken != "renew_lease" or not ends)
    asked = [name for message in engine.messages for name in message]
    if one.error:
        assert asked[-1] == broken
        assert one.lost
        assert one.begun == (broken in ("commit", "renew_lease")), "what was refused did nothing"
        assert not one.resumed
        failed = failure([one])
        word = "is another trainer's by now" if one.begun else "was not changed by this push"
        assert word in str(failed)
        assert isinstance(failed, PushFailed if one.begun else PushRefused)


def test_an_engine_that_was_resumed_in_a_push_stands_still_again() -> None:
    """With nothing cached of half-written weights."""
    for resumed in (True, False):
        one = replica(engine := Engine("commit"))
        engine.refuses = Moved if resumed else WorkerFailed
        assert push(one, EngineSequence("mine", "keep"))
        again = ["note_pause", "pause", "reset_prefix_cache"] if resumed else []
        assert engine.messages[1:] == [["abort", "paused", *again], ["end"]]
        assert engine.still


class Generating(RayControl):
    """An actor around an `LLM`, which computes something between two calls, or does not."""

    def __init__(self, by: int) -> None:
        super().__init__(object())
        self.steps = itertools.count(step=by)

    async def _ask(self, request: str) -> list[str]:
        return [json.dumps({"rank": 0, "call": json.loads(request)["call"], "steps": next(self.steps)})]


def test_an_actor_that_generates_beside_a_push_does_not_stand_still() -> None:
    """With `max_concurrency` above 1; it was taken to be at nothing else whenever it took a call."""
    assert drive(Generating(0).stands())
    with pytest.raises(PushRefused, match="max_concurrency above 1"):
        drive(Generating(1).stands())


def test_data_parallel_engines_are_paused_before_their_work() -> None:
    """vLLM's come to a stop together: one whose pause is still to be said would be waited for."""
    one = replica(engine := Engine(), shares={"name": "a", "engines": 2})
    assert not push(one, EngineSequence("mine", "keep"), ends=False)
    assert engine.messages == [STEADY[:3], STEADY[3:-1], ["renew_lease", "resume", "end"]]


@pytest.mark.parametrize("broken", PULLED)
def test_an_engine_dies_in_a_message(broken: str) -> None:
    """How far it came, nobody knows: it counts as begun."""
    one = replica(Engine(broken, dies=True))
    assert "EngineGone" in push(one, EngineSequence("mine", "keep"))
    assert one.begun
    assert not one.resumed
    assert one.state != NEW


def test_a_prefix_cache_that_cannot_be_reset_ends_the_message() -> None:
    one = replica(engine := Engine(forgets=False))
    assert "the prefix cache could not be reset" in push(one, EngineSequence("mine", "keep"))
    assert engine.messages == [STEADY[:5], ["abort", "paused"], ["end"]]
    assert PushFailed.__name__ in one.error


def test_an_engine_that_was_never_asked_is_not_paused() -> None:
    """A rank of the trainer failed before."""
    one, steps = replica(engine := Engine()), EngineSequence("mine", "keep")
    drive(steps.pause(one, "merged", brought=State("merged", 1)))
    one.error = "another rank's"
    drive(steps.go_on(one))
    assert engine.messages == [["end"]]
    assert not one.queued_calls


def test_a_push_is_told_from_the_one_before() -> None:
    """Whatever that one has left behind, in a message that was interrupted, is refused."""
    steps, told = EngineSequence("mine", "keep"), list[set[str]]()
    for _ in range(2):
        steps.begin("mine")
        one = replica(engine := Engine())
        assert not push(one, steps)
        told.append({message["push"] for message in engine.told})
        assert len(told[-1]) == 1
    assert told[0] != told[1]


def test_an_engine_that_has_gone_on_is_left_alone_when_another_rank_fails() -> None:
    one, steps = replica(engine := Engine()), EngineSequence("mine", "keep")
    assert not push(one, steps)
    one.error = "another rank's"
    drive(steps.go_on(one))
    assert engine.messages == [PULLED]


@pytest.mark.parametrize(("held", "mode"), [("merged", "adapter"), ("adapter", "merged"), ("merged", "merged")])
def test_requests_for_a_mode_that_has_not_come_end(held: str, mode: str) -> None:
    """They came while the push was under way; the engine goes on in the mode that it had."""
    one, steps = (
        replica(engine := Engine(), state=State(held, 6).to_json(), served=held),
        EngineSequence("mine", "keep"),
    )
    drive(steps.pause(one, mode, brought=State(mode, 7)))
    drive(steps.make(one, []))
    one.error = "nothing was sent"
    ended: list[bool] = []

    async def end(adapter: bool) -> None:
        ended.append(adapter)

    engine.end_wrong_mode_requests = end  # type: ignore[method-assign]
    drive(steps.go_on(one))
    assert ended == ([] if held == mode else [mode == "merged"])
    assert not engine.still
