"""Transports without an engine: real processes, and who gives up when. Where there is no GPU, gloo stands for NCCL."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from processes import leaving_nothing
from torch import Tensor
from torch.distributed import DistNetworkError, TCPStore

from lora_merge import InvalidInput
from lora_merge.engine.control.base import Control
from lora_merge.engine.push.channels import Trainer
from lora_merge.engine.push.replica import Replica
from lora_merge.engine.transport import memory, nccl
from lora_merge.engine.transport.base import Expected
from lora_merge.engine.transport.liveness import TransferAborted, host_id
from lora_merge.engine.transport.memory import CudaMemory
from lora_merge.engine.transport.rendezvous import interface, reach_store, serve_store
from lora_merge.engine.transport.routing import Route, assign, clash, worker_end
from lora_merge.engine.transport.sender import Sender
from lora_merge.shards.ranks import Ranks
from lora_merge.stream.buckets import Meta, Table, extent, lay_out
from lora_merge.stream.direct_targets import DirectTargets

CPU = torch.device("cpu")
BUCKETS = 7
NBYTES = 1024
LIMIT_S = 90
"""Nothing here takes longer, also where vLLM is imported and GPUs start."""
SOON_S = 30
"""Time enough on a busy machine, and less than anything lasts that waits for somebody who does not come."""
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["torch", "lora_merge.engine.transport.routing"])


class Counting:
    """Bucket k is full of k + 1."""

    def __init__(
        self,
        device: torch.device = CPU,
        at: int = -1,
        then: Callable[[], None] = lambda: None,
        collective: bool = False,
        recipients: Mapping[int, frozenset[tuple[int, int]]] | None = None,
    ) -> None:
        self.recipients = recipients or {}
        self.table: Table = lay_out([Meta(str(i), torch.uint8, (1000,)) for i in range(BUCKETS)], NBYTES)
        self.device, self.capacity, self.collective, self.shared = device, NBYTES, collective, collective
        self._at, self._then = at, then
        self.filled: list[int] = []
        self.placed: list[int] = []

    def alone(self, index: int) -> bool:
        return index > 0

    def fill(self, index: int, buffer: Tensor, run: Mapping[str, Any]) -> None:
        if index == self._at:
            self._then()
        buffer.fill_(index + 1)
        self.filled.append(index)

    def direct_buckets(self, names: Container[str]) -> frozenset[int]:
        return frozenset(index for index in range(BUCKETS) if str(index) in names)

    def write_direct(self, index: int, places: DirectTargets, run: Mapping[str, Any]) -> None:
        if index == self._at:
            self._then()
        for _, view in places.views.get(str(index), ()):
            view.fill_(index + 1)
        self.placed.append(index)


SIZES = {index: extent(slots) for index, slots in enumerate(Counting().table)}
ALL = list(range(BUCKETS))


def fail() -> None:
    raise RuntimeError("injected")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Gloo:
    """In the place of `Nccl`. Like there, a broadcast that a member does not join never ends by itself."""

    aborted: ClassVar[list[Any]] = []
    """Kept: a group that goes away waits for its broadcasts, which an aborted communicator does not."""

    def __init__(self, store: Any, rank: int, world: int, device: torch.device) -> None:
        from torch.distributed import PrefixStore, ProcessGroupGloo

        self._group = ProcessGroupGloo(PrefixStore("gloo", store.plain), rank, world, timedelta(seconds=LIMIT_S))

    @staticmethod
    def check() -> None:
        """Gloo is always there."""

    def broadcast(self, data: Tensor) -> Gloo.Pending:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        return self.Pending(self._group.broadcast([data], options))

    def send(self, data: Tensor, ranks: Sequence[int]) -> Gloo.Pending:
        return self.Pending(*(self.Waited(self._sent(data.clone(), rank)) for rank in ranks))

    def _sent(self, data: Tensor, rank: int) -> Any:
        """Send; return None where gloo says at once that the other has gone, of which NCCL knows nothing."""
        with contextlib.suppress(RuntimeError):
            return self._group.send([data], rank, 0)
        return None

    def receive(self, data: Tensor) -> Gloo.Pending:
        return self.Pending(self.Waited(self._group.recv([data], 0, 0)))

    def abort(self) -> None:
        self.aborted.append(self._group)

    class Waited:
        """What gloo sends to one is only ever said to be complete to whoever waits for it."""

        def __init__(self, work: Any) -> None:
            self._done, self._work = False, work
            if work is not None:
                threading.Thread(target=self._wait, daemon=True).start()

        def _wait(self) -> None:
            with contextlib.suppress(RuntimeError):  # aborted
                self._work.wait()
                self._done = True

        def is_completed(self) -> bool:
            return self._done

        def exception(self) -> None:
            """It is not complete then."""

    class Pending:
        def __init__(self, *works: Any) -> None:
            self._works = works

        def query(self) -> bool:
            return all(work.is_completed() and work.exception() is None for work in self._works)


def use_gloo() -> None:
    nccl.Nccl = Gloo  # type: ignore[misc, assignment]


@pytest.fixture(autouse=True)
def gloo(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = getattr(request.node, "callspec", None) and request.node.callspec.params.get("kind")
    if not kind or kind[1] == "cpu":
        monkeypatch.setattr(nccl, "Nccl", Gloo)


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    with leaving_nothing():
        yield


def needs(count: int) -> Any:
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs")


KINDS = [
    pytest.param(("shm", "cpu", "cpu"), id="shm"),
    pytest.param(("nccl", "cpu", "cpu"), id="nccl, gloo in its place"),
    pytest.param(("tcp", "cpu", "cpu"), id="tcp"),
    pytest.param(("tcp", "cuda:0", "cuda:0"), id="tcp, GPUs", marks=pytest.mark.gpu),
    pytest.param(("tcp", "cpu", "cuda:0"), id="tcp, to a GPU", marks=pytest.mark.gpu),
    pytest.param(("tcp", "cuda:0", "cpu"), id="tcp, from a GPU", marks=pytest.mark.gpu),
    pytest.param(("ipc", "cuda:0", "cuda:0"), id="ipc", marks=pytest.mark.gpu),
    pytest.param(("nccl", "cuda:0", "cuda:1"), id="nccl", marks=[pytest.mark.gpu, needs(2)]),
]


def work(channel: dict[str, Any], device: str, transfers: int, at: int, how: str, tell: Any) -> None:
    """A worker: opens its channel and takes transfers, but for what goes wrong `at` a bucket."""
    signal.alarm(LIMIT_S)
    if device == "cpu":
        use_gloo()
    else:
        torch.cuda.set_device(device)
    seen: list[Any] = []
    try:
        receiver = worker_end(channel, torch.device(device))
        for _ in range(transfers):
            tell.send("open")
            sliced = tell.recv()
            if at < 0 and how:
                {"breaks": receiver.leave, "dies": die}[how]()
                raise RuntimeError("consumer")
            sizes = SIZES if sliced is None else {index: SIZES[index] for index in sliced["sent"]}
            with closing(receiver.receive(Expected(sizes, apart=() if sliced is None else sliced["apart"]))) as buckets:
                for received in buckets:
                    index, data = received.index, received.data
                    if how and index == at:
                        {"breaks": fail, "dies": die, "dawdles": lambda: time.sleep(0.5)}[how]()
                    seen.append(index if bool((data[:1000] == index + 1).all()) else f"{index} is damaged")
        receiver.close()
    except (RuntimeError, TransferAborted) as error:
        seen.append(f"{type(error).__name__}: {error}")
    tell.send(seen)


class Workers:
    """Worker processes of replicas, and their control calls as a trainer sees them."""

    def __init__(
        self,
        ours: Sender,
        device: str,
        *,
        transfers: int = 1,
        wrong: tuple[int, int] | None = None,
        at: int = 0,
        how: str = "",
        told: Mapping[tuple[int, int], Any] | None = None,
    ) -> None:
        self._told = told or {}
        self.pipes: dict[tuple[int, int], Any] = {}
        self.said: dict[tuple[int, int], Any] = dict.fromkeys(ours.kinds, "busy")
        self._lock = threading.Lock()
        for place in ours.kinds:
            self.pipes[place], theirs = processes.Pipe()
            args = (ours.channel(*place), device, transfers, at, how if place == wrong else "", theirs)
            processes.Process(target=work, args=args, daemon=True).start()
            theirs.close()

    def call(self, replicas: set[int], sliced: bool = False, told: Mapping[tuple[int, int], Any] | None = None) -> None:
        """A control call to some replicas; `sliced`: each is told what comes to it."""
        self.wait()
        for place in (place for place in self.pipes if place[0] in replicas):
            assert self.said[place] == "open"
            self.said[place] = "busy"
            self.pipes[place].send((told or self._told)[place] if sliced else None)

    def gone(self) -> set[int]:
        """A call ends when one of its workers is dead, or none is busy."""
        with self._lock:  # threads that watch NCCL groups ask, too: of two that find a word, one reads the end after it
            for place, pipe in self.pipes.items():
                while self.said[place] == "busy" and pipe.poll():
                    try:
                        self.said[place] = pipe.recv()
                    except EOFError:
                        self.said[place] = "dead"
            dead = {r for (r, _), said in self.said.items() if said == "dead"}
            return dead | ({r for r, _ in self.pipes} - {r for (r, _), said in self.said.items() if said == "busy"})

    def wait(self) -> dict[tuple[int, int], Any]:
        """What the workers say when none is busy."""
        end = time.monotonic() + LIMIT_S
        while "busy" in self.said.values() and time.monotonic() < end:
            self.gone()
            time.sleep(0.01)
        return self.said


def groups(ours: Sender) -> dict[int, nccl.Group]:
    end = ours.ends["nccl"]
    assert isinstance(end, nccl.NcclSender)
    return end.groups


def channels(kind: str, device: str) -> dict[tuple[int, int], str]:
    """Two workers in one replica and one in another; on two GPUs there is room for one."""
    places = [(0, 0)] if (kind, device) == ("nccl", "cuda:1") else [(0, 0), (0, 1), (1, 0)]
    return dict.fromkeys(places, kind)


def sender(name: str, here: str, there: str) -> Sender:
    """A trainer's end. Over sockets all workers are on one host."""
    places = channels(name, there)
    return Sender(places, NBYTES, torch.device(here), hosts=dict.fromkeys(places, "there"))


