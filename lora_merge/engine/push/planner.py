"""What a push sends to whom: all merged weights; or the base where an engine lacks it, and after it an adapter, or what
training has changed, which the engine merges by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ...choices import Merge
from ...errors import LoraMergeError, PushRefused, UnsupportedAdapter
from ...models.live import live
from ...models.part import Learning
from ...stream.bucket_writer import BucketWriter
from ...stream.weights import MergedWeights
from ..payload.adapter import AdapterSource
from ..payload.base import Payload, WeightsPayload
from ..payload.checksums import Fingerprint
from ..payload.pull import Unmoved
from ..payload.update import UpdatePayload
from ..payload.version import VersionPayload
from ..state import State
from ..transport.routing import Route
from .channels import Trainer
from .compatibility import CompatibilityCheck
from .negotiators import AdapterNegotiator, PullNegotiator, UpdateNegotiator
from .replica import Replica, SyncReport, engines_of

_NOWHERE = Route(frozenset(), ())


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer of a push: a payload, and the replicas that get it.

    Args:
        state: what the replicas hold after it.
        route: how its buckets reach engines in other processes.
        changed: see `Terms`.
    """

    state: State
    payload: Payload
    replicas: Sequence[Replica]
    route: Route = _NOWHERE
    changed: frozenset[str] | None = None


class Planner:
    """Plans what a push sends to which engines.

    Attributes:
        keep: how many versions of an adapter engines are to keep in adapter mode; 0: one adapter, which each push
            replaces.
    """

    keep = 0

    def read(self, mode: str) -> BucketWriter | None:
        """Read what a push most likely begins with, while engines say who they are. Collective."""
        return None

    def known(self, mode: str) -> tuple[list[str], list[str]]:
        """Return digests of the tables of what it most likely begins with, and of updates, that engines are asked for
        when they introduce themselves."""
        return [], []

    async def __call__(
        self, replicas: Sequence[Replica], report: SyncReport, verify: bool, read: BucketWriter | None
    ) -> list[Transfer]:
        """Return what has to be sent to whom; everything that can be checked is checked then.

        Args:
            report: has the mode and the version; gets what is left out, and who merges.
            verify: everything goes in buckets, too.
            read: what `read` returned.

        Raises:
            PushRefused: something does not fit; every engine is as before.
        """
        raise NotImplementedError

    def broke(self, error: BaseException) -> None:
        """Note that a push has failed in some engine."""

    def release(self) -> None:
        """Release all streams, as `MergedWeights.release`."""


