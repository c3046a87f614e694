"""Engines that cannot be reached: who is left out of a push, how the others are numbered, and how long nobody waits."""

from __future__ import annotations

import urllib.error
import urllib.request
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import spawn
from strangers import HTML, answering
from workers import hello as answer
from workers import worker

from lora_merge import PushFailed, PushRefused
from lora_merge.engine.control import http as web
from lora_merge.engine.control.base import Control
from lora_merge.engine.control.calls import EngineGone, drive
from lora_merge.engine.control.http import NotReached, Server, Unfit
from lora_merge.engine.push.channels import Trainer, _introductions
from lora_merge.engine.push.introduction import hello, replicas_of
from lora_merge.engine.push.planner import Planner
from lora_merge.engine.push.pusher import ATTEMPTS, Pusher
from lora_merge.engine.push.replica import ONE_ENGINE, Replica, SyncReport
from lora_merge.engine.push.sequence import EngineSequence
from lora_merge.engine.push.versions import VersionPusher
from lora_merge.engine.state import State
from lora_merge.engine.transport.routing import assign
from lora_merge.engine.transport.tcp_link import SILENT_S
from lora_merge.shards.ranks import Ranks


class Engine(Control):
    """One that answers, or does not.

    Args:
        error: that its calls raise.
    """

    def __init__(self, name: str, error: Exception | None = None, **more: Any) -> None:
        super().__init__(object())
        self.error, self._says = error, answer(name=name, **more)

    async def rpc(self, op: str, **message: Any) -> list[dict[str, Any]]:
        if self.error is not None:
            raise self.error
        return [self._says]


GONE = NotReached("nothing listens at http://b:8000")


def trainer(*engines: Engine) -> Trainer:
    return Trainer(engines, Ranks())


def test_an_engine_that_is_lost_keeps_its_number() -> None:
    """Places, mappings and errors go by it: the others must not move up."""
    ours = trainer(Engine("a"), Engine("b", GONE), Engine("c", host="far/1"), Engine("d", EngineGone("dead")))
    lost: dict[int, str] = {}
    introduced = drive(hello(ours, lost=lost))
    assert [len(workers) for workers in introduced] == [1, 0, 1, 0]
    replicas, gone = replicas_of(ours, [(introduced, lost), ([[worker(name="e")]], {})])
    assert [replica.index for replica in replicas] == [0, 2, 4]
    assert [replica.control for replica in replicas] == [ours.controls[0], ours.controls[2], None]
    assert gone == {1: str(GONE), 3: "it has died: dead"}
    rank = {"host": "here/1", "pid": 1, "device": "cpu"}
    assert {place: kind for place, (_, kind) in assign([rank], _introductions(replicas)).items()} == {
        (0, 0): "shm", (2, 0): "tcp", (4, 0): "shm"
    }  # fmt: skip


def test_without_the_word_for_it_every_engine_has_to_answer() -> None:
    with pytest.raises(PushRefused, match="engine 1: nothing listens at http://b:8000"):
        drive(hello(trainer(Engine("a"), Engine("b", GONE))))


@pytest.mark.parametrize("error", [Unfit("a router answers"), RuntimeError("no such method")])
def test_what_answers_wrongly_is_not_lost(error: Exception) -> None:
    lost: dict[int, str] = {}
    with pytest.raises(PushRefused, match="engine 1"):
        drive(hello(trainer(Engine("a"), Engine("b", error)), lost=lost))
    assert not lost


def test_a_server_of_data_parallel_engines_says_so() -> None:
    """`vllm serve --data-parallel-size 2`: it was told to look for the plugin."""
    said = f"http://b:8000/collective_rpc answered 500: Worker failed with error 'this is number 1 of {ONE_ENGINE}'"
    with pytest.raises(PushRefused) as refused:
        drive(hello(trainer(Engine("a"), Engine("b", RuntimeError(said)))))
    assert str(refused.value) == f"engine 1 is number 1 of {ONE_ENGINE}"


@pytest.mark.parametrize("code", [502, 503, 504])
def test_an_engine_whose_gateway_answers_in_its_place_is_lost(code: int) -> None:
    """As long as it does. What it says is in the report, as of an engine whose port is shut."""
    lost = dict[int, str]()

    class Behind(Engine):
        async def rpc(self, op: str, **message: Any) -> list[dict[str, Any]]:
            return [Server(url, "is it up?").post("collective_rpc", {})]

    with answering(other=(code, HTML, "<html/>")) as (url, _):
        introduced = drive(hello(trainer(Engine("a"), Behind("b")), lost=lost))
        assert [len(workers) for workers in introduced] == [1, 0]
        assert lost[1].startswith(f"{url}/collective_rpc answered {code} (text/html")
        with pytest.raises(PushRefused, match=rf'engine 1: .* answered {code} .*With lost="skip" pushes go on'):
            drive(hello(trainer(Engine("a"), Behind("b"))))