@pytest.mark.parametrize("kind", KINDS)
def test_buckets_arrive_transfer_after_transfer(kind: tuple[str, str, str]) -> None:
    """And a replica that takes no part in one of them takes part in the next."""
    name, here, there = kind
    ours = sender(name, here, there)
    workers = Workers(ours, there, transfers=2)
    ours.connect()
    replicas = {r for r, _ in ours.kinds}
    for taking in (replicas, {0}, replicas - {0}) if len(replicas) > 1 else (replicas, replicas):
        workers.wait()
        ours.begin(source := Counting(torch.device(here)))
        workers.call(taking)
        ours.serve(source, {}, workers.gone)
        assert source.filled == ALL
        ours.opened()
    assert workers.wait() == dict.fromkeys(ours.kinds, ALL * 2)
    ours.close()


def shares(places: Sequence[tuple[int, int]]) -> dict[int, frozenset[tuple[int, int]]]:
    """Of seven buckets: the first is one worker's, one is another's, two go to the second replica, one is nobody's; all
    take the others."""
    first, last = frozenset([min(places)]), frozenset([max(places)])
    return {0: first, 2: last, 4: frozenset(), 5: last}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hosts", ["one", "each"])
@pytest.mark.parametrize("collective", [False, True])
def test_each_worker_gets_what_it_takes(kind: tuple[str, str, str], hosts: str, collective: bool) -> None:
    """Transfer after transfer, also when all take everything in between."""
    name, here, there = kind
    places = channels(name, there)
    on = {place: "there" if hosts == "one" else str(place) for place in places}
    ours = Sender(places, NBYTES, torch.device(here), hosts=on)
    recipients = shares(list(places))
    served = dict.fromkeys(places, (0, name))
    source = Counting(torch.device(here), collective=collective, recipients=recipients)
    told = {place: Route.of_buckets(source).wire_spec(place, served, on) for place in places}
    for place, what in told.items():
        assert what["own"] == [index for index in ALL if place in recipients.get(index, places)]
        assert set(what["own"]) <= set(what["sent"])
        if name == "nccl" or (name == "tcp" and hosts == "each"):
            assert what["own"] == what["sent"], "nothing of the others'"
    workers = Workers(ours, there, transfers=3, told=told)
    ours.connect()
    for taking in (source, Counting(torch.device(here)), source):
        workers.wait()
        outbox: Any = ours.ends.get("tcp")
        before = 0 if outbox is None else outbox.nbytes
        ours.begin(taking)
        workers.call({r for r, _ in places}, sliced=taking is source)
        ours.serve(taking, {}, workers.gone)
        if outbox is not None and hosts == "each":
            many = sum(len(what["own"]) for what in told.values()) if taking is source else len(ALL) * len(places)
            workers.wait()
            assert outbox.nbytes - before == many * SIZES[0]
    # Nobody here takes the fifth bucket; filling the first one takes all ranks.
    assert source.filled == [index for index in ALL if recipients.get(index, places)] * 2
    assert workers.wait() == {place: told[place]["sent"] + ALL + told[place]["sent"] for place in places}
    ours.close()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if str(kind.id).startswith("nccl")])