class PushPlanner(Planner):
    """Plans the transfers of the pushes of a model.

    Args:
        weights: the stream of the model.
        base: the stream of its base.
        merge: who adds the adapters to the base: "trainer", "engine", or "auto": the engine where some worker runs on
            another host than every rank of the trainer, and what is to be merged allows it.
    """

    def __init__(self, trainer: Trainer, weights: MergedWeights, base: MergedWeights, merge: Merge) -> None:
        self._trainer, self._weights, self._base, self._merge = trainer, weights, base, merge
        self._check = CompatibilityCheck(trainer)
        self._fingerprint, self._frozen = Fingerprint(), Fingerprint()
        self._trained: tuple[BucketWriter | None, Learning, list[str]] = None, Learning(()), []
        self._adapter, self._update = AdapterNegotiator(trainer, weights), UpdateNegotiator(trainer, weights)
        stayed = Unmoved()
        self._pulls = {stream: PullNegotiator(trainer, stream, stayed) for stream in (weights, base)}
        self._who = "trainer" if merge == "auto" else merge
        self._why = ""

    def read(self, mode: str) -> BucketWriter:
        stream = self._stream(mode)
        writer = stream.bucket_writer()
        self._pulls[stream].check_ahead(writer)
        return writer

    def _stream(self, mode: str) -> MergedWeights:
        return self._weights if mode == "merged" and self._who == "trainer" else self._base

    def known(self, mode: str) -> tuple[list[str], list[str]]:
        stream = self._stream(mode)
        return self._check.known(stream), [*self._update.known(), *self._pulls[stream].known()]

    def broke(self, error: BaseException) -> None:
        if self._merge == "auto" and self._who == "engine":
            # From now on the trainer merges.
            self._who, self._why = "trainer", f"a push that engines merged by themselves failed: {error}"

    def release(self) -> None:
        streams: list[MergedWeights | UpdateNegotiator | PullNegotiator | AdapterNegotiator]
        streams = [self._weights, self._base, self._update, self._adapter, *self._pulls.values()]
        for stream in streams:
            stream.release()

    async def __call__(
        self, replicas: Sequence[Replica], report: SyncReport, verify: bool, read: BucketWriter | None
    ) -> list[Transfer]:
        begun = self._stream(report.mode)
        of_base = read if begun is self._base else None
        if report.mode == "adapter":
            return await self._after_base(replicas, report, verify, of_base)
        if self._in_engine(replicas):
            try:
                transfers = await self._after_base(replicas, report, verify, of_base)
                self._who = report.merge = "engine"
                return transfers
            except LoraMergeError as error:
                # An error is one on every rank, but not of the same kind on each: they go on together, or none does.
                if self._merge == "engine" or not all(await self._trainer.gather(isinstance(error, PushRefused))):
                    raise
                self._why, of_base = str(error), None
        self._who = report.merge = "trainer"
        report.merge_why = self._why
        writer = await self._check(self._weights, replicas, read if begun is self._weights else None)
        report.left_out, report.kept = tuple(sorted(self._weights.left_out)), self._check.kept
        state = State("merged", report.version, trainer=self._trainer.name)
        return [await self._full(state, self._weights, writer, replicas, report, verify)]

    async def base(self, replicas: Sequence[Replica]) -> BucketWriter:
        """Return the stream of the base, as it fits the engines."""
        return await self._check(self._base, replicas)

    def _in_engine(self, replicas: Sequence[Replica]) -> bool:
        """Return True if the engines are to merge; the same on every rank."""
        if self._merge != "auto":
            return self._merge == "engine"
        workers = (worker for replica in replicas for worker in replica.workers)
        return not self._why and any(worker.host not in self._trainer.hosts for worker in workers)

    async def _after_base(
        self, replicas: Sequence[Replica], report: SyncReport, verify: bool, read: BucketWriter | None
    ) -> list[Transfer]:
        """Plan what follows the base, an adapter or an update that the engines merge, and the base itself for engines
        that do not hold this one."""
        beside = report.mode == "adapter"
        if not beside and self._weights.rounding != "nearest":
            raise PushRefused(
                f"rounding={self._weights.rounding!r} is drawn where the trainer merges: engines round to nearest; "
                'pass merge="trainer"'
            )
        if beside:
            await self._adapter.check(replicas, self.keep)
        base = await self._check(self._base, replicas, read)
        if not beside:
            update = await self._update(self._base, base, replicas, self._check.recipients())
            fingerprint = await self._same(lambda: self._frozen(base, update.whole_names, verify))
            lacks = partial(_lacks_update, fingerprint=fingerprint, digest=update.digest)
            source: AdapterSource | UpdatePayload = update
            changed: frozenset[str] | None = update.changed
        else:
            adapter = await self._adapter(replicas, self._base.renames)
            fingerprint = await self._same(lambda: self._of_frozen(base, verify))
            lacks, source, changed = partial(_lacks_base, fingerprint=fingerprint), adapter, None
        without = [replica for engine in engines_of(replicas) if any(map(lacks, engine)) for replica in engine]
        report.base_sent = report.base_sent or bool(without)
        report.left_out = tuple(sorted(self._base.left_out)) if without else report.left_out
        report.kept = self._check.kept if without else report.kept
        bare, after = (
            State(kind, report.version, fingerprint, trainer=self._trainer.name)
            for kind in ("base", "adapter" if beside else "merged")
        )
        payload: Payload = source
        if beside and self.keep:
            payload = VersionPayload(adapter, staged=all(control.beats for control in self._trainer.controls))
        transfers = [Transfer(after, payload, replicas, Route.of_buckets(source))]
        if without:
            first = await self._full(bare, self._base, base, without, report, verify, changed)
            return [first] if beside and self.keep else [first, *transfers]  # a version follows when all have the base
        return transfers

    def _of_frozen(self, base: BucketWriter, verify: bool) -> str:
        """Return the fingerprint of a base that is not trained. Collective over the ranks of the model.

        Args:
            verify: compute it again.

        Raises:
            UnsupportedAdapter: some of it is trained, which an adapter does not bring.
        """
        known, learning, _ = self._trained
        if base.ranks.any(known is not base or learning.moved):
            learning = Learning(module for _, module in live(self._base.model).modules())
            names = learning.names(base.source.parts, base.ranks, buffers=False)
            trained = [name for name, entry in base.entries.items() if not names.isdisjoint(entry.sources)]
            self._trained = base, learning, trained
        if trained := self._trained[2]:
            others = f" (and {len(trained) - 1} more)" if len(trained) > 1 else ""
            raise UnsupportedAdapter(
                f"{trained[0]}{others} is trained beside the adapter (requires_grad), and mode='adapter' sends the "
                'adapter alone: freeze it, or push with mode="merged" instead'
            )
        return self._fingerprint(base, again=verify)

    async def _same(self, fingerprint: Callable[[], str]) -> str:
        """Return the fingerprint of the base, and raise `PushRefused` unless it is the same on every rank."""
        found = await self._trainer.everywhere(self._trainer.blocking(fingerprint))
        if len(set(found)) > 1:
            raise PushRefused(
                f"the trainer's ranks hold different base weights; their fingerprints: {found}. Load the same base on "
                "every rank"
            )
        return found[0]

    async def _full(
        self,
        state: State,
        weights: MergedWeights,
        writer: BucketWriter,
        replicas: Sequence[Replica],
        report: SyncReport,
        verify: bool,
        changed: frozenset[str] | None = None,
    ) -> Transfer:
        """Plan a transfer of all weights: written directly where the engines' memory can be mapped, else read by
        workers where the trainer's can, else in buckets."""
        found = await self._trainer.map(writer, replicas, self._check.at)
        report.buckets = found.why
        if found.why:
            pull, why = await self._pulls[weights](writer, replicas)
            if pull is not None:
                report.buckets = ""
                return Transfer(state, pull, replicas, Route.of_buckets(pull), changed)
            report.buckets = f"{found.why}; and {why}"
        route = self._trainer.route(writer, verify)
        return Transfer(state, WeightsPayload(writer), replicas, route, changed)


def _lacks_base(replica: Replica, fingerprint: str) -> bool:
    return replica.state.kind not in ("base", "adapter") or replica.state.base != fingerprint


def _lacks_update(replica: Replica, fingerprint: str, digest: str) -> bool:
    """Return True if some worker cannot merge an update onto what it holds now."""
    return any(worker.base != fingerprint or digest not in worker.ready for worker in replica.workers)
