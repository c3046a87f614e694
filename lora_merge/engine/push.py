"""The steps of one push: which engines are asked, paused and written to, and what is done about those that fail."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Container, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch

from ..errors import InvalidInput, PushFailed, PushRefused
from ..stream.buckets import metas, to_json
from ..stream.filler import Filler
from ..stream.places import Sent
from .adapter import AdapterSource
from .calls import bind, drive, side_by_side, together
from .control import Call
from .passes import Pass, Told
from .pull import Pull
from .replica import Replica, SyncReport, check_whole, failure, tell_of_calibrated
from .sources import Verified
from .state import State
from .trainer import Trainer
from .transport import Route, WorkerId
from .update import Update
from .waiting import host_id
from .web import NotReached, Unfit

_Settle: TypeAlias = Callable[[Replica, Call | None, bool], Coroutine[Any, Any, None]]
PAUSES = ("keep", "wait", "abort")


class Planner(Protocol):
    """Plans what a push sends to which engines."""

    def read(self, mode: str) -> Filler | None:
        """What a push most likely begins with, read while engines say who they are. Collective."""

    def known(self, mode: str) -> tuple[list[str], list[str]]:
        """Digests of the tables of what it most likely begins with, and of updates, that engines are asked for when
        they introduce themselves."""

    async def __call__(
        self, replicas: Sequence[Replica], report: SyncReport, verify: bool, read: Filler | None
    ) -> list[Pass]:
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


class Pushes:
    """Pushes to some engines, one after another.

    Args:
        trainer: the ranks that push, with their engines.
        passes: what is sent.
        pause: what becomes of requests in flight; one of `PAUSES`.
        mode: of the first push, unless it says another.
        rounding: of merged weights.
        healing: of dirty engines, in words.
    """

    def __init__(
        self,
        trainer: Trainer,
        passes: Planner,
        *,
        pause: str,
        mode: str,
        rounding: str = "nearest",
        healing: str = "the next push heals them",
    ) -> None:
        self._trainer, self._passes, self._pause = trainer, passes, check_pause(pause)
        self._mode, self._rounding, self._healing = mode, rounding, healing
        self._closed = self._interrupted = False
        self._pushed: State | None = None
        self._told_of: set[int] = set()  # engines with calibrated caches
        self._lock = threading.Lock()

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
        if self._interrupted:  # a call that was under way then may have come after the end of that push
            await self._let_go()
        await self._trainer.close()

    async def _push(self, mode: str | None, verify: bool) -> SyncReport:
        if self._closed:
            name = type(self).__name__
            raise InvalidInput(f"this {name} was closed: make a new one, {name}(model, engine)")
        if not self._lock.acquire(blocking=False):
            raise PushRefused("another push is under way; two at the same time cannot both win")
        try:
            return await self._locked_push(self._mode if mode is None else mode, verify)
        except BaseException as error:
            self._interrupted = not isinstance(error, Exception)
            await self._let_go()
            raise
        finally:
            self._passes.release()  # read, perhaps, but not sent: a refusal, an adapter alone
            self._lock.release()

    async def _let_go(self) -> None:
        """Allow other trainers to push to the engines again."""
        controls = self._trainer.controls
        # An engine that is gone is nobody's.
        await side_by_side(controls, lambda control: control.rpc("end", owner=self._trainer.name), controls)

    async def _locked_push(self, mode: str, verify: bool) -> SyncReport:
        trainer, report = self._trainer, SyncReport(0, mode)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        with report.timed("check"):
            read: list[Filler | None] = []
            known = self._passes.known(mode)

            def beside() -> None:  # while engines elsewhere answer, as the push before left its settings
                read.append(self._passes.read(mode))

            replicas = await self._introduce(*known, beside)
            report.version = max(replica.state.version for replica in replicas) + 1
            slept = {replica.index: replica.asleep for replica in replicas if replica.asleep or replica.waking}
            try:
                if slept:
                    # Map the weights of sleeping engines; the KV cache follows after the push.
                    await trainer.everywhere(trainer.all_own(replicas, self._wake))
                    replicas = await self._introduce(*known)
                passes = await self._passes(replicas, report, verify, read[0])
                sources = [one.source for one in passes if not isinstance(one.source, Told)]
                if sources:
                    # What was pulled is compared with buckets of it.
                    compared = [source.stream for source in sources if isinstance(source, Pull) and verify]
                    nbytes, device = max(source.capacity for source in (*sources, *compared)), sources[0].device
                    apart = any(isinstance(source, Update) and source.apart for source in sources)
                    sent = verify or any(one.route.sent for one in passes)
                    await trainer.connect(replicas, nbytes, device, sent, apart)
                served = None if verify else trainer.served
                for source in sources:
                    if isinstance(source, Update) and not source.serves(served):
                        await self._serve(source, served)
            except BaseException:
                await self._sleep_again(replicas, slept)
                raise
        # Requests that are made from here on wait for what this push brings.
        self._mode, held = mode, {replica.index: replica.state for replica in replicas}
        try:
            with report.timed("pause"):
                await trainer.each(replicas, self._pause_one)
            for one in passes:
                await self._pass(one, report, verify, last=one is passes[-1])
        except BaseException:
            await self._back(replicas, held, passes[-1].state, slept)
            raise
        await trainer.share(replicas)
        brought = {replica.index: passes[-1].state for replica in replicas if not replica.error}
        with report.timed("resume"):
            await trainer.each(replicas, partial(self._resume, slept=slept), failed=True)
            await trainer.share(replicas)
        if any(replica.error for replica in replicas):
            await trainer.close()
            error = failure(replicas, self._healing, brought)
            self._passes.broke(error)
            raise error
        self._pushed, last = passes[-1].state, passes[-1].source
        table = last.stream.table if isinstance(last, Pull) else last.table
        report.nbytes = sum(slot.nbytes for slots in table for slot in slots)
        report.tensors = len(metas(table))
        kinds = {kind for one in passes for kind in trainer.kinds(one.route)}
        pulled = any(isinstance(one.source, Pull) for one in passes)
        report.transports = tuple(sorted(kinds | {"pull"} if pulled else kinds))
        shares = [replica.coverage for replica in replicas]
        report.coverage = None if None in shares else min(share or 0.0 for share in shares)
        report.reloaded = max((replica.reloaded for replica in replicas), default=0)
        if self._pushed.kind != "base":  # whose weights the scales are of
            report.calibrated = tell_of_calibrated(replicas, self._told_of)
        return report

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
            except Exception as error:
                raise PushRefused(
                    f"engine {index} does not answer as one of lora_merge's: {error}. If it does not know the method, "
                    f"is lora-merge installed where its workers run, and does {control.plugins} allow it?"
                ) from error
            elsewhere = (worker["pid"] for worker in workers if worker["host"] == host_id())
            control.workers = [pid for pid in elsewhere if pid != os.getpid()]
            introduced[index] = [worker | {"no_adapters": control.adapters} for worker in workers]

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
        claim = {"owner": self._trainer.name, "host": host_id(), "pid": os.getpid()}
        hello = self._hello(beside, claim=claim, streams=streams, updates=updates)
        for rank, introduced in enumerate(await self._trainer.everywhere(hello)):
            mine = rank == self._trainer.world.rank
            for index, workers in enumerate(introduced):
                control = self._trainer.controls[index] if mine else None
                replicas.append(Replica(len(replicas), control, workers))
        for replica in replicas:
            replica.check()
        check_whole(replicas)
        return replicas

    async def _serve(self, update: Update, served: Mapping[WorkerId, int] | None) -> None:
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
            try:
                await replica.handle.sleep(slept[replica.index])
            finally:
                # vLLM 0.26 takes one whose KV cache sleeps for asleep, and leaves its weights where they are, as a call
                # that fails does: then the next push has the KV cache alone to wake.
                if not any(worker["asleep"] for worker in await replica.handle.rpc("hello")):
                    await self._tell(replica, "note_pause", waking=True)

        await self._trainer.each([r for r in replicas if slept.get(r.index)], again, failed=True)

    async def _tell(self, replica: Replica, op: str, **message: Any) -> list[dict[str, Any]]:
        """Call an operation of this push in all workers of an engine; they refuse it if another trainer has claimed the
        engine."""
        return await replica.handle.rpc(op, trainer=self._trainer.name, **message)

    def _told(self, op: str, **message: Any) -> Call:
        """Make the same call as `_tell`, as one of several in a chain."""
        return Call("rpc", (op,), {"trainer": self._trainer.name, **message})

    async def _pause_one(self, replica: Replica) -> None:
        pause = Call("pause", (self._pause_of(replica),))
        if replica.stands:
            replica.paused_by_us = True
            await replica.handle.chain([pause])
            return
        # Said before: a call that ends here, in a timeout, takes effect there.
        calls = [Call("paused", wanted=(False,)), self._told("note_pause", paused=True), pause]
        stood: list[bool] = []
        try:
            await replica.handle.chain(calls, stood)
        finally:
            replica.paused_by_us = stood[:1] == [False]  # the user's pause stays

    def _pause_of(self, replica: Replica) -> str:
        """Decide what happens to requests in flight. A request keeps the adapter, or none, with which it began, and a
        change of mode replaces the weights that it needs: such requests end first, or, where the engine is paused on
        half-written weights, are ended at once."""
        switches = {replica.served, self._mode} == {"merged", "adapter"}
        if replica.stands and replica.state.kind == "dirty" and self._pause != "abort":
            return "abort" if switches else "keep"
        return "wait" if switches and self._pause == "keep" else self._pause

    async def _pass(self, one: Pass, report: SyncReport, verify: bool, last: bool) -> None:
        """Send one source to its replicas, or tell them what to do by themselves. Errors are noted in them.

        Args:
            last: of the push: caches of the old weights are reset meanwhile.
        """
        source, sent = one.source, None
        replicas = [replica for replica in one.replicas if not replica.error]
        name = one.state.adapter or f"{report.mode}@{report.version}"
        committed: set[int] = set()

        async def settle(replica: Replica, told: Call | None, whole: bool) -> None:
            commits = whole and not one.merges and not verify  # what is compared is so before
            await self._settle(replica, one, told, name if last else "", commits)
            if commits:
                committed.add(replica.index)

        with report.timed("transfer"):
            if isinstance(source, Told):
                await self._trainer.each(replicas, partial(self._do, told=source, settle=settle))
            else:
                sent = Verified(source.stream if isinstance(source, Pull) else source) if verify else source
                with source.passing():
                    await self._send(one, source, sent, replicas, settle)
        finish = partial(self._finish, one=one, sent=sent, committed=committed, name=name if last else "")
        with report.timed("finish"):
            await self._trainer.each(replicas, finish)

    async def _do(self, replica: Replica, told: Told, settle: _Settle) -> None:
        replica.begun = replica.begun or told.writes
        await settle(replica, self._told(told.op, **told.message), True)

    async def _settle(self, replica: Replica, one: Pass, told: Call | None, name: str, commits: bool) -> None:
        """Finish a pass in one replica with one chain of calls: workers run their operation, caches of the old weights
        are reset, and every worker records the new state.

        Args:
            told: the workers' operation; None for none.
            name: what the engine calls its weights from now on; "" if another pass of this push follows.
            commits: whether the pass ends here.
        """
        control, state = replica.handle, one.state
        calls = [] if told is None else [told]
        reset: int | None = None
        if name:
            # Nothing runs before `_resume`. Requests that were kept, by us or by a user's own pause, hold blocks of it.
            running = self._pause != "abort" or not replica.paused_by_us
            reset = len(calls)
            calls.append(Call("reset_prefix_cache", (running, replica.workers[0]["connector"]), wanted=(True,)))
            calls += [Call("reset_media_caches")] if replica.workers[0]["multimodal"] else []
            calls += [] if one.merges else self._names(name, state)  # else when it is merged
        if commits:
            calls.append(self._commit(state))
        returned = await control.chain(calls)
        if reset is not None and not returned[reset]:
            raise PushFailed(
                "the prefix cache could not be reset: requests hold blocks of the old weights; push with pause='keep', "
                "or when no request is in flight"
            )
        if commits:
            self._committed(replica, one, returned[-1])

    def _names(self, name: str, state: State) -> list[Call]:
        """Make the calls that tell an engine the name of what it serves from now on."""
        return [Call("label", (name,)), Call("name_adapter", (state.kind == "adapter",))] if name else []

    def _commit(self, state: State) -> Call:
        return self._told("commit", full=state.kind != "adapter")

    async def _send(
        self,
        one: Pass,
        source: Filler | Pull | AdapterSource | Update,
        sent: Sent,
        replicas: Sequence[Replica],
        settle: _Settle,
    ) -> None:
        """The transfer of a pass.

        Args:
            source: of the pass.
            sent: it, with checksums where these are asked for.
            settle: has each replica do its part, and what comes after it, beside the others; is told whether all has
                come when that is done.
        """
        state, verify = one.state, sent is not source
        run: dict[str, Any] = {"rounding": self._rounding if state.kind == "merged" else "nearest"}
        if run["rounding"] == "stochastic":
            run["seed"] = state.version

        changed = None if one.changed is None else sorted(one.changed)
        begin = {"state": state.to_json(), "changed": changed}

        async def prepare(replica: Replica, route: Route) -> None:
            if isinstance(source, Update | Pull):
                return  # nothing changes before all workers have it, or are told to read
            replica.begun = True
            if isinstance(source, Filler):
                await self._tell(replica, "start", digest=source.digest, sent=bool(route.sent), **begin)

        async def receive(replica: Replica, route: Route) -> None:
            message: dict[str, Any] = {"sessions": self._trainer.sessions, "verify": verify}
            told: Call | None = None
            if isinstance(source, Pull):
                replica.begun = True
                message |= {"scalings": source.scalings, "run": run}
                told = self._told("pull", digest=source.offered, **begin, **message)
            elif isinstance(source, AdapterSource):
                table = to_json(source.table)
                told = self._told("adapter", table=table, rank=source.rank, state=state.to_json(), **message)
            elif isinstance(source, Update):
                message |= {"scalings": source.scalings, "comes": self._trainer.told(replica, route)}
                told = self._told("update", digest=source.digest, **message)
            elif route.sent:
                placed = sorted(route.placed.intersection(route.sent))
                told = self._told("receive", sent=route.sent, placed=placed, **message)
            await settle(replica, told, not route.placed)  # what is placed may be on its way still

        if not isinstance(source, Pull):
            await self._trainer.transfer(sent, run, replicas, one.route, prepare, receive)
            return
        beside = Verified(source) if verify else source
        await self._trainer.transfer(beside, run, replicas, one.route, prepare, receive, source.settle)
        if isinstance(beside, Verified):
            await self._compare(source.stream, beside, sent, run, replicas)

    async def _compare(
        self, stream: Filler, beside: Verified, sent: Sent, run: Mapping[str, Any], replicas: Sequence[Replica]
    ) -> None:
        """Also hand over, in buckets that workers only compare, what was pulled.

        Args:
            beside: what came in buckets.
            sent: the stream.
        """

        async def prepare(replica: Replica, route: Route) -> None:
            await self._check_arrived(replica, beside)

        async def receive(replica: Replica, route: Route) -> None:
            message = {"sessions": self._trainer.sessions, "verify": True, "sent": route.sent, "placed": route.sent}
            await self._tell(replica, "receive", **message)

        left, every = [replica for replica in replicas if not replica.error], range(len(stream.table))
        await self._trainer.transfer(sent, run, left, Route(frozenset(every), tuple(every)), prepare, receive)

    async def _finish(
        self, replica: Replica, one: Pass, sent: Sent | None, committed: Container[int], name: str
    ) -> None:
        """End a pass in a replica that is not among `committed`: workers that merge by themselves do so when all of
        them have what has come, others when the trainer has written all, and what has come is compared where that was
        asked for."""
        if replica.index not in committed:
            replica.begun = replica.begun or one.merges
            ends = [self._commit(one.state)]
            if one.merges:
                ends = [self._told("merge", state=one.state.to_json()), *self._names(name, one.state)]
            self._committed(replica, one, (await replica.handle.chain(ends))[0])
        if isinstance(sent, Verified):
            await self._check_arrived(replica, sent)

    def _committed(self, replica: Replica, one: Pass, answers: Sequence[Mapping[str, Any]]) -> None:
        """Check that every worker holds the new state.

        Args:
            answers: the workers'.
        """
        state = one.state
        held = {answer["rank"]: answer["state"] for answer in answers}
        replica.workers = [worker | {"state": held[worker["rank"]]} for worker in replica.workers]
        shares = [written / elements if elements else None for written, elements in (a["elements"] for a in answers)]
        replica.coverage = None if None in shares else min(share or 0.0 for share in shares)
        replica.reloaded = max(a["reloaded"] for a in answers) if one.merges or state.kind != "adapter" else 0
        if replica.state != state:
            raise PushFailed(f"the engine holds {replica.state}, not {state}: push again")

    async def _check_arrived(self, replica: Replica, sent: Verified) -> None:
        """Raise `PushFailed` unless what came last is what was sent."""
        route = Route.of_buckets(sent)
        for at, answer in enumerate(await self._tell(replica, "verified")):
            taken = {slot.name for index in route.by({(replica.index, at)}) for slot in sent.table[index]}
            wrong = [name for name in taken if answer["checksums"].get(name) != sent.checksums[name]]
            wrong += answer["damaged"]
            if wrong:
                raise PushFailed(
                    f"these tensors did not arrive as they were sent: {', '.join(sorted(set(wrong)))}; push again, and "
                    "report it if that does not help"
                )

    async def _back(
        self, replicas: Sequence[Replica], held: Mapping[int, State], brought: State, slept: Mapping[int, int]
    ) -> None:
        """After an interrupted push, resume engines that hold what they held before, or everything that it was to
        bring; others, including dirty ones, stay as they are until the next push.

        Args:
            held: by replicas before it.
            slept: as of `_resume`.
        """

        async def back(replica: Replica) -> None:
            replica.workers = await replica.handle.rpc("hello")
            if replica.state not in (held[replica.index], brought) or replica.state.kind == "dirty":
                return
            replica.paused_by_us = replica.paused_by_us or replica.stands
            replica.error, replica.begun = "interrupted", False  # what it holds says the rest
            await self._resume(replica, slept)

        await self._trainer.each([replica for replica in replicas if replica.control is not None], back, failed=True)

    async def _resume(self, replica: Replica, slept: Mapping[int, int]) -> None:
        """Put a failed engine into a defined state; another one wakes and resumes, if this push woke and paused it.

        A dirty engine serves nothing: it stays paused, or without its KV cache, until a push has healed it. One to
        which nothing was written goes back to where it was.

        Args:
            slept: engines that this push woke -> the level at which their weights slept (0: the KV cache alone did).
        """
        control, asleep = replica.handle, replica.index in slept
        notes: dict[str, bool] = {}
        calls: list[Call] = []
        if replica.error and replica.begun:
            await self._tell(replica, "abort", reason=f"a push failed: {replica.error}")
        if (replica.error and replica.begun) or replica.state.kind == "dirty":
            if asleep:
                notes["waking"] = True
        else:
            notes["serves"] = True
            if asleep and replica.error:
                await self._sleep_again([replica], slept)
            elif asleep:
                # Said before: where waking it fails, the weights are awake, and nothing else tells the next push.
                await self._tell(replica, "note_pause", waking=True)
                await control.wake("kv_cache")
                notes["waking"] = False
            if replica.paused_by_us:
                calls.append(Call("resume"))
                # A pause that timed out may take effect yet: the next push then knows that it is none of the user's.
                notes["paused"] = bool(replica.error)
        await control.chain([*calls, Call("rpc", ("end",), {"owner": self._trainer.name, **notes})])


def check_pause(pause: str) -> str:
    """Raise `InvalidInput` unless `pause` is "keep", "wait" or "abort"."""
    if pause not in PAUSES:
        raise InvalidInput(f"pause must be one of {', '.join(PAUSES)}, got {pause!r}")
    return pause
