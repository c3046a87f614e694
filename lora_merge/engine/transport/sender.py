"""The trainer's end of a transfer: two buffers, filled one ahead of the workers that take them."""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from functools import partial
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from ...stream.buckets import extent
from ...stream.direct_targets import DirectTargets, Sent, joined
from ...stream.double_buffer import DoubleBuffer
from .liveness import TransferAborted, alive, wait_until
from .memory import CudaMemory, SharedMemory
from .nccl import Done, Group
from .rendezvous import serve_store
from .routing import (
    ABORTED,
    BUCKETS_TOGETHER,
    DONE,
    FILLED,
    LEFT,
    PID,
    WORDS,
    WORKERS,
    Received,
    Route,
    WorkerId,
    hands_over,
    nobody,
)
from .tcp_sender import TcpSender

SENDERS: weakref.WeakValueDictionary[str, Sender] = weakref.WeakValueDictionary()
"""Of this process, by session: workers in it pull from them."""


class Sender:
    """One trainer rank's end: two buffers, and a channel to each worker that is assigned to this rank.

    Args:
        channels: the transport to each of these workers; may be empty.
        nbytes: of one buffer.
        device: of the training weights.
        address: at which NCCL groups are arranged, and workers connect: see `store.interface`.
        hosts: of workers that are reached over sockets: those of an engine on one host take each bucket from one of
            them. Without it each has a host to itself.

    Raises:
        InvalidInput: there is not enough shared memory.
    """

    def __init__(
        self,
        channels: Mapping[WorkerId, str],
        nbytes: int,
        device: torch.device,
        address: str = "127.0.0.1",
        hosts: Mapping[WorkerId, str] | None = None,
    ) -> None:
        self.session = secrets.token_hex(8)
        self.kinds, self.nbytes, self.device = dict(channels), nbytes, device
        kinds = set(channels.values())
        self.local = "local" in kinds
        self._together = max((BUCKETS_TOGETHER[kind] for kind in kinds if kind in BUCKETS_TOGETHER), default=1)
        self._ahead = DoubleBuffer(device)
        self._files: list[SharedMemory] = []
        self._memory: CudaMemory | None = None
        self.buffers = self._allocate(kinds)
        mapping = [place for place, kind in channels.items() if kind in ("shm", "ipc")]
        self._at = {place: WORKERS + WORDS * i for i, place in enumerate(mapping)}
        self._dead: set[WorkerId] = set()
        self._box: Any = None
        if mapping:
            nbytes = 8 * (WORKERS + WORDS * len(mapping))
            self._files.append(SharedMemory(f"{self.session}-mailbox", nbytes, create=True))
            self._box = self._files[-1].tensor.view(torch.int64).numpy()
        members: dict[int, list[int]] = {}
        for r, w in (place for place, kind in channels.items() if kind == "nccl"):
            members.setdefault(r, []).append(w)
        self._nccl_ranks = {(r, w): i for r, ws in members.items() for i, w in enumerate(ws, 1)}
        self._groups: dict[int, Group] = {}
        if members:
            self._store = serve_store(address)
            self._groups = {r: Group(self._store, str(r), 0, len(ws) + 1, device) for r, ws in members.items()}
        over_sockets = {at: (hosts or {}).get(at, str(at)) for at, kind in channels.items() if kind == "tcp"}
        self.outbox: TcpSender | None = None
        if over_sockets:
            self.outbox = TcpSender(address, over_sockets, nbytes, device)
            weakref.finalize(self, self.outbox.close)
        self._sent: dict[int, list[Done | None]] = {}
        self._begun = 0
        self._offered: Generator[Received, None, None] | None = None
        self._source: Sent | None = None
        self._awaited, self._stopped, self._drained = False, False, False
        self._route: Route | None = None
        if self.local:
            SENDERS[self.session] = self

    def _allocate(self, kinds: set[str]) -> list[Tensor]:
        if "shm" in kinds:
            self._files.append(SharedMemory(f"{self.session}-data", 2 * self.nbytes, create=True))
            return list(self._files[0].tensor.split(self.nbytes))
        if "ipc" in kinds:
            self._memory = CudaMemory(2 * self.nbytes, self.device)
            return list(self._memory.tensor.split(self.nbytes))
        if kinds & {"nccl", "tcp"}:
            return self._plain_buffers()
        return []  # made for what cannot be placed

    def _plain_buffers(self) -> list[Tensor]:
        return [torch.empty(self.nbytes, dtype=torch.uint8, device=self.device) for _ in range(2)]

    def channel(self, replica: int, worker: int) -> dict[str, Any]:
        """What this worker's `Receiver` gets: JSON values."""
        place, kind = (replica, worker), self.kinds[replica, worker]
        channel: dict[str, Any] = {"session": self.session, "kind": kind, "nbytes": self.nbytes}
        if place in self._at:
            channel |= {"mailbox": self._files[-1].path, "words": len(self._box)}
            channel |= {"at": self._at[place], "pid": os.getpid()}
        if kind == "shm":
            channel["data"] = self._files[0].path
        elif kind == "ipc":
            assert self._memory is not None
            channel["handle"] = base64.b64encode(self._memory.handle).decode()
        elif kind == "nccl":
            world = 1 + sum(r == replica for r, _ in self._nccl_ranks)
            channel |= {"store": self._store.channel(), "group": str(replica)}
            channel |= {"rank": self._nccl_ranks[place], "world": world}
        elif kind == "tcp":
            assert self.outbox is not None
            channel |= self.outbox.channel(place)
        return channel

    def connect(self, gone: Callable[[], set[int]] = nobody) -> None:
        """Join the NCCL groups, and wait for workers that connect; they do both in control calls at the same time.

        Args:
            gone: replicas whose `init_weight_transfer_engine` has ended.

        Raises:
            TransferAborted: a worker failed before it joined.
        """
        try:
            for replica, group in self._groups.items():
                group.open(_among(gone, replica))
            if self.outbox is not None:
                self.outbox.connect(gone)
        except BaseException:
            self.abort("another engine could not be connected")
            raise

    def opened(self) -> None:
        """Remove the names of shared memory once every worker has mapped it, so that a crash leaves nothing behind."""
        for file in self._files:
            file.hide()

    def begin(self, source: Sent, sent: bool = True) -> None:
        """A transfer begins: on every trainer rank, before the control calls in which workers take it.

        Args:
            sent: whether any bucket is handed over.

        Raises:
            torch.OutOfMemoryError: no memory for buckets. No rank may fill any before it knows that all can: filling
                takes all of them at once, and who has no bucket to fill cannot join the others.
        """
        self._route = None
        if source.collective and not self.buffers and sent:
            self.buffers = self._plain_buffers()
        if self._box is not None:
            self._box[:WORKERS] = 0
            for word in (DONE, LEFT):
                self._box[WORKERS + word :: WORDS] = 0
        for group in self._groups.values():
            group.announce()
        if self.outbox is not None:
            self.outbox.announce()

    def serve(
        self,
        source: Sent,
        run: Mapping[str, Any],
        gone: Callable[[], set[int]] = nobody,
        route: Route | None = None,
    ) -> None:
        """Place, or fill and hand over, every bucket of a source, in order.

        Workers that left, died, or belong to a replica that is gone are not waited for; the last bucket is filled in
        any case, because filling may take all trainer ranks.

        Args:
            run: arguments of `Plan.run`.
            gone: replicas whose control call has ended, or that have none.
            route: how the buckets go; all are handed over by default.

        Raises:
            whatever filling raises; the workers are told to give up first.
        """
        self._route = route
        try:
            for _ in self._flow(source, run, gone):
                pass
        finally:
            if self._ahead.stream is not None:
                self._ahead.stream.synchronize()

    def offer(self, source: Sent, run: Mapping[str, Any], gone: Callable[[], set[int]] = nobody) -> None:
        """As `serve`, at the pace of the worker in this process, which pulls the buckets. `drain` comes after it."""
        self._source, self._drained = source, False
        self._offered = self._flow(source, run, gone)
        self._awaited = source.collective or len(self.kinds) > 1

    def drain(self) -> None:
        """End what was offered. Buckets that the worker in this process did not pull, because it failed, are filled
        only where others wait for them: workers, or trainer ranks that fill them, too."""
        self._drained = True
        offered, self._offered, self._source = self._offered, None, None
        if offered is not None and self._awaited:
            for _ in offered:
                pass
        elif offered is not None:
            offered.close()

    def pull(self, targets: DirectTargets, compare: bool) -> Iterator[Received]:
        """The buckets on offer: to be read on the current stream until the next one is asked for.

        Args:
            targets: of the worker's tensors; buckets of which all lie there are merged to there.
            compare: make these as buckets, too.
        """
        if self._offered is None or self._source is None:
            raise TransferAborted("the trainer of this process offers nothing; push again")
        if not self._source.shared:
            here = joined(self._source, targets.on(self.device), targets)
            others = len(self.kinds) > 1  # workers that take buckets
            self._route = Route.to(self._source, here, targets, compare or others)
        for received in self._offered:  # noqa: UP028, a worker that stops must not close the flow for `drain`
            yield received

    def stop(self) -> None:
        """Fill no more buckets; called by another thread than the one that fills. The transfer fails and everybody is
        told."""
        self._stopped = True

    def abort(self, reason: str = "the trainer gave up in the middle of a push") -> None:
        """Tell all workers that the transfer ends here."""
        if self._box is not None:
            self._box[ABORTED] = 1
        for group in self._groups.values():
            group.leave(reason)
        if self.outbox is not None:
            self.outbox.abort()

    def close(self) -> None:
        """Give everything back; workers close their ends when they shut down, connect anew or are told to."""
        SENDERS.pop(self.session, None)
        self.opened()
        for group in self._groups.values():
            group.close()
        if self.outbox is not None:
            self.outbox.close()
            self.outbox = None
        self._offered, self._source, self._sent = None, None, {}
        if self._ahead.stream is not None:
            torch.cuda.synchronize(self.device)
        self.buffers, self._box, self._at = [], None, {}
        self._files, self._groups = [], {}
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _flow(
        self, source: Sent, run: Mapping[str, Any], gone: Callable[[], set[int]]
    ) -> Generator[Received, None, None]:
        """Make every bucket and hand it over, one ahead of whoever pulls here."""
        self._sent, self._begun, self._stopped = {}, 0, False
        route, count = self._route or Route.of_buckets(source), len(source.table)
        turns = {index: turn for turn, index in enumerate(route.by(self.kinds.keys()))}
        # A bucket that nobody takes from here is filled for the other ranks, where the next one that is taken goes.
        at = dict(zip(range(count), accumulate((index in turns for index in range(count)), initial=0), strict=False))
        others = {index for index in route.sent if index not in turns and source.collective and not source.alone(index)}

        def free(index: int) -> None:
            if index in turns or index in others:
                self._reclaim(at[index] - 2, gone)

        def steps(index: int) -> Iterator[Callable[[], None]]:
            """What makes a bucket. Each may take all ranks."""
            if index in route.placed and not self._drained and route.targets is not None:
                yield partial(source.write_direct, index, route.targets, run)
            if index in turns or index in others:
                yield lambda: source.fill(index, self._buffer(at[index]), run)

        def make(index: int) -> Received:
            if self._stopped:
                raise TransferAborted("the push was cancelled")
            for step in steps(index):
                self._begun += 1  # what fails before this has not met the other ranks in this step
                step()
            placed = index in route.placed and not self._drained
            if index not in turns:
                return Received(index, None, placed)
            if turns[index] == 0:
                self._decide(gone)
            self._hand_over(source, index, turns[index], len(turns), route.recipients.get(index, self.kinds.keys()))
            return Received(index, self._buffer(turns[index]), placed)

        try:
            yield from self._ahead(free, make, count)
            if route.recipients and not turns:
                self._decide(gone)  # workers that take nothing ask, too
            for replica, sent in self._sent.items():
                self._groups[replica].wait(next((done for done in reversed(sent) if done is not None), None))
            if self.outbox is not None and turns:
                self.outbox.wait(len(turns) - 1, gone, lambda: self._stopped)
        except BaseException:
            self.abort()
            if source.collective:
                # The other ranks go on, and need this one for it; what is made reaches nobody.
                for step in islice((step for index in range(count) for step in steps(index)), self._begun, None):
                    with contextlib.suppress(Exception), self._ahead.filling():
                        step()
            raise
        finally:
            for group in self._groups.values():
                group.rest()

    def _hand_over(self, source: Sent, index: int, turn: int, count: int, recipients: Collection[WorkerId]) -> None:
        """Hand over a filled bucket, number `turn` of the `count` that are handed over.

        Args:
            recipients: who takes it.
        """
        data = self._buffer(turn)[: extent(source.table[index])]
        for replica, sent in self._sent.items():
            ranks = [rank for place, rank in self._nccl_ranks.items() if place[0] == replica and place in recipients]
            sent.append(self._groups[replica].hand(data, ranks))
        if self.outbox is not None:
            self.outbox.hand(turn, data, recipients)
        if self._box is not None and hands_over(turn, self._together, count):
            if self._ahead.stream is not None:
                self._ahead.stream.synchronize()
            self._box[FILLED] = turn + 1

    def _buffer(self, turn: int) -> Tensor:
        """Where a bucket is made."""
        self.buffers = self.buffers or self._plain_buffers()
        return self.buffers[turn % 2]

    def _decide(self, gone: Callable[[], set[int]]) -> None:
        """Which NCCL groups take part in this transfer."""
        for replica, group in self._groups.items():
            ended = _among(gone, replica)
            if not group.decide(ended):
                self._sent[replica] = []
                group.watch(ended)

    def _reclaim(self, turn: int, gone: Callable[[], set[int]]) -> None:
        """Wait until every worker that is still there has released a bucket that was handed over."""
        if turn < 0:
            return
        for replica, sent in self._sent.items():
            self._groups[replica].wait(sent[turn])
        if self.outbox is not None:
            self.outbox.wait(turn, gone, lambda: self._stopped)
        if self._box is None:
            return
        box = self._box

        def done() -> bool:
            if self._stopped:
                return True
            left = gone()
            live = [at for place, at in self._at.items() if place[0] not in left and place not in self._dead]
            return all(box[at + DONE] > turn or box[at + LEFT] for at in live)

        def look() -> None:
            self._dead |= {place for place, at in self._at.items() if box[at + PID] and not alive(box[at + PID])}

        wait_until(done, look)


def _among(gone: Callable[[], set[int]], replica: int) -> Callable[[], bool]:
    return lambda: replica in gone()
