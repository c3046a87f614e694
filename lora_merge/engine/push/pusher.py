"""The steps of one push: which engines are asked, paused and written to, and what is done about those that fail."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Container, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch

from ...errors import InvalidInput, PushFailed, PushRefused
from ...stream.bucket_writer import BucketWriter
from ...stream.buckets import Table, metas, to_json
from ...stream.direct_targets import Sent
from ..control.base import Call, WorkerFailed
from ..control.calls import bind, drive, side_by_side, together
from ..control.http import NotReached, Unfit
from ..lease import lease_of, under_way
from ..payload.adapter import AdapterSource
from ..payload.checksums import Verified
from ..payload.pull import PullSource
from ..payload.update import UpdatePayload
from ..state import State
from ..transport.liveness import error_text, host_id
from ..transport.routing import Route, WorkerId
from .channels import Trainer
from .heartbeat import Heartbeat
from .planner import LocalOp, Transfer
from .replica import SILENT, Replica, SyncReport, check_apart, check_whole, engines_of, failure
from .sequence import EngineSequence
from .warn import warn_of_calibrated, warn_of_differences

_Settle: TypeAlias = Callable[[Replica, Call | None, bool, bool], Coroutine[Any, Any, None]]


class Planner(Protocol):
    """Planner what a push sends to which engines."""

    def read(self, mode: str) -> BucketWriter | None:
        """What a push most likely begins with, read while engines say who they are. Collective."""

    def known(self, mode: str) -> tuple[list[str], list[str]]:
        """Digests of the tables of what it most likely begins with, and of updates, that engines are asked for when
        they introduce themselves."""

    async def __call__(
        self, replicas: Sequence[Replica], report: SyncReport, verify: bool, read: BucketWriter | None
    ) -> list[Transfer]:
        """What has to be sent to whom; everything that can be checked is checked then.

        Args:
            report: says the mode and the version; is told what is left out, and who merges.
            verify: everything goes in buckets, too.
            read: what `read` gave.

        Raises:
            PushRefused: something does not fit; every engine is as before.
        """

    def broke(self, error: BaseException) -> None:
        """Note that a push has failed in some engine."""

    def release(self) -> None:
        """As `MergedWeights.release`, of all streams."""


class Pusher:
    """Pushes to some engines, one after another.

    Args:
        trainer: the ranks that push, with their engines.
        transfers: what is sent.
        pause: what becomes of requests in flight; one of `PAUSES`.
        mode: of the first push, unless it says another.
        rounding: of merged weights.
        healing: of dirty engines, in words.
        computing: how the trainer's model computes, as of `computing` in configs.py.
    """

    def __init__(
        self,
        trainer: Trainer,
        transfers: Planner,
        *,
        pause: str,
        mode: str,
        rounding: str = "nearest",
        healing: str = "the next push heals them",
        computing: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._trainer, self._planner, self._sequence = trainer, transfers, EngineSequence(trainer.name, pause)
        self._mode, self._rounding, self._healing = mode, rounding, healing
        self._computing, self._told_to_differ = computing, set[tuple[int, str]]()
        self._closed = self._held = False
        self._pushed: State | None = None
        self._told_of: set[int] = set()  # engines with calibrated caches
        self._counted: tuple[Table, int, int] = ((), 0, 0)  # the last push's table, its tensors and bytes
        self._lock = threading.Lock()
        self._beats = Heartbeat(self._sequence.beat)

    def states(self) -> list[State]:
        """Ask each engine whose handle this rank holds what it holds now. Not collective.

            print(*sync.states())  # merged@17

        Returns:
            one `State` for each engine: "nothing", "base@n", "adapter@n", "merged@n" or "dirty".

        Raises:
            PushRefused: an engine does not answer.
        """
        return drive(self.astates())

    async def astates(self) -> list[State]:
        """Ask each engine what it holds now, in the event loop of an `AsyncLLM`; see `states`."""
        introduced = await self._hello()
        return [Replica(index, None, workers).state for index, workers in enumerate(introduced)]

    def close(self) -> None:
        """Free buffers and mapped memory, first those of the workers. Collective. No push is possible after it.

            sync.close()

        For an `AsyncLLM` await `aclose`.
        """
        drive(self.aclose())

    async def aclose(self) -> None:
        """Free buffers and mapped memory, in the event loop of an `AsyncLLM`; see `close`."""
        self._closed = True
        if self._held:
            await self._let_go()
        await self._trainer.close()

    async def _push(self, mode: str | None, verify: bool) -> SyncReport:
        if self._closed:
            name = type(self).__name__
            raise InvalidInput(f"this {name} was closed: make a new one, {name}(model, engine)")
        if not self._lock.acquire(blocking=False):
            raise PushRefused("another push is under way; two at the same time cannot both win")
        try:
            with under_way(self._trainer.name):
                return await self._locked_push(self._mode if mode is None else mode, verify)
        except BaseException as error:
            # A call that an interrupt left under way may come after the end of that push.
            self._held = not await self._let_go() or not isinstance(error, Exception)
            raise
        finally:
            self._planner.release()  # read, perhaps, but not sent: a refusal, an adapter alone
            self._lock.release()
            await self._beats.end()

    async def _let_go(self) -> bool:
        """Allow other trainers to push to the engines again; returns whether all have heard it. (One that is gone is
        nobody's.)"""
        controls = self._trainer.controls
        errors = await side_by_side(controls, lambda control: control.rpc("end", owner=self._trainer.name), controls)
        return not any(errors)

    async def _locked_push(self, mode: str, verify: bool) -> SyncReport:
        trainer, report = self._trainer, SyncReport(0, mode)
        self._sequence.begin(trainer.name)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        with report.timed("check"):
            read: list[BucketWriter | None] = []
            known = self._planner.known(mode)

            def beside() -> None:  # while engines elsewhere answer, as the push before left its settings
                read.append(self._planner.read(mode))

            replicas = await self._introduce(*known, beside)
            report.differs = warn_of_differences(replicas, self._computing(), self._told_to_differ)
            report.version = max(replica.state.version for replica in replicas) + 1
            slept = {replica.index: replica.asleep for replica in replicas if replica.asleep or replica.waking}
            try:
                if slept:
                    # Map the weights of sleeping engines; the KV cache follows after the push.
                    await trainer.everywhere(trainer.all_own(replicas, self._wake))
                    replicas = await self._introduce(*known)
                transfers = await self._planner(replicas, report, verify, read[0])
                sources = [one.source for one in transfers if not isinstance(one.source, LocalOp)]
                if sources:
                    # What was pulled is compared with buckets of it.
                    compared = [source.stream for source in sources if isinstance(source, PullSource) and verify]
                    nbytes, device = max(source.capacity for source in (*sources, *compared)), sources[0].device
                    apart = any(isinstance(source, UpdatePayload) and source.apart for source in sources)
                    sent = verify or any(one.route.sent for one in transfers)
                    await trainer.connect(replicas, nbytes, device, sent, apart)
                served = None if verify else trainer.served
                for source in sources:
                    if isinstance(source, UpdatePayload) and not source.serves(served):
                        await self._serve(source, served)
            except BaseException:
                await self._sleep_again(replicas, slept)
                raise
        # What computes together goes on together, when the ranks have told each other that all of it is well.
        through = {engine[0].index for engine in engines_of(replicas) if len(engine) == 1}.difference(slept)
        # Requests that are made from here on wait for what this push brings.
        before, held = self._mode, {replica.index: replica.state for replica in replicas}
        self._mode = mode
        name = transfers[-1].state.adapter or f"{mode}@{report.version}"
        try:
            with report.timed("pause"):
                await trainer.each(replicas, partial(self._sequence.pause, mode=mode, slept=slept))
            for one in transfers[:-1]:
                await self._pass(one, report, verify, "", ())
            await self._pass(transfers[-1], report, verify, name, () if verify else through)
        except BaseException:
            await self._back(replicas, held, transfers[-1].state, name, slept)
            self._keep_mode(before, replicas, held)
            raise
        await trainer.share(replicas)
        came = [replica for replica in replicas if not replica.error or replica.resume_error]
        brought = {replica.index: transfers[-1].state for replica in came}
        with report.timed("resume"):
            await trainer.each(replicas, partial(self._sequence.go_on, slept=slept), failed=True)
            await trainer.share(replicas)
        if any(replica.error for replica in replicas):
            self._keep_mode(before, replicas, held)
            await trainer.close()
            error = failure(replicas, self._healing, brought)
            self._planner.broke(error)
            raise error
        self._pushed, last = transfers[-1].state, transfers[-1].source
        table = last.stream.table if isinstance(last, PullSource) else last.table
        if table is not self._counted[0]:
            self._counted = table, len(metas(table)), sum(slot.nbytes for slots in table for slot in slots)
        _, report.tensors, report.nbytes = self._counted
        kinds = {kind for one in transfers for kind in trainer.kinds(one.route)}
        pulled = any(isinstance(one.source, PullSource) for one in transfers)
        report.transports = tuple(sorted(kinds | {"pull"} if pulled else kinds))
        shares = [replica.coverage for replica in replicas]
        report.coverage = None if None in shares else min(share or 0.0 for share in shares)
        report.reloaded = max((replica.reloaded for replica in replicas), default=0)
        if self._pushed.kind != "base":  # whose weights the scales are of
            report.calibrated = warn_of_calibrated(replicas, self._told_of)
        return report

    def _keep_mode(self, mode: str, replicas: Sequence[Replica], held: Mapping[int, State]) -> None:
        """After a push that left every engine as it was, say of requests what was said before it.

        Args:
            mode: before it.
            held: by replicas before it.
        """
        if all(not replica.begun and replica.state == held[replica.index] for replica in replicas):
            self._mode = mode

    async def _hello(self, beside: Callable[[], None] | None = None, **message: Any) -> list[list[dict[str, Any]]]:
        """Ask the engines whose handles are here what they are and what they hold.

        Args:
            beside: work of this rank's own; it is done in any case.
        """
        introduced: dict[int, list[dict[str, Any]]] = {}

        async def hello(index: int) -> None:
            control = self._trainer.controls[index]
            try:
                workers = await control.rpc("hello", **message)
            except (NotReached, Unfit) as error:
                raise PushRefused(f"engine {index}: {error}") from error
            except WorkerFailed as error:
                raise PushRefused(f"engine {index} cannot be pushed to: {error}") from error
            except Exception as error:
                if error_text(error).startswith(SILENT):
                    raise PushRefused(f"engine {index} has died, start it anew: {error}") from error
                raise PushRefused(
                    f"engine {index} does not answer as one of lora_merge's: {error}. If it does not know the method, "
                    f"is lora-merge installed where its workers run, and does {control.plugins} allow it?"
                ) from error
            here = [worker["pid"] for worker in workers if worker["host"] == host_id()]
            control.far = len(here) < len(workers)
            control.workers = [pid for pid in here if pid != os.getpid()]
            lacks = {"no_adapters": control.adapters, "no_media": control.media}
            introduced[index] = [worker | lacks for worker in workers]

        controls = self._trainer.controls
        failure: BaseException | None = None
        if beside is not None and all(control.elsewhere for control in controls):
            errors, failure = await together(controls, [bind(hello, index) for index in range(len(controls))], beside)
        else:
            errors = await side_by_side(controls, hello, range(len(controls)))
            if beside is not None:
                await self._trainer.blocking(beside)
        for error in (*errors, failure):
            if error is not None:
                raise error
        return [introduced[index] for index in range(len(controls))]

    async def _introduce(
        self,
        streams: Sequence[str] = (),
        updates: Sequence[str] = (),
        beside: Callable[[], None] | None = None,
    ) -> list[Replica]:
        """Collect what every engine of every rank says about itself, and claim the engines for this push.

        Args:
            streams, updates: digests of tables, and of updates, that engines say at once what they know of.
            beside: as of `_hello`.
        """
        replicas: list[Replica] = []
        claim = lease_of(self._trainer.name, self._sequence.push)
        hello = self._hello(beside, claim=claim, streams=streams, updates=updates)
        everyone = await self._trainer.everywhere(hello)
        self._beats.begin(self._trainer.controls)
        for rank, introduced in enumerate(everyone):
            mine = rank == self._trainer.world.rank
            for index, workers in enumerate(introduced):
                control = self._trainer.controls[index] if mine else None
                replicas.append(Replica(len(replicas), control, workers))
        for replica in replicas:
            replica.check()
        check_apart(replicas)
        check_whole(replicas)
        return replicas

    async def _serve(self, update: UpdatePayload, served: Mapping[WorkerId, int] | None) -> None:
        """Have each rank collect the part of an update that it sends; all of it if every rank makes checksums (`served`
        is None)."""

        async def serve() -> None:
            await self._trainer.blocking(partial(update.serve, served, self._trainer.world.rank))

        try:
            await self._trainer.everywhere(serve())
        except BaseException:
            update.forget()  # other ranks may have failed where this one did not
            raise

    async def _wake(self, replica: Replica) -> None:
        if replica.asleep:
            await replica.handle.wake("weights")

    async def _sleep_again(self, replicas: Sequence[Replica], slept: Mapping[int, int]) -> None:
        """After a refusal, put engines that were asleep back to sleep at their level."""

        async def again(replica: Replica) -> None:
            await self._sequence.sleep_again(replica, slept[replica.index])

        await self._trainer.each([r for r in replicas if r.index in slept], again, failed=True)

    async def _pass(self, one: Transfer, report: SyncReport, verify: bool, name: str, through: Container[int]) -> None:
        """Send one source to its replicas, or tell them what to do by themselves. Errors are noted in them.

        Args:
            name: what engines call their weights from now on, and caches of the old ones are reset; "" where another
                pass follows.
            through: engines for which the push ends with their last call of this pass.
        """
        source, sent, steps = one.source, None, self._sequence
        replicas = [replica for replica in one.replicas if not replica.error]
        committed: set[int] = set()

        async def settle(replica: Replica, told: Call | None, begins: bool, whole: bool) -> None:
            commits = whole and not one.merges and not verify  # what is compared is so before
            ends = commits and replica.index in through
            await steps.settle(replica, one, told, name=name, begins=begins, commits=commits, ends=ends)
            if commits:
                committed.add(replica.index)

        async def do(replica: Replica, told: LocalOp) -> None:
            await settle(replica, steps.make_call(told.op, **told.message), told.writes, True)

        async def finish(replica: Replica) -> None:
            if replica.index not in committed:
                await steps.finish(replica, one, name=name, ends=replica.index in through)
            if isinstance(sent, Verified):
                await self._check_arrived(replica, sent)

        with report.timed("transfer"):
            if isinstance(source, LocalOp):
                await self._trainer.each(replicas, partial(do, told=source))
            else:
                sent = Verified(source.stream if isinstance(source, PullSource) else source) if verify else source
                with source.passing():
                    await self._send(one, source, sent, replicas, settle)
        with report.timed("finish"):
            await self._trainer.each(replicas, finish)

    async def _send(
        self,
        one: Transfer,
        source: BucketWriter | PullSource | AdapterSource | UpdatePayload,
        sent: Sent,
        replicas: Sequence[Replica],
        settle: _Settle,
    ) -> None:
        """The transfer of a pass.

        Args:
            source: of the pass.
            sent: it, with checksums where these are asked for.
            settle: has each replica do its part, and what comes after it, beside the others; is told whether the part
                may change the engine, and whether all has come when that is done.
        """
        state, verify = one.state, sent is not source
        run: dict[str, Any] = {"rounding": self._rounding if state.kind == "merged" else "nearest"}
        if run["rounding"] == "stochastic":
            run["seed"] = state.version

        changed = None if one.changed is None else sorted(one.changed)
        begin = {"state": state.to_json(), "changed": changed}

        async def prepare(replica: Replica, route: Route) -> None:
            if isinstance(source, PullSource):
                return  # nobody waits for an engine that does not read
            calls = []
            if isinstance(source, BucketWriter):
                calls = [self._sequence.make_call("start", digest=source.digest, sent=bool(route.sent), **begin)]
            await self._sequence.make(replica, calls, begins=bool(calls))

        async def receive(replica: Replica, route: Route) -> None:
            message: dict[str, Any] = {"sessions": self._trainer.sessions, "verify": verify}
            told, call = None, self._sequence.make_call
            if isinstance(source, PullSource):
                message |= {"scalings": source.scalings, "run": run}
                told = call("pull", digest=source.offered, **begin, **message)
            elif isinstance(source, AdapterSource):
                table = to_json(source.table)
                told = call("adapter", table=table, rank=source.rank, state=state.to_json(), **message)
            elif isinstance(source, UpdatePayload):
                message |= {"scalings": source.scalings, "comes": self._trainer.wire_specs(replica, route)}
                told = call("update", digest=source.digest, **message)
            elif route.sent:
                placed = sorted(route.placed.intersection(route.sent))
                told = call("receive", sent=route.sent, placed=placed, **message)
            begins = not isinstance(source, UpdatePayload)  # which is merged when all workers have it
            # What is placed may be on its way; and a rank that could not do its part of a bucket says so after it.
            whole = not route.placed and not (sent.collective and sent.table)
            await settle(replica, told, begins, whole)

        if not isinstance(source, PullSource):
            await self._trainer.transfer(sent, run, replicas, one.route, prepare, receive)
            return
        beside = Verified(source) if verify else source
        await self._trainer.transfer(beside, run, replicas, one.route, prepare, receive, source.settle)
        if isinstance(beside, Verified):
            await self._compare(source.stream, beside, sent, run, replicas)

    async def _compare(
        self, stream: BucketWriter, beside: Verified, sent: Sent, run: Mapping[str, Any], replicas: Sequence[Replica]
    ) -> None:
        """Also hand over, in buckets that workers only compare, what was pulled.

        Args:
            beside: what came in buckets.
            sent: the stream.
        """

        async def prepare(replica: Replica, route: Route) -> None:
            await self._check_arrived(replica, beside)

        async def receive(replica: Replica, route: Route) -> None:
            message: dict[str, Any] = {"sessions": self._trainer.sessions, "verify": True}
            message |= {"sent": route.sent, "placed": route.sent}
            await self._sequence.tell(replica, "receive", **message)

        left, every = [replica for replica in replicas if not replica.error], range(len(stream.table))
        await self._trainer.transfer(sent, run, left, Route(frozenset(every), tuple(every)), prepare, receive)

    async def _check_arrived(self, replica: Replica, sent: Verified) -> None:
        """Raise `PushFailed` unless what came last is what was sent."""
        route = Route.of_buckets(sent)
        for at, answer in enumerate(await self._sequence.tell(replica, "verified")):
            taken = {slot.name for index in route.by({(replica.index, at)}) for slot in sent.table[index]}
            wrong = [name for name in taken if answer["checksums"].get(name) != sent.checksums[name]]
            wrong += answer["damaged"]
            if wrong:
                raise PushFailed(
                    f"these tensors did not arrive as they were sent: {', '.join(sorted(set(wrong)))}; push again, and "
                    "report it if that does not help"
                )

    async def _back(
        self,
        replicas: Sequence[Replica],
        held: Mapping[int, State],
        brought: State,
        name: str,
        slept: Mapping[int, int],
    ) -> None:
        """After an interrupted push, resume engines that hold what they held before, or everything that it was to
        bring; others, including dirty ones, stay as they are until the next push. So do those that compute together
        with one of these, or with one whose handle is not here.

        Args:
            held: by replicas before it.
            name: of what it was to bring.
            slept: as of `EngineSequence.go_on`.
        """
        well: set[int] = set()

        async def ask(replica: Replica) -> None:
            replica.workers = await replica.handle.rpc("hello")
            if replica.state == brought:
                await self._sequence.catch_up(replica, brought, name)  # workers have it before the engine knows of it
            if replica.state in (held[replica.index], brought) and replica.state.kind != "dirty":
                well.add(replica.index)

        async def back(replica: Replica) -> None:
            replica.paused_by_us = replica.paused_by_us or replica.still_paused
            replica.error, replica.begun = "interrupted", replica.index not in well  # what it holds says the rest
            await self._sequence.go_on(replica, slept)

        await self._trainer.each(replicas, ask, failed=True)
        for engine in engines_of(replicas):
            if len(engine) > 1 and not well.issuperset(replica.index for replica in engine):
                well.difference_update(replica.index for replica in engine)
                await self._trainer.each(engine, back, failed=True)  # dirty
        await self._trainer.each([replica for replica in replicas if replica.index in well], back, failed=True)