def test_sends_and_broadcasts_in_one_group(kind: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a group is too small for a bucket that not all of it take: every other one is sent by itself."""
    name, here, there = kind
    ours = sender(name, here, there)
    hand, turns = nccl.Group.hand, dict.fromkeys(groups(ours).values(), 0)

    def handing(self: nccl.Group, data: Tensor, ranks: Sequence[int]) -> Any:
        turns[self] += 1
        return hand(self, data, ranks) if turns[self] % 2 else self._enqueue(lambda nccl: nccl.send(data, ranks))

    monkeypatch.setattr(nccl.Group, "hand", handing)
    told = {place: {"sent": ALL, "apart": ALL[1::2]} for place in ours.kinds}
    workers = Workers(ours, there, told=told)
    ours.connect()
    ours.begin(source := Counting(torch.device(here)))
    workers.call({r for r, _ in ours.kinds}, sliced=True)
    ours.serve(source, {}, workers.gone)
    assert workers.wait() == dict.fromkeys(ours.kinds, ALL)
    ours.close()


def test_a_rank_fills_what_the_others_need_of_it() -> None:
    """None of its workers takes the first bucket, which all ranks fill together, nor the third, which each fills."""
    ours = Sender({(0, 1): "shm"}, NBYTES, CPU)
    recipients = {index: frozenset([(0, 0)]) for index in (0, 2)}
    route = Route.of_buckets(source := Counting(collective=True, recipients=recipients))
    told = {(0, 1): route.wire_spec((0, 1), {(0, 0): (1, "shm"), (0, 1): (0, "shm")}, {})}
    assert told[0, 1]["sent"] == told[0, 1]["own"] == [1, 3, 4, 5, 6]
    workers = Workers(ours, "cpu", told=told)
    ours.begin(source)
    workers.call({0}, sliced=True)
    ours.serve(source, {}, workers.gone, route)
    assert source.filled == [0, 1, 3, 4, 5, 6]
    assert workers.wait() == {(0, 1): [1, 3, 4, 5, 6]}
    ours.close()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.id in ("shm", "tcp", "nccl, gloo in its place")])
@pytest.mark.parametrize("takes", [[], [6]], ids=["nothing", "the last one"])
def test_workers_that_take_little_of_a_transfer(kind: tuple[str, str, str], takes: list[int]) -> None:
    """One gets nothing at all, or the last bucket alone, while others get all; then nobody here gets anything."""
    name, here, there = kind
    places = channels(name, there)
    few = min(places)
    recipients = {index: frozenset(set(places) - {few}) for index in ALL if index not in takes}
    on = {place: str(place) for place in places}
    ours = Sender(places, NBYTES, torch.device(here), hosts=on)
    nobody = {index: frozenset([(7, 7)]) for index in ALL}
    served = dict.fromkeys(places, (0, name))
    for turn, who in enumerate((recipients, nobody)):
        source = Counting(recipients=who)
        told = {place: Route.of_buckets(source).wire_spec(place, served, on) for place in places}
        if not turn:
            workers = Workers(ours, there, transfers=2, told=told)
            ours.connect()
        workers.wait()
        ours.begin(source)
        workers.call({r for r, _ in places}, sliced=True, told=told)
        ours.serve(source, {}, workers.gone)
        if not turn:
            first = {place: what["sent"] for place, what in told.items()}
            assert first[few] == (takes if name != "shm" else ALL)
    assert source.filled == []
    assert workers.wait() == first
    ours.close()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.id in ("shm", "tcp", "nccl, gloo in its place")])
@pytest.mark.parametrize("how", ["breaks", "dies"])
@pytest.mark.parametrize("at", [-1, 2], ids=["before", "at its own bucket"])
def test_a_worker_that_fails_at_a_bucket_of_its_own(kind: tuple[str, str, str], how: str, at: int) -> None:
    """Nobody waits for who is left of it, and the trainer is through with all buckets."""
    name, here, there = kind
    places = channels(name, there)
    recipients = {2: frozenset([(0, 1)]), 3: frozenset([(0, 0)]), 5: frozenset([(0, 0), (1, 0)])}
    on = {place: str(place) for place in places}
    ours = Sender(places, NBYTES, torch.device(here), hosts=on)
    source = Counting(recipients=recipients)
    served = dict.fromkeys(places, (0, name))
    told = {place: Route.of_buckets(source).wire_spec(place, served, on) for place in places}
    workers = Workers(ours, there, wrong=(0, 1), at=at, how=how, told=told)
    ours.connect()
    ours.begin(source)
    workers.call({0, 1}, sliced=True)
    begin = time.monotonic()
    ours.serve(source, {}, workers.gone)
    assert time.monotonic() - begin < nccl.GRACE_S + SOON_S
    assert source.filled == ALL
    found = workers.wait()
    assert found[0, 1] == "dead" if how == "dies" else found[0, 1][-1].startswith("RuntimeError")
    assert found[1, 0] == told[1, 0]["sent"]
    ours.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["breaks", "dies"])
@pytest.mark.parametrize("at", [-1, 3], ids=["before", "in the middle"])
def test_a_worker_that_fails_holds_nobody_up(kind: tuple[str, str, str], how: str, at: int) -> None:
    name, here, there = kind
    ours = sender(name, here, there)
    wrong = max(place for place in ours.kinds if place[0] == 0)
    workers = Workers(ours, there, wrong=wrong, at=at, how=how)
    ours.connect()
    ours.begin(source := Counting(torch.device(here)))
    workers.call({0, 1})
    begin = time.monotonic()
    ours.serve(source, {}, workers.gone)
    assert time.monotonic() - begin < nccl.GRACE_S + SOON_S
    assert source.filled == ALL, "filling may take all trainer ranks: it goes on"
    found = workers.wait()
    assert found[wrong] == "dead" if how == "dies" else found[wrong][-1].startswith("RuntimeError")
    for place in set(ours.kinds) - {wrong}:
        if place[0] == 0 and how == "dies":
            continue  # its engine's call has ended: nobody waits for what is left of it
        if found[place] != ALL:
            assert (name, place[0]) == ("nccl", 0), "one worker's failure is its own, but NCCL needs every member"
            assert found[place][-1].startswith("TransferAborted")
    ours.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [0, 4])
def test_a_trainer_that_breaks_tells_its_workers(kind: tuple[str, str, str], at: int) -> None:
    name, here, there = kind
    ours = sender(name, here, there)
    workers = Workers(ours, there)
    ours.connect()
    ours.begin(source := Counting(torch.device(here), at, fail))
    workers.call({0, 1})
    with pytest.raises(RuntimeError, match="injected"):
        ours.serve(source, {}, workers.gone)
    for seen in workers.wait().values():
        assert "TransferAborted: the trainer gave up" in seen[-1]
        assert seen[:-1] == ALL[: len(seen) - 1]
        assert len(seen) <= at + 1
    ours.close()


def train(name: str, here: str, there: str, tell: Any) -> None:
    """A trainer that is killed in its third bucket."""
    signal.alarm(LIMIT_S)
    if here == "cpu":
        use_gloo()
    ours = Sender({(0, 0): name}, NBYTES, torch.device(here))
    tell.send(ours.channel(0, 0))
    ours.connect()
    ours.begin(source := Counting(torch.device(here), 2, die))
    tell.send("begun")
    tell.recv()
    ours.opened()
    ours.serve(source, {})


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_that_is_killed_is_noticed(kind: tuple[str, str, str]) -> None:
    name, here, there = kind
    pipe, theirs = processes.Pipe()
    process = processes.Process(target=train, args=(name, here, there, theirs), daemon=True)
    process.start()
    receiver = worker_end(pipe.recv(), torch.device(there))
    assert pipe.recv() == "begun"
    pipe.send("go")
    begin, seen = time.monotonic(), []
    buckets = receiver.receive(Expected(SIZES))
    with pytest.raises(TransferAborted, match="trainer"):
        seen += (received.index for received in buckets)
    assert time.monotonic() - begin < SOON_S
    assert not seen or max(seen) < 2
    receiver.close()
    process.join(LIMIT_S)


@pytest.mark.parametrize("slow", ["trainer", "worker"])
def test_workers_that_cannot_all_connect_do_not_wait(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two workers fails before it joins the NCCL group: the same reason on all, whoever leaves first."""
    ours = Sender({(0, 0): "nccl", (0, 1): "nccl"}, NBYTES, CPU)
    errors: list[BaseException] = []
    leave = nccl.Group.leave

    def late(group: nccl.Group, reason: str) -> None:
        if (group is groups(ours)[0]) == (slow == "trainer"):
            time.sleep(0.2)
        leave(group, reason)

    monkeypatch.setattr(nccl.Group, "leave", late)

    def first() -> None:
        try:
            worker_end(ours.channel(0, 0), CPU)
        except TransferAborted as error:
            errors.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    with pytest.raises(TransferAborted, match="did not come"):
        ours.connect(lambda: {0})
    thread.join(SOON_S)
    assert "did not come" in str(errors[0])
    ours.close()


class Stuck:
    """In the place of `Nccl`: as ncclCommInitRank, it returns when every member has come; here, never."""

    def __init__(self, store: Any, rank: int, world: int, device: torch.device) -> None:
        self.wait()

    @staticmethod
    def check() -> None:
        """It could be used."""

    @classmethod
    def wait(cls) -> None:
        threading.Event().wait(LIMIT_S)


def connect(ours: Sender, worker: Callable[[], object]) -> list[str]:
    """Both ends of an NCCL group open at the same time: what the worker says, and what the trainer."""
    said: list[str] = []
    ended: set[int] = set()

    def there() -> None:
        try:
            worker()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        ended.add(0)

    thread = threading.Thread(target=there, daemon=True)
    thread.start()
    begin = time.monotonic()
    with pytest.raises((TransferAborted, RuntimeError)) as raised:
        ours.connect(lambda: ended)
    thread.join(nccl.GRACE_S + SOON_S)
    assert time.monotonic() - begin < nccl.GRACE_S + SOON_S
    ours.close()
    return [*said, f"{raised.type.__name__}: {raised.value}"]


@pytest.mark.parametrize("how", ["breaks", "ends"])
def test_a_worker_that_fails_while_the_communicator_is_made_holds_nobody_up(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaks(Stuck):
        def __init__(self, store: Any, rank: int, world: int, device: torch.device) -> None:
            if rank:
                fail()
            self.wait()

    def worker() -> None:
        if how == "breaks":
            worker_end(ours.channel(0, 0), CPU)
        else:  # ready, then gone with its process: its control call ends, and it says no more
            channel = ours.channel(0, 0)
            nccl.Group(reach_store(channel["store"]), "0", 1, 2, CPU).join()

    monkeypatch.setattr(nccl, "Nccl", Breaks)
    ours = Sender({(0, 0): "nccl"}, NBYTES, CPU)
    said = connect(ours, worker)
    if how == "breaks":
        assert said[0] == "RuntimeError: injected"
        assert said[1].startswith("TransferAborted: a member of the NCCL group could not join it: ")
        assert said[1].endswith("injected")
    else:
        assert "ended" in said[0]


def test_a_trainer_that_dies_while_the_communicator_is_made_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(Stuck):
        def __init__(self, store: Any, rank: int, world: int, device: torch.device) -> None:
            if not rank:
                fail()
            self.wait()

    monkeypatch.setattr(nccl, "Nccl", Breaks)
    ours = Sender({(0, 0): "nccl"}, NBYTES, CPU)
    said = connect(ours, lambda: worker_end(ours.channel(0, 0), CPU))
    assert said[0].startswith("TransferAborted: a member of the NCCL group could not join it: ")
    assert said[1] == "RuntimeError: injected"


@pytest.mark.parametrize("slow", [False, True], ids=["at once", "while the trainer asks"])
def test_a_member_that_cannot_use_nccl_says_so_before_it_is_ready(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here there is no NCCL: nobody goes on to make a communicator, which would wait for it."""
    reason = nccl.Group._reason

    def asked(group: nccl.Group) -> str:
        """It leaves, and its control call ends, right after the trainer has asked who left."""
        said = reason(group)
        if slow and not group._rank:
            time.sleep(0.2)
        return said

    monkeypatch.setattr(nccl.Group, "_reason", asked)

    class Checks(Stuck):
        @staticmethod
        def check() -> None:
            if threading.current_thread() is not threading.main_thread():
                raise RuntimeError("vLLM cannot use NCCL here")

        @classmethod
        def wait(cls) -> None:
            raise AssertionError("a communicator was begun")

    monkeypatch.setattr(nccl, "Nccl", Checks)
    ours = Sender({(0, 0): "nccl"}, NBYTES, CPU)
    said = connect(ours, lambda: worker_end(ours.channel(0, 0), CPU))
    assert said[0] == "RuntimeError: vLLM cannot use NCCL here"
    assert said[1].endswith("vLLM cannot use NCCL here")
    assert said[1].startswith("TransferAborted")


def test_workers_that_hear_late_why_no_transfer_takes_place_hear_the_same() -> None:
    """The first one that heard it has left by then, and what it says is no reason."""
    store = serve_store("127.0.0.1")
    trainer, *workers = (nccl.Group(store, "0", rank, 3, CPU) for rank in range(3))
    trainer.announce()
    assert "did not come" in trainer.decide(lambda: True)
    for worker in workers:
        with pytest.raises(TransferAborted, match="did not come"):
            worker.join()
        worker.leave("a worker of the engine failed in the middle of a push")


def test_a_trainer_that_dies_between_two_questions_is_noticed() -> None:
    """A worker that waits for its verdict asks for two things in turn."""

    def get(key: str) -> bytes:
        asked.append(key)
        if "verdict" in asked:
            raise DistNetworkError("the connection was closed")
        return {"transfer": b"1", "left": b""}[key]

    asked: list[str] = []
    worker = nccl.Group(serve_store("127.0.0.1"), "0", 1, 2, CPU)
    worker._store = SimpleNamespace(get=get, set=lambda key, value: None)  # type: ignore[assignment]
    with pytest.raises(TransferAborted, match="the trainer died"):
        worker.join()


@pytest.mark.parametrize("through", [True, False], ids=["with all it carries", "before"])
def test_a_group_outlives_its_control_call_where_nothing_waits_in_it(
    through: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine is done, and the trainer still waits for a slower one: the next push found the group given up."""

    class Sends(Stuck):
        def __init__(self, *_: Any) -> None:
            """There is nobody else to wait for."""

        def broadcast(self, data: Tensor) -> Any:
            return SimpleNamespace(query=lambda: through)

        def abort(self) -> None:
            pass

    monkeypatch.setattr(nccl, "Nccl", Sends)
    monkeypatch.setattr(nccl, "GRACE_S", 0.1)
    group = nccl.Group(serve_store("127.0.0.1"), "0", 0, 1, CPU)
    group.open()
    group.watch(lambda: True)
    group.hand(torch.empty(1), [])
    end = time.monotonic() + (0.5 if through else SOON_S)
    while not group.lost and time.monotonic() < end:
        time.sleep(0.01)
    assert group.lost == ("" if through else "its control call ended in the middle of the transfer")
    group.close()


def test_a_channel_that_the_trainer_has_closed_leaves_no_file(tmp_path: Path) -> None:
    """A worker that opened it made the files anew, and nobody took them away."""
    ours = Sender({(0, 0): "shm"}, NBYTES, CPU)
    channel = ours.channel(0, 0)
    ours.close()
    for _ in range(2):
        with pytest.raises(TransferAborted, match="closed its channel, or is gone; push again"):
            worker_end(channel, CPU)
    ours = Sender({(0, 0): "shm"}, NBYTES, CPU)
    with pytest.raises(InvalidInput, match=r"bytes, \d+ were announced"):
        worker_end(ours.channel(0, 0) | {"words": 1 << 20}, CPU)
    ours.close()


def test_buckets_are_unmapped_when_a_receiver_closes() -> None:
    def mapped() -> int:
        return sum("/dev/shm/lora_merge-" in line for line in Path("/proc/self/maps").read_text().split("\n"))

    ours = Sender({(0, 0): "shm"}, NBYTES, CPU)
    before = mapped()
    theirs = worker_end(ours.channel(0, 0), CPU)
    assert mapped() > before
    theirs.close()
    assert mapped() == before
    ours.close()


@pytest.mark.gpu
def test_memory_for_other_processes_goes_with_its_last_holder() -> None:
    torch.zeros(1, device="cuda")
    for explicit in (True, False):
        free = torch.cuda.mem_get_info()[0]
        memory = CudaMemory(1 << 28, torch.device("cuda", 0))
        assert free - torch.cuda.mem_get_info()[0] >= 1 << 28
        if explicit:
            memory.close()
            memory.close()
        del memory
        gc.collect()
        assert free - torch.cuda.mem_get_info()[0] < 1 << 24


# Strangers


def own_address() -> str:
    """An address of this machine beside its loopback."""
    found = [info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    lines = Path("/proc/net/fib_trie").read_text().split("\n")
    found += [a.split()[-1] for a, b in itertools.pairwise(lines) if "/32 host LOCAL" in b]
    return next((str(address) for address in found if not str(address).startswith("127.")), "")


def test_the_cuda_runtime_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor that is mapped asks for it: 1,900 of a 7B policy took 3 seconds."""
    read: list[Path] = []

    def mapped(path: Path) -> str:
        read.append(path)
        return "libcudart.so.0"

    monkeypatch.setattr(Path, "read_text", mapped)
    monkeypatch.setattr("ctypes.CDLL", lambda name: name)
    memory._cuda_runtime.cache_clear()
    try:
        assert {memory._cuda_runtime() for _ in range(3)} == {"libcudart.so.0"}
    finally:
        memory._cuda_runtime.cache_clear()
    assert len(read) == 1


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"), [("", "0", False), ("0", "0", True), ("1", "", True), ("0", "1", False)]
)
def test_members_of_two_ways_to_hand_out_memory(ours: str, theirs: str, fits: bool) -> None:
    """On one host; on two, and over other transports, it does not matter."""

    def process(host: str, cumem: str) -> dict[str, str]:
        return {"host": host, "cumem": cumem}

    trainer, engine = process("here", ours), [[process("here", ours), process("here", theirs)]]
    told = clash(trainer, engine, {(0, 0): "nccl", (0, 1): "nccl"})
    assert told == "" if fits else "worker 1 of engine 0" in told and "the same NCCL_CUMEM_ENABLE" in told
    assert clash(trainer, engine, {(0, 0): "nccl", (0, 1): "ipc"}) == ""
    assert clash(trainer, [[process("there", theirs)]], {(0, 0): "nccl"}) == ""


def test_the_store_listens_at_one_interface_alone() -> None:
    assert interface([host_id()]) == interface([]) == "127.0.0.1"
    store = serve_store("127.0.0.1")
    port = store.channel()["port"]
    socket.create_connection(("127.0.0.1", port), 5).close()
    assert own_address(), "a machine without another interface than its loopback proves nothing"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((own_address(), port), 5)
    elsewhere = serve_store(own_address())
    socket.create_connection((own_address(), elsewhere.channel()["port"]), 5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", elsewhere.channel()["port"]), 5)
    with pytest.raises(InvalidInput, match="VLLM_HOST_IP"):
        serve_store("192.0.2.77")


def test_a_stranger_is_not_heard_in_the_store() -> None:
    """Somebody on the same interface who does not know the secret: a push does not end by what he says."""
    store = serve_store("127.0.0.1")
    channel = store.channel()
    stranger = TCPStore("127.0.0.1", channel["port"], is_master=False, wait_for_workers=False)
    trainer, worker = (nccl.Group(end, "0", rank, 2, CPU) for rank, end in enumerate([store, reach_store(channel)]))
    assert worker._reason() == trainer._reason() == ""
    keys = {key.rpartition("/")[2]: key for key in stranger.list_keys()}
    assert {"left", "verdict", "transfer"} <= keys.keys()
    for forged in (b"give up", bytes(32) + b"give up", stranger.get(keys["transfer"])):
        stranger.set(keys["left"], forged)
        assert worker._reason() == trainer._reason() == ""
    trainer.announce()
    stranger.set(keys["verdict"], b"1 ")
    joined = threading.Thread(target=worker.join, daemon=True)
    joined.start()
    joined.join(0.5)
    assert joined.is_alive(), "a verdict of nobody's"
    assert trainer.decide(lambda: False, SOON_S) == ""
    joined.join(SOON_S)
    assert not joined.is_alive()
    guessing = reach_store(channel | {"secret": "00" * 32})
    guessing.under("0").set("left", "give up")
    assert worker._reason() == trainer._reason() == ""
    worker.leave("a worker failed")
    assert trainer._reason() == "a worker failed"
    trainer.leave("too late")
    assert worker._reason() == "a worker failed", "the first reason stands"


# A worker in the trainer's own process


def pull(ours: Sender, until: int = BUCKETS, places: DirectTargets | None = None, compare: bool = False) -> list[int]:
    receiver, seen = worker_end(ours.channel(0, 0), CPU), []
    with closing(receiver.receive(Expected(SIZES, (), places, compare))) as buckets:
        for received in buckets:
            if received.placed:
                assert places is not None
                assert (places.views[f"{received.index}"][0][1] == received.index + 1).all()
            assert (received.data is None) == (received.placed and not compare)
            assert received.data is None or (received.data == received.index + 1).all()
            seen.append(received.index)
            if len(seen) == until:
                break
    return seen


@pytest.mark.parametrize("until", [0, 2, BUCKETS])
@pytest.mark.parametrize("collective", [False, True])
def test_a_local_worker_pulls_and_what_others_wait_for_is_filled(until: int, collective: bool) -> None:
    """What nobody waits for is not filled any more when the worker has failed."""
    ours = Sender({(0, 0): "local"}, NBYTES, CPU)
    for _ in range(2):
        source = Counting(collective=collective)
        ours.begin(source)
        ours.offer(source, {})
        if until:  # else it has failed before
            assert pull(ours, until) == ALL[:until]
            assert source.filled == ALL[: until + 1], "one bucket ahead"
        ahead = source.filled.copy()
        ours.drain()
        assert source.filled == (ALL if collective else ahead)
    with pytest.raises(TransferAborted, match="offers nothing"):
        pull(ours)
    ours.close()


@pytest.mark.parametrize("until", [2, BUCKETS])
@pytest.mark.parametrize("compare", [False, True])
def test_a_local_worker_has_buckets_placed(until: int, compare: bool) -> None:
    """Those that it has places for, all in a row at once; a bucket is made where it has none, or where it wants to
    compare."""
    ours = Sender({(0, 0): "local"}, NBYTES, CPU)
    places = DirectTargets({f"{i}": [(((0,), (4,)), torch.zeros(4, dtype=torch.uint8))] for i in ALL if i != 1})
    source = Counting()
    ours.begin(source)
    ours.offer(source, {})
    assert pull(ours, until, places, compare) == ALL[:until]
    made = ALL[: until + 1] if compare else ALL
    assert source.placed == [i for i in made if i != 1]
    assert sorted({*source.filled, *source.placed}) == made
    ours.drain()
    assert sorted({*source.filled, *source.placed}) == made
    ours.close()


@pytest.mark.parametrize("until", [2, BUCKETS])
def test_local_workers_and_others_take_the_same_buckets(until: int) -> None:
    """Where one of them stops early, too, while the other one reads the bucket whose buffer comes next."""
    ours = Sender({(0, 0): "local", (1, 0): "shm"}, NBYTES, CPU)
    try:
        part = Sender.__new__(Sender)  # the channels of the workers that are processes
        part.kinds, part.channel = {(1, 0): "shm"}, ours.channel  # type: ignore[method-assign]
        workers = Workers(part, "cpu", wrong=(1, 0), at=until - 2, how="dawdles")
        ours.begin(source := Counting())
        ours.offer(source, {}, workers.gone)
        workers.call({1})
        assert pull(ours, until) == ALL[:until]
        ours.drain()
        assert source.filled == ALL
        assert workers.wait() == {(1, 0): ALL}
    finally:
        ours.close()


def test_a_rank_without_memory_for_its_buckets_says_so_before_the_others_count_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sharded model's buckets are filled by all ranks at once: one that had none joined no collective, in silence."""

    def full(self: Sender) -> list[Tensor]:
        raise torch.OutOfMemoryError("injected")

    calls: list[str] = []

    async def prepare(replica: Replica, route: Route) -> None:
        calls.append("prepare")

    async def receive(replica: Replica, route: Route) -> None:
        calls.append("receive")

    ours, source = Sender({(0, 0): "local"}, NBYTES, CPU), Counting(collective=True)
    trainer, replica = Trainer([], Ranks()), Replica(0, Control(None), [])
    trainer._rounds = [(ours, frozenset({0}))]
    with monkeypatch.context() as patched:
        patched.setattr(Sender, "_plain_buffers", full)
        asyncio.run(trainer.transfer(source, {}, [replica], Route.of_buckets(source), prepare, receive))
    assert replica.error == "OutOfMemoryError: injected"
    assert calls == ["prepare"]
    assert not source.filled, "no rank fills buckets that one of them cannot fill"
    ours.begin(source)
    ours.offer(source, {})
    assert pull(ours) == source.filled == ALL
    ours.close()


@pytest.mark.parametrize("at", [0, 3, 6])
@pytest.mark.parametrize("how", ["filled", "placed", "both"])
def test_a_rank_that_breaks_joins_what_is_left(at: int, how: str) -> None:
    """The others make every bucket, and need it for each step: also for the one before which it was told to stop, and
    once for the one in which it broke."""
    steps: list[tuple[str, int]] = []

    def noted(kind: str, index: int) -> None:
        steps.append((kind, index))
        if index == at and len(steps) < 20 and kind == ("fill" if how == "filled" else "place"):
            fail()

    ours, source = Sender({}, NBYTES, CPU), Counting(collective=True)
    source.fill = lambda index, buffer, run: noted("fill", index)  # type: ignore[method-assign]
    source.write_direct = lambda index, places, run: noted("place", index)  # type: ignore[method-assign]
    names = {str(index) for index in ALL} if how != "filled" else set()
    route = Route.to(source, names, DirectTargets({}), compare=how == "both")
    ours.begin(source, bool(route.sent))
    with pytest.raises(RuntimeError, match="injected"):
        ours.serve(source, {}, route=route)
    kinds = {"filled": ["fill"], "placed": ["place"], "both": ["place", "fill"]}[how]
    assert steps == [(kind, index) for index in ALL for kind in kinds]
    ours.close()


def test_a_rank_without_workers_fills_all_the_same() -> None:
    ours = Sender({}, NBYTES, CPU)
    ours.begin(source := Counting())
    ours.serve(source, {}, set)
    assert source.filled == ALL
    ours.close()


# A worker whose tensors the trainer has mapped


def test_what_is_written_straight_is_handed_to_nobody_and_the_rest_is() -> None:
    """A worker in another process waits for the buckets that come, under their own numbers."""
    ours = Sender({(0, 0): "shm"}, NBYTES, CPU)
    there = {str(index): torch.zeros(4, dtype=torch.uint8) for index in ALL if index not in (1, 2, 6)}
    places = DirectTargets({name: [(((0,), (4,)), tensor)] for name, tensor in there.items()})
    source = Counting()
    route = Route.to(source, set(there), places, compare=False)
    assert route.sent == (1, 2, 6)
    receiver, seen = worker_end(ours.channel(0, 0), CPU), []
    ours.begin(source)

    def take() -> None:
        for received in receiver.receive(Expected({index: SIZES[index] for index in route.sent})):
            assert received.data is not None
            assert (received.data[:1000] == received.index + 1).all()
            seen.append(received.index)

    taking = threading.Thread(target=take)
    taking.start()
    ours.serve(source, {}, route=route)
    taking.join(SOON_S)
    assert seen == source.filled == [1, 2, 6]
    assert source.placed == [0, 3, 4, 5]
    assert all(bool((tensor == int(name) + 1).all()) for name, tensor in there.items())
    receiver.close()
    ours.close()


# Who serves whom


def at(host: str, pid: int, device: str) -> dict[str, Any]:
    return {"host": host, "pid": pid, "device": device}


TRAINERS = [at("a", 1, "gpu-1"), at("a", 2, "gpu-2"), at("b", 1, "gpu-3")]
CPUS = [at("a", 1, "cpu"), at("a", 2, "cpu"), at("b", 1, "cpu")]


@pytest.mark.parametrize(
    ("trainers", "worker", "wanted"),
    [
        (TRAINERS, at("a", 2, "gpu-2"), (1, "local")),
        (TRAINERS, at("b", 1, "gpu-9"), (2, "local")),
        (TRAINERS, at("a", 7, "gpu-2"), (1, "ipc")),
        (TRAINERS, at("b", 2, "gpu-3"), (2, "ipc")),
        (TRAINERS, at("a", 7, "gpu-4"), (0, "nccl")),
        (TRAINERS, at("a", 3, "gpu-3"), (0, "nccl")),  # rank 2's GPU, out of reach of its memory
        (CPUS, at("a", 2, "cpu"), (1, "local")),
        (CPUS, at("a", 7, "cpu"), (0, "shm")),
        (CPUS, at("b", 7, "cpu"), (2, "shm")),
    ],
)
def test_ends_are_matched_by_host_process_and_uuid(
    trainers: list[dict[str, Any]], worker: dict[str, Any], wanted: tuple[int, str]
) -> None:
    other = at("a", 9, trainers[0]["device"])
    assert assign(trainers, [[other, worker], [worker]]) == {
        (0, 0): (0, "shm" if other["device"] == "cpu" else "ipc"),
        (0, 1): wanted,
        (1, 0): wanted,
    }


@pytest.mark.parametrize(
    ("trainers", "workers", "wanted"),
    [
        (CPUS, [[at("a", 7, "gpu-1")]], [[(0, "tcp")]]),
        (TRAINERS, [[at("a", 7, "cpu")]], [[(0, "tcp")]]),
        (TRAINERS, [[at("b", 7, "cpu")]], [[(2, "tcp")]]),  # the rank of its host
        (CPUS, [[at("c", 7, "cpu"), at("a", 7, "cpu")]], [[(0, "tcp"), (0, "shm")]]),
        # One GPU in two containers: an NCCL group takes each GPU once.
        (TRAINERS, [[], [at("a2", 7, "gpu-1")]], [[], [(0, "tcp")]]),
        (TRAINERS, [[at("c", 7, "gpu-5"), at("c", 8, "gpu-5")]], [[(0, "nccl"), (0, "tcp")]]),
        # Engines on other hosts: one rank of each trainer host after the other, one for all workers of an engine there.
        (TRAINERS, [[at("c", 7, "gpu-5")], [at("c", 8, "gpu-5")]], [[(0, "nccl")], [(2, "nccl")]]),
        (CPUS, [[at("c", 7, "cpu"), at("c", 8, "cpu"), at("d", 7, "cpu")]], [[(0, "tcp"), (0, "tcp"), (2, "tcp")]]),
        (
            TRAINERS,
            [[at(host, 1, f"{host}-1"), at(host, 2, f"{host}-2")] for host in "cdefg"],
            [[(rank, "nccl")] * 2 for rank in (0, 2, 1, 0, 2)],
        ),
    ],
)
def test_what_shares_neither_memory_nor_a_group_is_reached_over_a_socket(
    trainers: list[dict[str, Any]], workers: list[list[dict[str, Any]]], wanted: list[list[tuple[int, str]]]
) -> None:
    found = assign(trainers, workers)
    assert found == {(r, w): place for r, replica in enumerate(wanted) for w, place in enumerate(replica)}


def test_workers_that_take_most_by_themselves_are_served_by_a_rank_each() -> None:
    """On GPUs of other hosts; where one worker takes for its host, or memory is shared, nothing changes."""
    engine = [at("c", 1, "gpu-5"), at("c", 2, "gpu-6"), at("d", 1, "gpu-7"), at("d", 2, "gpu-8")]
    near = [at("b", 7, "gpu-9"), at("b", 8, "gpu-3")]
    by = assign(TRAINERS, [engine, [*engine[:1], *near], [at("c", 8, "cpu"), at("c", 9, "cpu")]], apart=True)
    assert [by[0, w] for w in range(4)] == [(0, "nccl"), (2, "nccl"), (1, "nccl"), (0, "nccl")]
    assert [by[1, w] for w in range(3)] == [(2, "nccl"), (2, "nccl"), (2, "ipc")]
    assert [by[2, w] for w in range(2)] == [(1, "tcp"), (1, "tcp")]
    assert [place for place, _ in assign(TRAINERS, [engine]).values()] == [0, 0, 2, 2]


def test_only_buffers_of_ours_are_opened() -> None:
    channel = {"session": "s", "kind": "shm", "nbytes": 1, "mailbox": "/dev/shm/../../etc/passwd", "words": 1, "at": 2}
    with pytest.raises(InvalidInput, match="not a buffer"):
        worker_end(channel, CPU)
