"""The trainer's end of a transfer: two buffers, filled one ahead of the workers that take them."""

from __future__ import annotations

import contextlib
import secrets
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from itertools import accumulate, groupby, islice
from typing import Any

import torch
from torch import Tensor

from ...shards.ranks import uninterrupted
from ...stream.buckets import extent
from ...stream.direct_targets import DirectTargets, Sent, joined
from ...stream.double_buffer import DoubleBuffer
from .base import Gone, Received, Setup, TrainerEnd, WorkerId, nobody
from .liveness import TransferAborted
from .local import SENDERS
from .routing import TRANSPORTS, Route


class Sender:
    """One trainer rank's end: two buffers, and a channel to each worker that is assigned to this rank.

    Args:
        channels: the transport to each of these workers; may be empty.
        nbytes: of one buffer.
        device: of the training weights.
        address: at which NCCL groups are arranged, and workers connect: see `rendezvous.interface`.
        hosts: of workers that are reached over sockets: those of an engine on one host take each bucket from one of
            them. Without it each has a host to itself.

    Attributes:
        ends: by kind of transport, in the order of `TRANSPORTS`.

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
        self._ahead = DoubleBuffer(device)
        setup = Setup(self.session, nbytes, device, address, hosts or {})
        self.ends: dict[str, TrainerEnd] = {}
        for kind, transport in TRANSPORTS.items():
            if places := [place for place, how in channels.items() if how == kind]:
                self.ends[kind] = end = transport.trainer(setup, places)
                if end.has_threads:
                    weakref.finalize(self, end.close)
        ends = self.ends.values()
        self.local = any(end.in_process for end in ends)
        self.buffers = next((end.buffers for end in ends if end.buffers), list[Tensor]())
        if not self.buffers and any(end.needs_buffers for end in ends):
            self.buffers = self._plain_buffers()
        self._begun = 0
        self._offered: Generator[Received, None, None] | None = None
        self._source: Sent | None = None
        self._awaited, self._stopped, self._drained = False, False, False
        self._route: Route | None = None
        SENDERS[self.session] = self

    def _plain_buffers(self) -> list[Tensor]:
        return [torch.empty(self.nbytes, dtype=torch.uint8, device=self.device) for _ in range(2)]

    def channel(self, replica: int, worker: int) -> dict[str, Any]:
        """Return what `worker_end` gets for this worker: JSON values."""
        kind = self.kinds[replica, worker]
        return {"session": self.session, "kind": kind, "nbytes": self.nbytes} | self.ends[kind].channel(
            (replica, worker)
        )

    def connect(self, gone: Gone = nobody) -> None:
        """Wait until all workers are connected, which connect in control calls at the same time.

        Args:
            gone: replicas whose control call has ended.

        Raises:
            TransferAborted: a worker failed before it was connected.
        """
        try:
            for end in self.ends.values():
                end.connect(gone)
        except BaseException:
            self.abort("another engine could not be connected")
            raise

    def opened(self) -> None:
        """Remove the names of shared memory once every worker has mapped it, so that a crash leaves nothing behind."""
        for end in self.ends.values():
            end.opened()

    def begin(self, source: Sent, sent: bool = True) -> None:
        """Begin a transfer: on every trainer rank, before the control calls in which workers take it.

        Args:
            sent: whether any bucket is handed over.

        Raises:
            torch.OutOfMemoryError: no memory for buckets. No rank may fill any before it knows that all can: filling
                takes all of them at once, and who has no bucket to fill cannot join the others.
        """
        self._route = None
        if source.collective and not self.buffers and sent:
            self.buffers = self._plain_buffers()
        for end in self.ends.values():
            end.begin()

    def serve(self, source: Sent, run: Mapping[str, Any], gone: Gone = nobody, route: Route | None = None) -> None:
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

    def offer(self, source: Sent, run: Mapping[str, Any], gone: Gone = nobody) -> None:
        """Begin to serve at the pace of the worker in this process, which takes the buckets by `pull`; see `serve`.
        `drain` comes after it."""
        self._source, self._drained = source, False
        self._offered = self._flow(source, run, gone)
        self._awaited = source.collective or len(self.kinds) > 1

    def drain(self) -> None:
        """End what was offered. Buckets that the worker in this process did not pull, because it failed, are filled
        only if others wait for them: workers, or trainer ranks that fill them, too."""
        self._drained = True
        offered, self._offered, self._source = self._offered, None, None
        if offered is not None and self._awaited:
            for _ in offered:
                pass
        elif offered is not None:
            offered.close()

    def pull(self, targets: DirectTargets, compare: bool) -> Iterator[Received]:
        """Yield the buckets on offer: to be read on the current stream until the next one is asked for.

        Args:
            targets: of the worker's tensors; buckets whose tensors all lie there are merged to there.
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
        """Fill no more buckets; for another thread than the one that fills. The transfer fails, and all workers are
        told."""
        self._stopped = True

    def abort(self, reason: str = "the trainer gave up in the middle of a push") -> None:
        """Tell all workers that the transfer ends here."""
        # In memory first: others are told over a network, which may take long.
        for end in sorted(self.ends.values(), key=lambda end: not end.shares_memory):
            end.abort(reason)

    def close(self) -> None:
        """Free everything; workers close their ends when they shut down, connect anew or are told to."""
        SENDERS.pop(self.session, None)
        self.opened()
        self._offered, self._source, self.buffers = None, None, []
        for end in self.ends.values():
            end.close()
        self.ends = {}
        if self._ahead.stream is not None:
            torch.cuda.synchronize(self.device)

    def _flow(self, source: Sent, run: Mapping[str, Any], gone: Gone) -> Generator[Received, None, None]:
        """Make every bucket and hand it over, one ahead of whoever pulls here."""
        self._begun, self._stopped = 0, False
        ends, stopped = self.ends.values(), lambda: self._stopped
        route, count = self._route or Route.of_buckets(source), len(source.table)
        turns = {index: turn for turn, index in enumerate(route.by(self.kinds.keys()))}
        # A bucket that nobody takes from here is filled for the other ranks, in the buffer of the next one that is
        # taken.
        at = dict(zip(range(count), accumulate((index in turns for index in range(count)), initial=0), strict=False))
        others = {index for index in route.sent if index not in turns and source.collective and not source.alone(index)}
        buffered = others.union(turns)
        # Those in a row that need no buffer are made at once: to have streams wait for each other takes longer than all
        # of their launches.
        runs = [list(one) for _, one in groupby(range(count), lambda index: index if index in buffered else None)]

        def decide() -> None:
            for end in ends:
                end.decide(gone)

        def free(turn: int) -> None:
            index = runs[turn][0]
            if index in buffered and at[index] >= 2:  # both buffers are free at first
                for end in ends:
                    end.reclaim(at[index] - 2, gone, stopped)

        def steps(index: int) -> Iterator[Callable[[], None]]:
            """Yield what makes a bucket; each step may take all ranks."""
            if index in route.placed and not self._drained and route.targets is not None:
                yield partial(source.write_direct, index, route.targets, run)
            if index in buffered:
                yield lambda: source.fill(index, self._buffer(at[index]), run)

        def make(index: int) -> Received:
            if self._stopped:
                raise TransferAborted("the push was cancelled")
            for step in steps(index):
                with uninterrupted(source.collective)():
                    self._begun += 1  # what fails before this has not met the other ranks in this step
                    step()
            placed = index in route.placed and not self._drained
            if index not in turns:
                return Received(index, None, placed)
            turn, recipients = turns[index], route.recipients.get(index, self.kinds.keys())
            buffer = self._buffer(turn)
            if turn == 0:
                decide()
            for end in ends:
                end.hand(turn, buffer[: extent(source.table[index])], recipients, turn + 1 == len(turns))
            return Received(index, buffer, placed)

        try:
            for made in self._ahead(free, lambda turn: list(map(make, runs[turn])), len(runs)):
                yield from made
            if route.recipients and not turns:
                decide()  # workers that take nothing ask, too
            for end in ends:
                end.finish(len(turns), gone, stopped)
        except BaseException:
            self.abort()
            if source.collective:
                # The other ranks go on, and need this one for it; what is made reaches nobody.
                for step in islice((step for index in range(count) for step in steps(index)), self._begun, None):
                    with contextlib.suppress(Exception), self._ahead.filling():
                        step()
            raise
        finally:
            for end in ends:
                end.rest()

    def _buffer(self, turn: int) -> Tensor:
        """Return the buffer of a bucket."""
        self.buffers = self.buffers or self._plain_buffers()
        return self.buffers[turn % 2]