def test_engines_that_compute_together_are_lost_together() -> None:
    shares = {"name": "both", "engines": 2}
    ours, lost = trainer(Engine("a", shares=shares), Engine("b", GONE)), dict[int, str]()
    introduced = drive(hello(ours, lost=lost))
    with pytest.raises(PushRefused, match=r"engine 1: nothing listens.*; and without it the others are not whole"):
        replicas_of(ours, [(introduced, lost)])


def test_somebody_has_to_be_there() -> None:
    ours, lost = trainer(Engine("a", GONE), Engine("b", GONE)), dict[int, str]()
    introduced = drive(hello(ours, lost=lost))
    with pytest.raises(PushRefused, match=r"no engine can be reached: engine 0: nothing .*; engine 1: nothing"):
        replicas_of(ours, [(introduced, lost)])


@pytest.mark.parametrize("kind", ["adapter", "base"])
@pytest.mark.parametrize("paused", [True, False])
def test_a_trainer_that_died_between_commit_and_resume(kind: str, paused: bool) -> None:
    """Requests that wait were made for what was served before, whatever the engine holds now."""
    says = worker(paused=paused, served="merged", state=State(kind, 2, "base").to_json())
    replica = Replica(0, Engine("a"), [says])
    drive(EngineSequence("t", "keep").pause(replica, "adapter", brought=State("adapter", 3, "base")))
    assert replica.to_adapter == (True if paused else None)


class Pushing(Pusher):
    """Pushes of which each fails as it is told.

    Args:
        fails: errors of the pushes in turn, each with the engine that is lost in it, or -1.
    """

    def __init__(self, ours: Trainer, *fails: tuple[Exception, int], lost: Any = "skip") -> None:
        super().__init__(ours, Planner(), pause="keep", mode="merged", lost=lost)
        self._fails, self.attempts = list(fails), list[list[int]]()

    async def _locked_push(self, mode: str, verify: bool) -> SyncReport:
        replicas = await self._introduce()
        self.attempts.append([replica.index for replica in replicas])
        if self._fails:
            error, index = self._fails.pop(0)
            if index >= 0:
                self._trainer.controls[index].error = GONE  # type: ignore[attr-defined]
            raise error
        return SyncReport(1, mode, skipped=self._gone)


BROKE = PushFailed("engine 1 does not answer any more")


@pytest.mark.filterwarnings("ignore:engine . is left out")
def test_a_push_in_which_engines_are_lost_begins_anew() -> None:
    pushing = Pushing(trainer(*map(Engine, "abc")), (BROKE, 1), (PushRefused("engine 2: not reached"), 2))
    assert set(drive(pushing._push(None, False)).skipped) == {1, 2}
    assert pushing.attempts == [[0, 1, 2], [0, 2], [0]]


@pytest.mark.parametrize(("error", "lost"), [(BROKE, -1), (PushRefused("does not fit"), -1), (MemoryError("full"), 1)])
def test_a_push_that_fails_for_itself_is_not_repeated(error: Exception, lost: int) -> None:
    pushing = Pushing(trainer(*map(Engine, "abc")), (error, lost))
    with pytest.raises(type(error)):
        drive(pushing._push(None, False))
    assert len(pushing.attempts) == 1


@pytest.mark.filterwarnings("ignore:engine . is left out")
def test_it_ends() -> None:
    engines = [Engine(name) for name in "abcde"]
    pushing = Pushing(trainer(*engines), *((BROKE, index) for index in range(4)))
    with pytest.raises(PushFailed):
        drive(pushing._push(None, False))
    assert len(pushing.attempts) == ATTEMPTS
    refusing = Pushing(trainer(*map(Engine, "ab")), (BROKE, 1), lost="refuse")
    with pytest.raises(PushFailed):
        drive(refusing._push(None, False))
    assert refusing.attempts == [[0, 1]]


def ranks(rank: int) -> None:
    """The second rank has an engine, too; it hears of the first one's."""

    def pushing(*fails: tuple[Exception, int]) -> Pushing:
        engines = [Engine("a"), Engine("b")] if rank == 0 else [Engine("c")]
        return Pushing(Trainer(engines, Ranks(torch.distributed.group.WORLD)), *fails)

    warnings.simplefilter("ignore")
    one = pushing((BROKE, 1 if rank == 0 else -1))
    assert dict(drive(one._push(None, False)).skipped) == {1: str(GONE)}
    assert one.attempts == [[0, 1, 2], [0, 2]]
    error, lost = (MemoryError("full"), 1) if rank == 0 else (PushRefused("trainer rank 0: full"), -1)
    with pytest.raises(type(error)):  # it could not be repeated on every rank
        drive(pushing((error, lost))._push(None, False))
    with pytest.raises(PushFailed):  # nobody was lost
        drive(pushing((BROKE, -1))._push(None, False))
    keeping = VersionPusher(one._trainer, Planner(), pause="keep", mode="adapter")
    keeping._keep = rank
    with pytest.raises(PushRefused, match="ranks keep different numbers of versions: keep= 0, 1"):
        drive(keeping._push(None, False))
    torch.distributed.barrier()


