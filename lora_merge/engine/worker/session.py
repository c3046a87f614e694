"""State that this package keeps in a worker between the calls of a push, beside the model's weights.

**Who resumes an engine whose trainer died?** The next push does, of any trainer; nothing else does.

- Before its first byte changes an engine is dirty (`begin`), until it commits (`end`). A push that pauses it has noted
  that first (`paused`). So nothing is generated from weights that are half written:

      the trainer dies                   the engine holds                                          it generates
      before the pause                   the old weights                                           yes
      in the middle of buckets           all weights: dirty. An update: the old weights            no
      after them, before commit, merge   the same. An adapter: the new one                         no
      after commit, before resume        the new weights                                           no

- Workers that wait for buckets give up (`TransferAborted`): over `shm` and `ipc` they look for the trainer's process,
  `nccl` asks its store, `tcp` loses its connection. Memory that is mapped from the trainer is unmapped (`_watch`).
- The trainer's lease ends with its process, or after 60 s without a sign of life from another host (`lease.py`).
- The next push takes the lease (`hello`), sees `paused` and the state in the answer, sends a dirty engine all weights,
  base included, and resumes it (`EngineSequence`). A push that is refused before it writes resumes nothing. An engine
  in the trainer's own process dies with it.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from ...stream.buckets import Slot, Table, extent
from ...stream.direct_targets import DirectTargets
from ..fingerprint import Sampler
from ..payload.checksums import add_checksums
from ..payload.spec import UpdateSpec
from ..state import WEIGHTS, State, change
from ..transport.base import Expected, Received, WorkerEnd
from ..transport.lent import Loan
from ..transport.liveness import alive
from ..transport.routing import worker_end
from .answered import Answered
from .lease import Lease
from .loader import DryRunReport, Loader
from .merger import Merger
from .pull import PullTarget
from .staging import Staged, Staging

_ATTRIBUTE = "_lora_merge"
"""Attribute of an engine's model that has its session."""
_TABLES = 8
"""Tables that are kept: those of a few streams, each as a push may change it until it fits."""
_WATCH_S = 2.0
"""Seconds between two checks whether a trainer lives whose memory is mapped here."""
_UPDATES = 2
"""Specs of updates that are kept."""


