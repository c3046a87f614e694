"""Pushes of an adapter as a new version beside those before it (`keep`): nothing is paused, and no cache is reset.

1. Every worker of every engine receives the version, while the engine generates. One that fails leaves nothing.
2. Every engine adds it: its workers, then its core (vllm/kept_requests.py), then its API server. If one
   fails, the others take it back, and all answer with the version before.
3. Requests that are made from now on get it (`lora_request`). Those in flight have the version that they began with.
4. Versions beyond the last `keep` leave: at once where no request has them, else when a later push finds that.

An engine without this base gets it first, in a push of its own: paused, and with all caches reset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from ...errors import InvalidInput, LoraMergeError, PushFailed, PushRefused
from ...logs import LOG
from ..adapter_versions import name_of, path_of
from ..control.base import Call
from ..state import State
from ..tenants import stale_requests
from ..transport.liveness import error_text
from .planner import Transfer
from .pusher import ATTEMPTS, Pusher
from .replica import Replica, SyncReport
from .transfer import TransferRun


class VersionPusher(Pusher):
    """Pushes, with `keep` in adapter mode as versions."""

    _keep = 0
    _versions: tuple[State, ...] = ()  # which every engine keeps, oldest first

    def _version(self, version: int | None) -> State | None:
        """Return a version that requests may ask for; None where adapters are not pushed as versions.

        Args:
            version: its number; None for the newest.

        Raises:
            InvalidInput: it is not kept.
        """
        if not self._keep or self._mode == "merged":
            if version is not None:
                raise InvalidInput(
                    f"version must be None, got {version}: engines keep no versions of an adapter here; push with "
                    "mode='adapter' and keep="
                )
            return None
        if not self._versions:
            raise InvalidInput("no version of the adapter is in every engine: push() first")
        numbers = [state.version for state in self._versions]
        if version is None:
            return self._versions[-1]
        if version not in numbers:
            raise InvalidInput(
                f"version must be one of those that are kept, {', '.join(map(str, numbers))}; got {version}"
            )
        return self._versions[numbers.index(version)]

    async def _locked_push(self, mode: str, verify: bool) -> SyncReport:
        self._planner.keep = self._keep if mode == "adapter" else 0
        if mode == "adapter" and len(keeps := set(await self._trainer.gather(self._keep))) > 1:
            raise PushRefused(
                f"the trainer's ranks keep different numbers of versions: keep= {', '.join(map(str, sorted(keeps)))}. "
                "Give the same on each"
            )
        if not self._planner.keep:
            report = await super()._locked_push(mode, verify)
            self._versions = ()
            return report
        report, based = self._begin(mode), dict[int, str]()
        try:
            await self._bring(report, verify, based)
        except PushRefused as error:
            if not based:
                raise
            whose = ", ".join(f"engine {index} ({state})" for index, state in based.items())
            raise PushFailed(
                f"{error}. Before that, this push has brought the base to {whose}, and no version has followed: "
                "requests without an adapter are answered by the bare base there"
            ) from error
        return report

    async def _bring(self, report: SyncReport, verify: bool, based: dict[int, str]) -> None:
        """Bring the base to engines that lack it, and then a version to all.

        Args:
            based: gets which engines hold the base alone meanwhile, by index.
        """
        written: tuple[float | None, int] = None, 0
        for _ in range(ATTEMPTS):
            with report.timed("check"):
                replicas, transfers = await self._prepare(report, verify)
            if transfers[-1].state.kind != "base":
                break
            await self._bring_base(report, replicas, transfers, verify)
            based |= {replica.index: str(transfers[-1].state) for replica in transfers[-1].replicas}
            written = report.coverage, report.reloaded
        else:  # one that is back, another trainer in between
            whose = ", ".join(f"engine {replica.index}" for replica in transfers[-1].replicas)
            raise PushRefused(
                f"the base was gone again {ATTEMPTS} times before the version came, the last time in {whose}"
            )
        await self._add(report, replicas, transfers[-1], verify)
        self._fill(report, replicas, transfers)
        report.coverage, report.reloaded = written

    async def _bring_base(
        self, report: SyncReport, replicas: Sequence[Replica], transfers: Sequence[Transfer], verify: bool
    ) -> None:
        """Bring the base to some engines. The others answer with their versions meanwhile."""
        base, pushed = transfers[-1].state, self._pushed
        without = {replica.index for replica in transfers[-1].replicas}
        stay = [replica.kept for replica in replicas if replica.index not in without]
        self._versions = tuple(one for one in self._versions if stay and all(one in kept for kept in stay))
        await self._carry_out(report, replicas, transfers, verify)
        self._pushed = pushed or replace(base, kind="adapter")  # the base alone is not what was asked for

    async def _add(self, report: SyncReport, replicas: Sequence[Replica], one: Transfer, verify: bool) -> None:
        """Add a version to all engines, or to none."""
        trainer, state = self._trainer, one.state
        for replica in replicas:
            replica.paused_by_us = replica.still_paused  # a push that failed, or whose trainer died, has left it so
            if replica.still_paused:  # perhaps with requests for what was merged before the base came
                replica.to_adapter = True if replica.began == "merged" else None
                replica.stale = stale_requests(replica.served_tenants, state.tenants)
        switching = False
        try:
            run = TransferRun(trainer, self._sequence, one, rounding=self._rounding, verify=verify, name="", through=())
            await run(report)
            await trainer.share(replicas)
            if not any(replica.error for replica in replicas):
                switching = True
                with report.timed("switch"):
                    await trainer.each(replicas, partial(self._switch, state=state))
                    await trainer.share(replicas)
        except BaseException:  # interrupted, perhaps on this rank alone
            await self._take_back(replicas, state, switching)
            raise
        if any(replica.error for replica in replicas):
            causes = {replica.index: replica.error for replica in replicas if replica.error}
            stuck: dict[int, str] = {}
            for known in await trainer.gather(await self._take_back(replicas, state, switching)):
                stuck |= known
            await trainer.close()
            raise _taken_back(state, causes, stuck)
        self._floor, self._pushed, self._mode = report.version, state, report.mode
        stay = [[*replica.kept, state][-self._keep :] for replica in replicas]
        self._versions = tuple(version for version in stay[0] if all(version in kept for kept in stay))
        report.versions = tuple(version.version for version in self._versions)
        with report.timed("resume"):
            await trainer.each(replicas, partial(self._trim, state=state))
            for replica in replicas:
                if replica.error:
                    LOG.warning(
                        "engine %d has the new version, and keeps older ones until the next push: %s",
                        replica.index,
                        replica.error,
                    )
                    replica.error = ""
            await trainer.each(replicas, self._sequence.go_on)
            await trainer.share(replicas)
        if failed := [replica for replica in replicas if replica.error]:
            raise PushFailed(
                f"engine {failed[0].index} holds {state}, but going on with it failed: {failed[0].error}. Push again"
            )

    async def _switch(self, replica: Replica, state: State) -> None:
        """Make a version that its workers have received the newest of an engine."""
        path = path_of(state)
        add = self._sequence.make_call("add_version", state=state.to_json(), preload=replica.handle.preloads)
        # One that stands still has requests, perhaps, for versions that have gone: they would end it when it goes on.
        leaving = replica.workers[0].leaving if replica.still_paused else ()
        stay = [path_of(one) for one in (*leaving, *replica.kept)]
        calls = [add, Call("allow_adapters", ([*stay, path], replica.still_paused))]
        if not replica.handle.preloads:
            calls.append(Call("name_version", (name_of(state.version), path)))
        await self._sequence.make(replica, calls)

    async def _trim(self, replica: Replica, state: State) -> None:
        """Let versions beyond the last ones leave an engine."""
        kept = [*replica.kept, state]
        leave = {path_of(one) for one in [*replica.workers[0].leaving, *kept[: -self._keep]]}
        if not leave:
            return
        call = Call("allow_adapters", ([path_of(one) for one in kept[-self._keep :]], False))
        _, in_use = await self._sequence.make(replica, [self._sequence.make_call("renew_lease"), call])
        gone, leaving = sorted(leave.difference(in_use)), sorted(leave.intersection(in_use))
        await self._sequence.tell(replica, "remove_versions", paths=gone, leaving=leaving)

    async def _take_back(self, replicas: Sequence[Replica], state: State, switching: bool) -> dict[int, str]:
        """Have the engines whose handles are here drop a version that not all have.

        Args:
            switching: whether some may have added it.

        Returns:
            why engines could not, by index.
        """
        stuck: dict[int, str] = {}

        async def back(replica: Replica) -> None:
            if replica.lost:  # another trainer's by now
                return
            replica.queued_calls = []
            remove = self._sequence.make_call("remove_versions", paths=[path_of(state)])
            allow = Call("allow_adapters", ([*map(path_of, replica.kept)], False))
            door = [self._sequence.make_call("renew_lease"), allow] if switching else []
            try:
                await self._sequence.make(replica, [*door, remove])
            except Exception as error:
                stuck[replica.index] = error_text(error)

        await self._trainer.each(replicas, back, failed=True)
        for replica in replicas:
            replica.error = replica.error or "another engine failed"  # those that slept sleep again
            replica.paused_by_us = False  # one that stood still stays so, with its requests, until a push is through
        await self._trainer.each(replicas, self._sequence.go_on, failed=True)
        return stuck


def _taken_back(state: State, causes: Mapping[int, str], stuck: Mapping[int, str]) -> LoraMergeError:
    """Return the error for a version that not all engines have.

    Args:
        causes: what failed, by index of the engine.
        stuck: why engines could not drop it.
    """
    said = "; ".join(f"engine {index}: {error}" for index, error in causes.items())
    if stuck:
        whose = ", ".join(f"engine {index} ({error})" for index, error in stuck.items())
        return PushFailed(
            f"{said}. Version {state.version} was taken back, but not in {whose}, of which it is not known what it "
            "answers with. Start an engine that has died anew, and push again"
        )
    return PushRefused(
        f"{said}. Version {state.version} was taken back: every engine answers with what it held before. Push again"
    )