def test_all_ranks_begin_anew_or_none() -> None:
    spawn(2, ranks)


def test_it_is_said_once_until_it_is_back() -> None:
    engines = [Engine("a"), Engine("b", GONE)]
    pushing = Pushing(trainer(*engines))
    with pytest.warns(UserWarning, match=r"engine 1 is left out of this push \(nothing listens"):
        report = drive(pushing._push(None, False))
    assert str(report).endswith(f"; without engine 1: {GONE}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(drive(pushing._push(None, False)).skipped) == {1}
    engines[1].error = None
    assert not drive(pushing._push(None, False)).skipped
    engines[1].error = GONE
    with pytest.warns(UserWarning, match="engine 1 is left out"):
        drive(pushing._push(None, False))


class Sleeper(Engine):
    """Sleeps at first. Others may be lost, or back, when it has woken."""

    def __init__(self, name: str, then: Callable[[], object] = lambda: None, **more: Any) -> None:
        super().__init__(name, asleep=1, **more)
        self._then = then

    async def wake(self, tag: str) -> None:
        assert tag == "weights"
        self._says["asleep"] = 0
        self._then()


class Planned(Planner):
    """Has no plan, and notes for whom."""

    async def __call__(self, replicas: Any, *args: Any) -> Any:
        self.met = [(replica.index, replica.asleep, replica.state.version) for replica in replicas]
        raise PushRefused("no plan")


@pytest.mark.filterwarnings("ignore:engine . is left out")
def test_others_are_lost_and_back_while_one_wakes() -> None:
    """They are in the report, count for the version, and are woken, too."""

    def happens() -> None:
        engines[1].error, engines[2].error = GONE, None

    engines = [Sleeper("a", happens), Engine("b"), Sleeper("c", state=State("merged", 7).to_json())]
    engines[2].error = GONE
    planner, report = Planned(), SyncReport(0, "merged")
    pusher = Pusher(trainer(*engines), planner, pause="keep", mode="merged", lost="skip")
    with pytest.raises(PushRefused, match="no plan"):
        drive(pusher._prepare(report, False))
    assert planner.met == [(0, 0, 0), (2, 0, 7)]
    assert (set(report.skipped), report.version) == ({1}, 8)


def test_an_engine_that_does_not_wake_gets_nothing() -> None:
    """As a gateway leads /wake_up elsewhere: the push wrote into memory that was not mapped."""

    def again() -> None:
        sleeper._says["asleep"] = 2

    sleeper, other = Sleeper("a", again), Engine("b")
    slept: list[int] = []

    async def sleep(level: int) -> None:
        slept.append(level)

    sleeper.sleep = sleep  # type: ignore[method-assign]
    planner = Planned()
    pusher = Pusher(trainer(other, sleeper), planner, pause="keep", mode="merged")
    with pytest.raises(PushRefused, match=r"engine 1 was woken, and its weights sleep: .*Nothing was sent; push again"):
        drive(pusher._prepare(SyncReport(0, "merged"), False))
    assert slept == [1]
    assert not hasattr(planner, "met")


def test_nobody_waits_for_long_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    limits: list[tuple[float, float]] = []

    def send(request: urllib.request.Request, seconds: float, connect_s: float) -> tuple[bytes, str]:
        limits.append((seconds, connect_s))
        if isinstance(said[-1], Exception):
            raise said[-1]
        return said[-1], "JSON"

    monkeypatch.setattr(web, "send", send)
    server = Server("http://far:8000", "?")
    gone = (web.ANSWER_AGAIN_S, web.CONNECT_AGAIN_S)
    for what, limit in (
        (b"{}", (web.TIMEOUT_S, SILENT_S)),
        (urllib.error.URLError("timed out"), (web.TIMEOUT_S, SILENT_S)),
        (TimeoutError("timed out"), gone),
        (b"not JSON", gone),
        (b"{}", (web.TIMEOUT_S, SILENT_S)),
    ):
        said.append(what)
        try:
            server.get("is_paused")
        except (NotReached, Unfit) as error:
            print(error)
        assert limits[-1] == limit, what


def test_hello_has_a_limit_of_its_own() -> None:
    from lora_merge.engine.control.one_server import HELLO_S, OneServer

    class One(OneServer):
        async def _ask(self, request: str) -> list[str]:
            limits.append(self._server.answer_s)
            raise NotReached("gone")

    limits: list[float] = []
    one: Any = One(SimpleNamespace())
    one._server, one._process = Server("http://far:8000", "?"), ("0: 1",)
    for op in ("hello", "receive"):
        with pytest.raises(NotReached):
            drive(one.rpc(op))
    assert limits == [HELLO_S, web.TIMEOUT_S]
    assert one._server.answer_s == web.TIMEOUT_S