class IncomingPush(NamedTuple):
    """A full push that has begun.

    Args:
        digest: of the table.
        merger: keeps what merging updates onto it needs; None if there will be no updates.
    """

    report: DryRunReport
    digest: str
    state: State
    merger: Merger | None = None

    def keep(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor of the base for later merges, where the merger needs it."""
        if self.merger is not None:
            self.merger.keep(name, tensor)


class WorkerSession:
    """The worker's side of all pushes.

    Args:
        asleep: returns the level at which the weights sleep at the moment, so that they must not be read: 1 (kept
            elsewhere) or 2 (thrown away); 0 if they are awake.
        cache_asleep: returns True while the memory of the KV cache is unmapped.

    Attributes:
        name: of this worker; no other one has it.
        lease: which trainer's push the engine is in the middle of.
        loan: returns what stands for a trainer that shares the weights; None where there is none, or no longer.
        receiver: the channel to the trainer that connected last.
        tables: tables that had a dry run, by digest, the newest last; a trainer may come back to one in the same push.
        held: the state of the weights when this package last looked; `state` looks again.
        served, served_tenants: the kind of state in which generation went on last, and so that of requests that are
            paused; and its tenants.
        writing: whether something has begun to write that was neither ended nor aborted.
        incoming: a full push, from its first call until it ends or is aborted.
        uncommitted: the state that it brings, from its last bucket to its commit.
        merger: merges updates onto the base that was brought last; None if none can be merged.
        updates: specs of updates, by digest, the newest last.
        update: an update that was received and not merged yet, or a version of an adapter that was not added.
        staging: an update that comes while the engine generates.
        pull_lock: held while something reads from a trainer's memory, or unmaps it.
        pulls: the mapped memory of one trainer, by the digest under which it was offered; one entry at the most.
        pull_owner: name of that trainer.
        paused, waking: whether a push has paused generation, and whether it has woken the weights, after which the KV
            cache is its own to wake.
        checksums, intact: of a verified transfer: checksums by name, and whether the parameters hold these bits.
        coverage: elements that the last full push wrote, and elements there are.
    """

    def __init__(self, loader: Loader, asleep: Callable[[], int], cache_asleep: Callable[[], bool]) -> None:
        self.device, self.modules, self.loader = loader.device, loader.modules, loader
        self.asleep, self.cache_asleep = asleep, cache_asleep
        self.name = secrets.token_hex(8)
        self.receiver: WorkerEnd | None = None
        self.tables: dict[str, Table] = {}
        self.lease, self.answered = Lease(), Answered[str]()
        self.loan: Callable[[], Loan | None] = lambda: None
        self.held, self.writing = State(), False
        self.served, self.served_tenants = self.held.kind, self.held.tenants
        self.incoming: IncomingPush | None = None
        self.uncommitted: State | None = None
        self.merger: Merger | None = None
        self.updates: dict[str, UpdateSpec] = {}
        self.update: Staged | None = None
        self.staging: Staging | None = None
        self.pulls: dict[str, PullTarget] = {}
        self.pull_lock = threading.RLock()
        self.pull_owner = ""
        self.paused, self.waking = False, False
        self.checksums: dict[str, int] = {}
        self.intact: dict[str, bool] = {}
        self.coverage: tuple[int, int] = (0, 0)
        self._under_way: torch.cuda.Event | None = None
        self._sampler = Sampler()
        self._sample = ""
        self._kernels: list[Any] = []

    # What the engine holds

    def state(self) -> State:
        """Return the state of the weights; "dirty" if they changed since this package wrote them."""
        if (self.held.kind not in WEIGHTS and self.merger is None) or self.asleep():
            return self.held
        kernels = self.loader.kernels()
        same = len(kernels) == len(self._kernels) and all(a is b for a, b in zip(kernels, self._kernels, strict=True))
        if not same or self._sampler(*self.modules.look()) != self._sample:
            self.mark_overwritten("its weights were changed by something else: a sleep, a reload, an update")
        return self.held

    def ready(self, digest: str) -> bool:
        """Return True if the update with this digest can be merged onto the present weights, or the stream that was
        offered under it can be pulled."""
        if digest in self.pulls:
            target = self.pulls[digest]
            table = None if self.asleep() else self.tables.get(target.table)
            return table is not None and self.loader.examine(target.table, table) is target.report
        if self.merger is None or self.held.kind == "dirty":
            return False
        return digest in self.updates and not self.merger.lacks(self.updates[digest])

    def begin(self, reason: str) -> None:
        """Begin to write: the engine is dirty, for `reason`, until the push ends."""
        self.held, self.writing = change(self.held, "begin", reason=reason), True

    def note_complete(self) -> None:
        """Note that all of a full push has arrived; `commit` may follow."""
        assert self.incoming is not None
        self.uncommitted, self.coverage = self.incoming.state, self.incoming.report.elements

    def end(self, brought: State) -> None:
        """End a push: record the new state and a fingerprint of the weights."""
        self.held, self.writing = change(self.held, "end", brought=brought), False
        if self.incoming is not None:
            self.merger = self.incoming.merger
        if self.merger is not None:
            self.merger.settle()
        self.incoming = self.uncommitted = self.update = None
        self._note()

    def adopt(self, merger: Merger) -> None:
        """Note that updates can be merged onto the weights that the engine was started with, which it holds."""
        merger.settle()
        self.merger = merger
        self._note()

    def new_merger(self, digest: str, base: str, changed: frozenset[str] = frozenset()) -> Merger:
        """Make a `Merger` onto the base of a table that had its dry run."""
        table = self.tables[digest]
        return Merger(self.loader, self.loader.examine(digest, table), table, base, changed)

    def _note(self) -> None:
        """Record a fingerprint of the weights."""
        self._sample = self._sampler(*self.modules.look())
        self._kernels = self.loader.kernels()

    def abort(self, reason: str | None) -> None:
        """Clean up after a broken push. The engine becomes dirty if that push had begun to write, or if a reason is
        given."""
        self.loader.abort()
        if self.writing or reason is not None:
            self.held = change(self.held, "break", reason=reason or "a push broke off in the middle")
            self.merger = None
        self.incoming, self.uncommitted, self.update, self.writing = None, None, None, False

    def mark_overwritten(self, reason: str) -> None:
        """Note that something else wrote to the weights, or freed them; `reason` says what. The state becomes dirty."""
        self.merger = None
        if self.held.kind in WEIGHTS:
            self.held = change(self.held, "overwrite", reason=reason)

    def returned(self) -> None:
        """Note that all weights are again those that the engine started with."""
        self.held = change(self.held, "return")

    def switch(self, brought: State) -> None:
        """Note which version of an adapter is the newest beside the base, which is unchanged."""
        self.held = change(self.held, "switch", brought=brought)

    def evicted(self) -> None:
        """Note that the adapter was removed; the base is unchanged."""
        self.held = change(self.held, "evict")

    def keep_table(self, digest: str, table: Table | None = None) -> None:
        """Keep a table, and make it the last to be dropped."""
        self.tables[digest] = self.tables.pop(digest) if table is None else table
        for old in list(self.tables)[:-_TABLES]:
            del self.tables[old]

    def keep_update(self, digest: str, spec: UpdateSpec) -> None:
        """Keep the spec of an update."""
        self.updates[digest] = spec
        for old in list(self.updates)[:-_UPDATES]:
            del self.updates[old]

    def keep_pull(self, digest: str, target: PullTarget) -> None:
        """Keep the mapped memory of a trainer; it is unmapped when that trainer dies."""
        self.drop_pulls()
        self.pulls[digest], self.pull_owner = target, self.lease.owner
        threading.Thread(target=_watch, args=(ref(self), ref(target)), daemon=True, name="lora_merge").start()

    def drop_pulls(self, only: PullTarget | None = None) -> None:
        """Unmap what a trainer exports.

        Args:
            only: unmap nothing else.
        """
        with self.pull_lock:
            while self.pulls and only in (None, *self.pulls.values()):
                self.pulls.popitem()[1].close()

    # A transfer

    def leave_running(self) -> None:
        """End an operation while the device is still at its work. Meanwhile the engine can do what needs no worker,
        such as resetting its prefix cache (in vLLM 2.5 ms for 100,000 blocks)."""
        if self.device.type == "cuda":
            self._under_way = torch.cuda.current_stream(self.device).record_event()

    def wait_for_device(self) -> None:
        """Wait for work that the last operation left running."""
        event, self._under_way = self._under_way, None
        if event is not None:
            event.synchronize()

    def connect(self, channel: dict[str, Any]) -> None:
        """Open a channel to a trainer and close the one before. Memory mapped from another trainer, which may be dead,
        is unmapped."""
        self.disconnect()
        if self.pull_owner != self.lease.owner:
            self.drop_pulls()
        self.receiver = worker_end(channel, self.device)

    def disconnect(self) -> None:
        """Unmap the trainer's memory, and drop plans that read it."""
        self.end_staging()
        self.loader.drop_plans()
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None

    def end_staging(self) -> None:
        """End what stages an update, and forget the update. (`leave` does not end a transfer that still comes.)"""
        staging, self.staging = self.staging, None
        if staging is not None:
            staging.end(leave=(lambda: None) if self.receiver is None else self.receiver.leave)

    @contextmanager
    def transfer(self, sessions: Sequence[str]) -> Iterator[None]:
        """Run a transfer. If it fails here, even before the first bucket, tell the trainer not to wait for this worker,
        and close layers that were opened for loading.

        Args:
            sessions: of the channels of this transfer: another trainer may have connected meanwhile.
        """
        try:
            yield
        except BaseException:
            self.loader.abort()
            if self.receiver is not None and self.receiver.session in sessions:
                self.receiver.leave()
            raise

    def receive(
        self,
        table: Table,
        use: Callable[[Sequence[Slot], Received], None],
        verify: bool,
        targets: DirectTargets | None = None,
        sent: Sequence[int] | None = None,
        placed: Sequence[int] = (),
        apart: Sequence[int] = (),
    ) -> None:
        """Receive the buckets of a table, and call `use` with each and its slots.

        Args:
            verify: note checksums.
            targets, placed, apart: as for `Expected`.
            sent: which buckets come; None for all.
        """
        if self.receiver is None:
            raise RuntimeError("no trainer is connected")
        self.checksums, self.intact = {}, {}
        sizes = {index: extent(table[index]) for index in (range(len(table)) if sent is None else sent)}
        expected = Expected(sizes, frozenset(placed), targets, verify, frozenset(apart))
        with closing(self.receiver.receive(expected)) as buckets:
            for received in buckets:
                if verify and received.data is not None:
                    add_checksums(self.checksums, table[received.index], received.data)
                use(table[received.index], received)

    def compare(self, report: DryRunReport, slots: Sequence[Slot], data: Tensor, placed: bool = False) -> None:
        """Note whether the parameters hold the values of a bucket."""
        for name, same in self.loader.arrived(report, slots, data, placed).items():
            self.intact[name] = self.intact.get(name, True) and same


def _watch(session: ref[WorkerSession], target: ref[PullTarget]) -> None:
    """Unmap a trainer's memory once it has died, also if nobody pushes again: it is not freed before."""
    while True:
        time.sleep(_WATCH_S)
        here, what = session(), target()
        if here is None or what is None or what.closed:
            return
        if not all(map(alive, what.pids)):
            here.drop_pulls(what)
            return
        del here, what


def session_of(model: nn.Module, make: Callable[[], WorkerSession]) -> WorkerSession:
    """Return the `WorkerSession` of a model for one call to a worker; it is made at first use."""
    if _ATTRIBUTE not in model.__dict__:
        model.__dict__.setdefault(_ATTRIBUTE, make())  # two threads may come first
    session: WorkerSession = model.__dict__[_ATTRIBUTE]
    session.modules.doubt()
    return session
