"""A push, from top to bottom. `Pusher._locked_push` has the steps; each says which messages it sends, what workers do
then, and what a failure leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import is_not
from typing import Any

import torch

from ...choices import Cache, Lost, Pause, Rounding
from ...errors import InvalidInput, PushFailed, PushRefused
from ...shards.ranks import RankLost
from ...stream.bucket_writer import BucketWriter
from ...stream.buckets import Table, metas
from ..control.calls import drive, side_by_side
from ..lease import lease_of, under_way
from ..messages import WorkerInfo
from ..state import State
from .channels import Trainer
from .heartbeat import Heartbeat
from .introduction import hello, replicas_of
from .planner import Planner, Transfer
from .replica import SILENT, Replica, SyncReport, engines_of, failure
from .sequence import EngineSequence
from .sharing import Sharing
from .transfer import TransferRun
from .warn import warn_of_calibrated, warn_of_differences, warn_of_lost, warn_of_others

ATTEMPTS = 3
"""How often a push that goes on without lost engines begins anew, as one was lost in the middle of it."""


class Pusher:
    """Pushes to some engines, one after another.

    Args:
        trainer: the ranks that push, with their engines.
        pause, cache: what becomes of requests in flight, and of their KV cache.
        mode: of the first push, unless it says another.
        healing: of dirty engines, in words.
        computing: how the trainer's model computes, see `computing` in configs.py.
        lost: what a push does about engines that cannot be reached; see `VllmSync`.

    Attributes:
        sharing: what the trainer and an engine of its process hold once; None where they share nothing.
    """

    def __init__(
        self,
        trainer: Trainer,
        planner: Planner,
        *,
        pause: Pause,
        cache: Cache = "reset",
        mode: str,
        rounding: Rounding = "nearest",
        healing: str = "the next push heals them",
        computing: Callable[[], Mapping[str, Any]] = dict,
        lost: Lost = "refuse",
    ) -> None:
        self._trainer, self._planner, self._sequence = trainer, planner, EngineSequence(trainer.name, pause, cache)
        self._mode, self._rounding, self._healing = mode, rounding, healing
        self._computing, self._warned = computing, set[tuple[int, str]]()
        self._closed = self._held = False
        self._pushed: State | None = None
        self._floor = 0  # the last version that requests could name: an engine that was started anew counts from 1
        self._lost, self._warned_of_lost = lost, dict[int, str]()
        self._gone: Mapping[int, str] = {}  # the engines that are left out of this push -> why
        self._present = frozenset[int]()  # the others
        self._counted: tuple[list[Table], int, int] = ([], 0, 0)  # the last push's tables, their tensors and bytes
        self.sharing: Sharing | None = None
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
        introduced = await hello(self._trainer)
        return [Replica(index, None, workers).state for index, workers in enumerate(introduced)]

    def close(self, *, meta: bool = False) -> None:
        """Free buffers and mapped memory, first those of the workers. Collective. No push is possible after it.

            sync.close()

        For an `AsyncLLM` await `aclose`. With `share=True` the base comes back bit for bit, and the model gets memory
        of its own; the engine is dirty until another push.

        Args:
            meta: leave parameters that were shared on meta instead, without values, where there is no memory for them.
        """
        drive(self.aclose(meta=meta))

    async def aclose(self, *, meta: bool = False) -> None:
        """Free buffers and mapped memory, in the event loop of an `AsyncLLM`; see `close`."""
        self._closed = True
        if self.sharing is not None:
            self.sharing.close(meta)
        if self._held:
            await self._let_go()
        await self._trainer.close()

    async def _push(
        self, mode: str | None, verify: bool, within: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> SyncReport:
        """Push.

        Args:
            within: makes the context in which it runs, when no other push is under way.
        """
        if self._closed:
            name = type(self).__name__
            raise InvalidInput(f"this {name} was closed: make a new one, {name}(model, engine)")
        if not self._lock.acquire(blocking=False):
            raise PushRefused("another push is under way; two at the same time cannot both win")
        try:
            with under_way(self._trainer.name), within():
                return await self._push_to_those_left(self._mode if mode is None else mode, verify)
        except BaseException as error:
            # A call that an interrupt has left under way may take the lease again: `aclose` ends it once more.
            self._held = not await self._let_go() or not isinstance(error, Exception)
            if isinstance(error, RankLost):
                raise await self._without_rank(error) from error
            raise
        finally:
            self._planner.release()  # what was read and not sent: after a refusal, or for an adapter alone
            self._lock.release()
            await self._beats.end()

    async def _let_go(self) -> bool:
        """End this trainer's lease of all engines; return True if all have answered."""
        controls = self._trainer.controls
        errors = await side_by_side(controls, lambda control: control.rpc("end", owner=self._trainer.name), controls)
        return not any(errors)

    async def _without_rank(self, lost: RankLost) -> PushFailed:
        """Make the error for a push in which these ranks have lost another one: none of them can push any more."""
        try:
            states = [f"engine {index}: {state}" for index, state in enumerate(await self.astates())]
            held = f"Now {'; '.join(states)}" if states else "What engines hold, the ranks with their handles say"
        except PushRefused as error:
            held = f"What engines hold is not known ({error})"
        step = f" in the step {lost.step!r}" if lost.step else ""
        return PushFailed(
            f"the push broke off{step}, as this rank of the trainer could not go on without another one: {lost}. "
            f"{held}. Dirty engines stay paused; {self._healing}. Start all ranks of the trainer anew, and push again"
        )

    async def _push_to_those_left(self, mode: str, verify: bool) -> SyncReport:
        """Push. If lost engines are left out, and the push broke off because it lost some, push to the others anew.
        Then all of them hold the same, whatever the first attempt left in them."""
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._locked_push(mode, verify)
            except RankLost:
                raise
            except Exception as error:
                if self._lost == "refuse" or not await self._lost_more(error):
                    raise
            self._planner.release()
        return await self._locked_push(mode, verify)

    async def _lost_more(self, error: Exception) -> bool:
        """Return True if engines that took part in a push which failed cannot be reached any more, and others can. The
        same on every rank. Collective: a push that fails does so on every rank, if not with the same kind of error."""
        trainer, lost = self._trainer, dict[int, str]()
        if not all(await trainer.gather(isinstance(error, PushRefused | PushFailed))):
            return False

        async def ask() -> list[bool]:
            return [bool(workers) for workers in await hello(trainer, lost=lost)]

        try:
            everyone = await trainer.everywhere(ask())
        except PushRefused:
            return False
        answering = {index for index, there in enumerate(there for some in everyone for there in some) if there}
        return bool(answering) and not answering >= self._present

    async def _locked_push(self, mode: str, verify: bool) -> SyncReport:
        report = self._begin(mode)
        # 1. Ask, check, plan, connect. A failure leaves every engine as it was: `PushRefused`.
        with report.timed("check"):
            replicas, transfers = await self._prepare(report, verify)
        await self._carry_out(report, replicas, transfers, verify)
        return report

    def _begin(self, mode: str) -> SyncReport:
        self._present = frozenset()
        self._sequence.begin(self._trainer.name)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return SyncReport(0, mode)

    async def _carry_out(
        self, report: SyncReport, replicas: Sequence[Replica], transfers: Sequence[Transfer], verify: bool
    ) -> None:
        """Do what `_prepare` has planned. Engines to which nothing is sent are not paused."""
        trainer, mode = self._trainer, report.mode
        last, held = transfers[-1], {replica.index: replica.state for replica in replicas}
        name = last.state.adapter or f"{last.state.kind}@{report.version}"
        sent = {replica.index for one in transfers for replica in one.replicas}
        report.cache = "keep" if all(map(self._sequence.keeps, replicas)) else "reset"
        # Engines that compute together resume together, when all ranks know that none has failed. Any other one resumes
        # with the last message of the last transfer.
        through = {one.index for one, *others in engines_of(replicas) if not others and one.slept is None}
        before, self._mode = self._mode, mode  # requests that are made from here on wait for what this push brings
        try:
            # 2. Pause: "note_pause", and the engine's own pause. With `pause="keep"` both go with the first message of
            #    the transfer. A failure leaves the engine with its old weights; step 4 resumes it.
            with report.timed("pause"):
                pause = partial(self._sequence.pause, mode=mode, brought=last.state)
                await trainer.each([replica for replica in replicas if replica.index in sent], pause)
            # 3. Transfer (transfer.py): "begin_full", then "receive", "pull", "receive_adapter" or "receive_update", at
            #    the end "merge" or "commit". A worker is dirty from its first write to its commit, and so is an engine
            #    that fails there: it stays paused. The others go on.
            for one in transfers:
                ends = one is last
                run = TransferRun(
                    trainer,
                    self._sequence,
                    one,
                    rounding=self._rounding,
                    verify=verify,
                    name=name if ends else "",
                    through=through if ends and not verify else (),
                )
                await run(report)
            await trainer.share(replicas)
        except BaseException:
            # Interrupted, or a rank is lost: what an engine holds now decides whether it resumes.
            await self._back(replicas, held, last.state, name)
            self._keep_mode(before, replicas, held)
            raise

        # 4. Resume the engines that have not resumed by now: "end", which also ends the lease. One that failed is put
        #    into a defined state: "abort" where something was written to it, a resume where nothing was. One that only
        #    fails to resume holds the new weights.
        holding = {r.index: last.state for r in replicas if not r.error or r.resume_error}
        with report.timed("resume"):
            await trainer.each(replicas, self._sequence.go_on, failed=True)
            await trainer.share(replicas)
        if any(replica.error for replica in replicas):
            self._keep_mode(before, replicas, held)
            await trainer.close()
            error = failure(replicas, self._healing, holding)
            lost = all(replica.error.startswith(SILENT) for replica in replicas if replica.error)
            if self._lost == "refuse" or not lost:
                self._planner.broke(error)
            raise error
        self._pushed = last.state
        self._fill(report, replicas, transfers)

    async def _prepare(self, report: SyncReport, verify: bool) -> tuple[list[Replica], list[Transfer]]:
        """Ask the engines what they are, wake them, plan what is sent to whom, and open the channels."""
        known, read = self._planner.known(report.mode), list[BucketWriter | None]()
        slept: dict[int, int] = {}

        def read_model() -> None:  # while engines elsewhere answer, as the push before left its settings
            read.append(self._planner.read(report.mode))

        # "hello": workers say what they are and hold, and take the lease.
        replicas = await self._meet(report, known, read_model)
        try:
            while asleep := [r for r in replicas if (r.asleep or r.waking) and r.slept is None]:
                for replica in asleep:
                    slept[replica.index] = replica.slept = replica.asleep
                # Map the weights of sleeping engines; the KV cache follows after the push.
                await self._trainer.everywhere(self._trainer.all_own(replicas, self._wake))
                replicas = await self._meet(report, known)
                for replica in replicas:
                    replica.slept = slept.get(replica.index)
                if still := [str(r.index) for r in replicas if r.asleep and r.slept is not None]:
                    raise PushRefused(
                        f"engine {', '.join(still)} was woken, and its weights sleep: does something else put it to "
                        "sleep meanwhile, or does its URL lead /wake_up to another engine? Nothing was sent; push again"
                    )
            # "dry_run" and the like (compatibility.py, negotiators.py), where "hello" has not answered them.
            transfers = await self._planner(replicas, report, verify, read[0])
            # "connect", where the channels of the push before do not serve.
            await self._connect(replicas, transfers, verify)
        except BaseException:
            woken = [replica for replica in replicas if replica.slept is not None]
            await self._trainer.each(woken, self._sequence.sleep_again, failed=True)
            raise
        return replicas, transfers

    async def _meet(
        self, report: SyncReport, known: tuple[Sequence[str], Sequence[str]], work: Callable[[], None] | None = None
    ) -> list[Replica]:
        """Introduce the engines, check them, and note in the report what they say: the version, and who is left out.
        A push may meet them several times, and each time others may be lost, or be back.

        Args:
            known: `streams` and `updates` of `_introduce`.
            work: see `hello`.
        """
        replicas = await self._introduce(*known, work)
        for replica in replicas:
            self._sequence.check(replica)
        report.differs = warn_of_differences(replicas, self._computing(), self._warned)
        report.skipped = self._gone
        # A later part of the same push keeps the number, unless an engine has had it, or a higher one, from elsewhere.
        if any(r.newest >= report.version or r.state.version > report.version for r in replicas):
            report.version = max(self._floor, *(max(r.state.version, r.newest) for r in replicas)) + 1
        if self._lost == "skip":
            # An engine may be lost with this version, and come back when another push of the others has had the number.
            self._floor = report.version
        return replicas

    async def _introduce(
        self, streams: Sequence[str] = (), updates: Sequence[str] = (), work: Callable[[], None] | None = None
    ) -> list[Replica]:
        """Collect what every engine of every rank says about itself, and take the lease of each for this push.

        Args:
            streams, updates: digests of tables, and of updates, that engines say at once what they know of.
            work: see `hello`.
        """
        claim, lost = lease_of(self._trainer.name, self._sequence.push), dict[int, str]()
        skipped = None if self._lost == "refuse" else lost

        async def ask() -> tuple[list[list[WorkerInfo]], dict[int, str]]:
            message = {"claim": claim, "streams": streams, "updates": updates}
            return await hello(self._trainer, work, lost=skipped, **message), lost

        everyone = await self._trainer.everywhere(ask())
        self._beats.begin(self._trainer.controls)
        replicas, self._gone = replicas_of(self._trainer, everyone)
        self._present = frozenset(replica.index for replica in replicas)
        warn_of_lost(self._gone if self._trainer.world.rank == 0 else {}, self._warned_of_lost)
        return replicas

    async def _connect(self, replicas: Sequence[Replica], transfers: Sequence[Transfer], verify: bool) -> None:
        payloads = [one.payload for one in transfers]
        buckets = [sent for p in payloads for sent in (p.sent, p.compared if verify else None) if sent is not None]
        if buckets:
            nbytes, separate = max(sent.capacity for sent in buckets), any(p.separate for p in payloads)
            handed_over = verify or any(one.route.sent for one in transfers)
            await self._trainer.connect(replicas, nbytes, buckets[0].device, handed_over, separate)
        served = None if verify else self._trainer.served
        for payload in payloads:
            if payload.serves(served):
                continue
            # Each rank collects the part that it sends; all of it where every rank makes checksums.
            serve = partial(payload.serve, served, self._trainer.world.rank)
            try:
                await self._trainer.everywhere(self._trainer.blocking(serve))
            except BaseException:
                payload.forget()  # other ranks may have failed where this one did not
                raise

    async def _wake(self, replica: Replica) -> None:
        if replica.asleep:
            # Noted before: if this trainer dies, the next push finds the weights awake, and wakes the KV cache too.
            await self._sequence.tell(replica, "note_pause", waking=True)
            await replica.handle.wake("weights")

    def _fill(self, report: SyncReport, replicas: Sequence[Replica], transfers: Sequence[Transfer]) -> None:
        """Note in the report what came of a push that has ended well."""
        state = transfers[-1].state
        # Without those of the base that goes first. Tenants follow merged weights.
        tables = [one.payload.contents for one in transfers if one.state.kind == state.kind]
        if len(tables) != len(self._counted[0]) or any(map(is_not, tables, self._counted[0])):
            slots = [slot for table in tables for slots in table for slot in slots]
            self._counted = tables, sum(len(metas(table)) for table in tables), sum(slot.nbytes for slot in slots)
        report.tenants = state.tenants
        if state.kind != "adapter":
            report.others = warn_of_others(replicas, self._warned)
        _, report.tensors, report.nbytes = self._counted
        if self.sharing is not None:
            report.shared = self.sharing.shared
            report.nbytes -= report.shared
        kinds = {kind for one in transfers for kind in (*self._trainer.kinds(one.route), one.payload.transport)}
        report.transports = tuple(sorted(kinds - {""}))
        shares = [replica.coverage for replica in replicas]
        report.coverage = None if None in shares else min(share or 0.0 for share in shares)
        report.reloaded = max((replica.reloaded for replica in replicas), default=0)
        if state.kind != "base":  # whose weights the scales are of
            report.calibrated = warn_of_calibrated(replicas, self._warned)

    def _keep_mode(self, mode: str, replicas: Sequence[Replica], held: Mapping[int, State]) -> None:
        """Set the mode back after a push that left every engine as it was.

        Args:
            mode, held: before the push: the mode, and what replicas held.
        """
        if all(not replica.begun and replica.state == held[replica.index] for replica in replicas):
            self._mode = mode

    async def _back(self, replicas: Sequence[Replica], held: Mapping[int, State], brought: State, name: str) -> None:
        """Resume the engines that hold what they held before an interrupted push, or all that it was to bring. Others,
        dirty ones among them, stay as they are until the next push; so do engines that compute together with one of
        these, or with one whose handle is not here.

        Args:
            brought, name: the state and the name that the push was to bring.
        """
        well: set[int] = set()

        async def ask(replica: Replica) -> None:
            replica.workers = [WorkerInfo.read(answer) for answer in await replica.handle.rpc("hello")]
            if replica.state == brought:
                await self._sequence.catch_up(replica, brought, name)
            if replica.state in (held[replica.index], brought) and replica.state.kind != "dirty":
                well.add(replica.index)

        async def back(replica: Replica) -> None:
            replica.paused_by_us = replica.paused_by_us or replica.still_paused
            replica.error, replica.begun = "interrupted", replica.index not in well
            await self._sequence.go_on(replica)

        await self._trainer.each(replicas, ask, failed=True)
        for engine in engines_of(replicas):
            if len(engine) > 1 and not well.issuperset(replica.index for replica in engine):
                well.difference_update(replica.index for replica in engine)
                await self._trainer.each(engine, back, failed=True)  # dirty
        await self._trainer.each([replica for replica in replicas if replica.index in well], back, failed=True)
