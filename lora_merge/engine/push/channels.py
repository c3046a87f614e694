"""The trainer's channels to the engines' workers: which rank serves which worker, and transfers over them."""

from __future__ import annotations

from collections.abc import Callable, Container, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from ...errors import PushRefused
from ...shards.ranks import RankLost, Ranks
from ...stream.bucket_writer import BucketWriter
from ...stream.direct_targets import DirectTargets, Sent
from ..control.base import Control
from ..control.calls import side_by_side, together
from ..messages import WorkerInfo
from ..transport.liveness import error_text
from ..transport.peer_memory import DirectWriteSet, MappedMemory, direct, united
from ..transport.rendezvous import interface
from ..transport.routing import TRANSPORTS, Route, WorkerId, assign, clash, in_process, introduction, without_buckets
from ..transport.sender import Sender
from .ranks import Ended, TrainerRanks
from .replica import Replica, workers_of


class Step(Protocol):
    """A step of a transfer in one replica."""

    def __call__(self, replica: Replica, /, route: Route) -> Coroutine[Any, Any, None]: ...


class Trainer(TrainerRanks):
    """The ranks that push together, and their channels to all workers.

    Attributes:
        offered: whether some worker may have memory of the model's weights mapped.
    """

    def __init__(self, controls: Sequence[Control], world: Ranks) -> None:
        super().__init__(controls, world)
        self.offered = False
        self._rounds: list[tuple[Sender, frozenset[int]]] = []
        self._sessions: dict[WorkerId, str] = {}
        self._places: dict[WorkerId, tuple[int, str]] = {}
        self._hosts: dict[WorkerId, str] = {}
        self._nbytes, self._separate = 0, False
        self._mapped: dict[str, _Mapping] = {}

    @property
    def sessions(self) -> list[str]:
        """The sessions of the open channels of all ranks."""
        return sorted(set(self._sessions.values()))

    @property
    def served(self) -> dict[WorkerId, int]:
        """Each worker's rank of the trainer, over the open channels."""
        return {place: rank for place, (rank, _) in self._places.items()}

    # Channels

    def introduced(self, source: BucketWriter) -> dict[str, Any]:
        """Return this rank's `introduction`, and its `group`: a number that the ranks share which hold the model
        together."""
        first = source.ranks.global_rank(0) if source.collective else self.world.rank
        return {**introduction(source.device), "group": first}

    async def map(
        self, source: BucketWriter, replicas: Sequence[Replica], at: Mapping[int, Sequence[str]]
    ) -> DirectWriteSet:
        """Map the engines' own tensors into the ranks that will write to them, where that is possible; kept while they
        stay where they are.

        Args:
            at: of each replica the `ExportedMemory.digest` of every worker.

        Returns:
            what is written directly to engines in other processes; the same on every rank.
        """
        known = self._mapped.get(source.digest)
        key = [(replica.index, tuple(at[replica.index])) for replica in replicas]
        if known is not None and known.key == key:
            return known.direct
        await self.unmap(source.digest)
        trainers = await self.gather(self.introduced(source))
        serving = assign(trainers, _introductions(replicas))
        away = {place: rank for place, (rank, kind) in serving.items() if not in_process(kind)}
        workers = workers_of(replicas)
        # What each worker in another process exports, on every rank.
        asked = [r for r in replicas if any((r.index, w) in away for w in range(len(r.workers)))]
        answers = await self.ask(asked, "export_memory", digest=source.digest)
        every = {(index, w): answer for index, some in answers.items() for w, answer in enumerate(some)}
        found = {place: exports for place, exports in every.items() if place in away}
        direct, made = self._direct(trainers, workers, away, found), dict[WorkerId, MappedMemory]()
        failed = ""
        try:
            for place, exports in found.items() if direct.names else ():
                if trainers[away[place]]["group"] == trainers[self.world.rank]["group"]:
                    made[place] = MappedMemory(exports, source.device, workers[place].pid)
        except Exception as error:
            failed = f"a worker's memory cannot be mapped here: {error_text(error)}"
        failures = [text for text in await self.gather(failed) if text]
        if failures:
            for mapped in made.values():
                mapped.close()
            direct, made = DirectWriteSet(why=failures[0]), {}
        self._mapped[source.digest] = _Mapping(key, direct, made, united(made.values()))
        return direct

    def _direct(
        self,
        trainers: Sequence[Mapping[str, Any]],
        workers: Mapping[WorkerId, WorkerInfo],
        away: Mapping[WorkerId, int],
        found: Mapping[WorkerId, Mapping[str, Any]],
    ) -> DirectWriteSet:
        """Return what is written directly; nothing where some rank that would write shares no host with some worker.
        All ranks that hold the model with the one that serves a worker write to that worker."""
        for (r, w), rank in away.items():
            writers = [trainer for trainer in trainers if trainer["group"] == trainers[rank]["group"]]
            if any((trainer["device"] == "cpu") != (workers[r, w].device == "cpu") for trainer in writers):
                return DirectWriteSet(why=f"worker {w} of engine {r} is on a GPU and the trainer is not, or vice versa")
            if any(trainer["host"] != workers[r, w].host for trainer in writers):
                return DirectWriteSet(why=f"worker {w} of engine {r} shares no memory with every rank that would write")
        return direct([found[place] for place in away])

    async def unmap(self, digest: str) -> None:
        """Unmap engines' tensors. Collective."""
        if digest in self._mapped:
            for mapped in self._mapped.pop(digest).mapped.values():
                mapped.close()

    def route(self, source: BucketWriter, compare: bool) -> Route:
        """Return how a stream goes to engines in other processes: as `map` found."""
        known = self._mapped.get(source.digest)
        if known is None or not known.direct.names:
            return Route.of_buckets(source)
        return Route.to(source, known.direct.names, known.targets, compare)

    def _spared(self, route: Route, failed: Container[int]) -> Route:
        """Return a route that writes to no replica that has failed: another trainer may have it by now."""
        for known in self._mapped.values():
            if known.targets is route.targets and any(index in failed for index, _ in known.mapped):
                left = [mapped for (index, _), mapped in known.mapped.items() if index not in failed]
                return route._replace(targets=united(left))
        return route

    async def connect(
        self, replicas: Sequence[Replica], nbytes: int, device: torch.device, sent: bool, separate: bool
    ) -> None:
        """Open channels to all workers, with two buffers of at least `nbytes`; kept from push to push.

        Args:
            sent: whether buckets go to workers in other processes at all.
            separate: as `apart` of `assign`.

        Raises:
            PushRefused: some engine cannot be reached; no channel is left open.
        """
        workers = workers_of(replicas)
        open_ = {place: worker.session for place, worker in workers.items()}
        separate = separate and sent
        for_buckets = all(kind != without_buckets() for _, kind in self._places.values())
        enough = not sent or (self._nbytes >= nbytes and for_buckets)
        if open_ == self._sessions and enough and separate == self._separate:
            return
        await self.close_channels()
        size = max(nbytes, 1)
        trainers = await self.gather(introduction(device))
        places = assign(trainers, _introductions(replicas), separate)
        if not sent:
            places = {
                at: (rank, kind if in_process(kind) else without_buckets()) for at, (rank, kind) in places.items()
            }
        if why := clash(trainers[0], _introductions(replicas), {at: kind for at, (_, kind) in places.items()}):
            raise PushRefused(f"no channel to the engine: {why}")
        try:
            hosts = {at: worker.host for at, worker in workers.items() if TRANSPORTS[places[at][1]].trainer.networked}
            made = await self.everywhere(self._make_senders(places, size, device, hosts))
        except Exception:
            await self.close_channels()
            raise
        channels = {place: channel for some in made for place, channel in some.items()}
        own = [r for r in replicas if r.control is not None]
        ended = self.ended(replicas)

        async def connect(replica: Replica) -> None:
            ranked = {str(w.rank): channels[replica.index, at] for at, w in enumerate(replica.workers)}
            await replica.handle.rpc("connect", trainer=self.name, channels=ranked)

        def join() -> None:
            for sender, _ in self._rounds:
                sender.connect(ended)

        calls = [partial(connect, replica) for replica in own]
        errors, failure = await together(
            [r.handle for r in own], calls, join, ended=lambda i: ended.add(own[i].index), stop=self._stop
        )
        # An engine's own error comes first: this rank's is often no more than that nobody came.
        failed = next((error_text(error) for error in (*errors, failure) if error is not None), "")
        failures = [text for text in await self.gather(failed) if text]
        if failures:
            await self.close_channels()
            raise PushRefused(f"no channel to the engine: {'; '.join(dict.fromkeys(failures))}")
        for sender, _ in self._rounds:
            sender.opened()
        self._sessions = {place: channel["session"] for place, channel in channels.items()}
        self._places, self._hosts, self._nbytes, self._separate = places, hosts, size, separate

    async def _make_senders(
        self,
        places: Mapping[WorkerId, tuple[int, str]],
        nbytes: int,
        device: torch.device,
        hosts: Mapping[WorkerId, str],
    ) -> dict[WorkerId, dict[str, Any]]:
        """Make this rank's ends, a sender a round, and return what its workers have to know of them.

        Args:
            hosts: of workers that are reached over a network.
        """
        for some in _rounds(places):
            mine = {place: places[place][1] for place in some if places[place][0] == self.world.rank}
            sender = Sender(mine, nbytes, device, interface(list(hosts.values())), hosts)
            self._rounds.append((sender, frozenset(r for r, _ in some)))
        return {place: sender.channel(*place) for sender, _ in self._rounds for place in sender.kinds}

    async def close(self) -> None:
        """Free buffers and handles, and unmap the engines' tensors. Collective."""
        for digest in list(self._mapped):
            await self.unmap(digest)
        await self.close_channels(weights=True)

    async def close_channels(self, *, weights: bool = False) -> None:
        """Free buffers and handles, after the workers have closed theirs. Collective.

        Args:
            weights: workers unmap the trainer's weights, too.
        """
        message = {"sessions": self.sessions, "weights": self.name if weights else ""}
        if self.sessions or (weights and self.offered):  # an engine that is gone holds nothing
            await side_by_side(self.controls, lambda control: control.rpc("disconnect", **message), self.controls)
        self.offered = self.offered and not weights
        with suppress(RankLost):  # nobody waits for this one then
            await self.gather(None)
        for sender, _ in self._rounds:
            sender.close()
        self._rounds, self._sessions, self._places, self._hosts, self._nbytes = [], {}, {}, {}, 0

    # One transfer

    def wire_specs(self, replica: Replica, route: Route) -> dict[str, dict[str, list[int]]] | None:
        """Return `Route.wire_spec` of every worker of a replica, by rank; None where all workers take everything."""
        if not route.recipients:
            return None
        ranked = ((str(worker.rank), (replica.index, at)) for at, worker in enumerate(replica.workers))
        return {rank: route.wire_spec(place, self._places, self._hosts) for rank, place in ranked}

    def kinds(self, route: Route) -> tuple[str, ...]:
        """Return the names of the transports that a transfer takes."""
        used = {kind for _, kind in self._places.values() if in_process(kind) or route.sent}
        away = any(not in_process(kind) for _, kind in self._places.values())
        return tuple(sorted(used | ({without_buckets()} if route.placed and away else set())))

    async def transfer(
        self,
        source: Sent,
        run: Mapping[str, Any],
        replicas: Sequence[Replica],
        route: Route,
        prepare: Step,
        receive: Step,
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        """Send one source to some replicas. Errors are noted in the replicas, on every rank.

        Args:
            run: arguments of `Plan.run`.
            route: to engines in other processes.
            prepare: runs before, for each replica whose handle is here.
            receive: the control calls in which its workers take the buckets, meanwhile.
            settle: runs on every rank before any of these calls.
        """
        for sender, indices in self._rounds:
            ended = self.ended(replicas)
            group = [r for r in replicas if r.index in indices]
            how = Route.of_buckets(source) if sender.local else route
            await self.each(group, partial(prepare, route=how))
            failure = ""
            try:
                await self.blocking(settle)
                sender.begin(source, bool(how.sent))
            except Exception as error:
                failure = error_text(error)
            if await self.share(replicas, failure):
                continue  # on every rank: none may wait for the one that cannot fill
            failed = indices - {r.index for r in group if not r.error}
            for index in failed:
                ended.add(index)
            how = self._spared(how, failed)
            own = [r for r in group if r.control is not None and not r.error]
            failure = await self._send(sender, source, run, own, receive, ended, how)
            await self.share(replicas, failure)

    async def _send(
        self,
        sender: Sender,
        source: Sent,
        run: Mapping[str, Any],
        own: Sequence[Replica],
        receive: Step,
        ended: Ended,
        route: Route,
    ) -> str:
        """Do this rank's part in a round: serve its workers, and make the control calls of its engines. Return its own
        failure in words."""
        if sender.local:
            sender.offer(source, run, ended)
            for replica in own:
                await self.each([replica], partial(receive, route=route))
            try:
                await self.blocking(sender.drain)
            except Exception as error:
                return error_text(error)
            return ""

        if not source.table:  # workers read everything by themselves
            await self.each(own, partial(receive, route=route))
            return ""

        def serve() -> None:
            # A rank that serves no worker fills only buckets that all ranks take part in.
            if sender.kinds or source.collective:
                try:
                    sender.serve(source, run, ended, route)
                except BaseException:
                    sender.abort()  # whatever it was: workers wait for buckets
                    raise

        calls = [partial(receive, replica, route=route) for replica in own]
        errors, failure = await together(
            [r.handle for r in own], calls, serve, ended=lambda i: ended.add(own[i].index), stop=self._stop,
            give_up=sender.abort,
        )  # fmt: skip
        for replica, raised in zip(own, errors, strict=True):
            replica.error = replica.error or (error_text(raised) if raised is not None else "")
        return "" if failure is None else error_text(failure)

    def _stop(self) -> None:
        """Fill no more, and tell the workers, as the push was cancelled."""
        for sender, _ in self._rounds:
            sender.stop()


def _introductions(replicas: Sequence[Replica]) -> list[list[dict[str, Any]]]:
    """Return what the workers say of themselves, at the index of their replica; nothing at those of engines that take
    no part."""
    workers = {replica.index: [worker.introduction for worker in replica.workers] for replica in replicas}
    return [workers.get(index, []) for index in range(max(workers) + 1)]


class _Mapping(NamedTuple):
    """Engines' tensors, mapped for a stream.

    Args:
        key: of every replica its index, and `ExportedMemory.digest` of its workers then.
        mapped: those of the workers that this rank writes to.
        targets: theirs, together.
    """

    key: list[tuple[int, tuple[str, ...]]]
    direct: DirectWriteSet
    mapped: dict[WorkerId, MappedMemory]
    targets: DirectTargets


def _rounds(places: Mapping[WorkerId, tuple[int, str]]) -> list[list[WorkerId]]:
    """Group places that are served at the same time: all workers elsewhere first, then one engine in each trainer
    process, which pulls at its own pace."""
    elsewhere = [place for place, (_, kind) in places.items() if not in_process(kind)]
    here: list[list[WorkerId]] = []
    turns: dict[int, int] = {}
    for place, (rank, kind) in places.items():
        if in_process(kind):
            turn = turns[rank] = turns.get(rank, -1) + 1
            if turn == len(here):
                here.append([])
            here[turn].append(place)
    return [*([elsewhere] if elsewhere else []), *here]
