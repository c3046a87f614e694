"""A kind of transport: its two ends, `TrainerEnd` and `WorkerEnd`.

A kind is one file with a subclass of each, and a row of `TRANSPORTS` in `routing.py`; `Sender` does the same
with all of them. The life of the two ends:

    end = ShmSender(setup, [(0, 0), (0, 1)])        # a trainer's rank: opens what workers will connect to
    channel = end.channel((0, 0))                   # JSON values, brought to the worker by the engine's control plane
    end.connect(gone)                               # while each worker makes its end: worker_end(channel, device)
    end.opened()                                    # when all of them have

    end.begin()                                     # a transfer: the workers are called now, and iterate `receive`
    end.decide(gone)                                # before the first bucket
    end.hand(0, data, recipients, last=False)       # a filled buffer
    end.hand(1, data, recipients, last=False)       # the other one
    end.reclaim(0, gone, stopped)                   # returns when the first may be filled again
    end.hand(2, data, recipients, last=True)
    end.finish(3, gone, stopped)
    end.rest()

    end.abort("why")                                # at any time: no worker waits for more of this transfer
    end.close()                                     # once the workers have closed theirs, or are gone

A worker that fails calls `WorkerEnd.leave`. One that dies has to be noticed: neither `connect`, `decide`, `reclaim` nor
`finish` may wait for it, nor for workers of a replica whose control call has ended (`gone`). A worker in turn may not
wait for a trainer that died: `receive` raises `TransferAborted`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...stream.direct_targets import DirectTargets

WorkerId: TypeAlias = tuple[int, int]
"""Replica, and position of the worker in it."""
Gone: TypeAlias = Callable[[], set[int]]
"""Returns the replicas whose control call has ended, or that have none: their workers are not waited for."""
nobody: Gone = set
"""No replica's control call has ended."""


@dataclass(frozen=True, slots=True)
class Received:
    """A bucket on the worker's side.

    Args:
        data: uint8; None if the trainer has placed it and nobody asked for the bucket as well.
        placed: whether it lies in the engine's tensors already.
    """

    index: int
    data: Tensor | None
    placed: bool


class Setup(NamedTuple):
    """Arguments of `Sender` for its ends, and the name of its channels."""

    session: str
    nbytes: int
    device: torch.device
    address: str
    hosts: Mapping[WorkerId, str]


class TrainerEnd:
    """The end of one trainer's rank, to the workers (`places`) that it serves over one kind of transport.

    Attributes:
        shares_memory: whether `reaches` is asked of processes of one host alone.
        networked: whether the worker connects to an address of the trainer's, so that its host has to be known.
        in_process: whether the worker takes buckets at its own pace, in this process (`Sender.pull`).
        takes_buckets: whether it hands buckets over at all. The one kind that does not serves workers of other
            processes while nothing is sent to them in buckets.
        needs_buffers: whether buckets are handed over in buffers that exist from the start.
        has_threads: whether threads refer to it, so that it has to be closed when its `Sender` is no longer used.
        buffers: two buffers of memory of its own, in which buckets have to be filled; none if any memory will do. Of
            several ends those of the first that has some are filled, and `hand` of the others gets these.
    """

    shares_memory: ClassVar[bool] = False
    networked: ClassVar[bool] = False
    in_process: ClassVar[bool] = False
    takes_buckets: ClassVar[bool] = True
    needs_buffers: ClassVar[bool] = True
    has_threads: ClassVar[bool] = False

    def __init__(self, setup: Setup, places: Sequence[WorkerId]) -> None:
        self.buffers: list[Tensor] = []

    @staticmethod
    def reaches(trainer: Mapping[str, Any], worker: Mapping[str, Any], group: Collection[str]) -> bool:
        """Return True if a rank can serve a worker this way, by the `introduction` of both. `group` has the devices of
        the rank, and of the workers of the same replica that it serves already."""
        return False

    @staticmethod
    def shared_with(
        place: WorkerId, peers: Mapping[WorkerId, str], hosts: Mapping[WorkerId, str]
    ) -> Collection[WorkerId]:
        """Return the workers whose buckets come to this one, too, among `peers`: those that the same rank serves at the
        same time, and over which transport."""
        return peers

    @staticmethod
    def group(place: WorkerId, peers: Mapping[WorkerId, str]) -> set[WorkerId]:
        """Return the workers that form one group, which takes together what all of them take. A bucket that only some
        take comes `apart`."""
        return set()

    # Channels

    def channel(self, place: WorkerId) -> dict[str, Any]:
        """Return what the worker's end needs: JSON values. Nothing comes back this way: what a worker has to say goes
        by a rendezvous (rendezvous.py), as nccl's does."""
        return {}

    def connect(self, gone: Gone) -> None:
        """Wait until every worker is connected; raise `TransferAborted` if one failed before."""

    def opened(self) -> None:
        """Remove names of shared memory, which every worker has mapped, so that a crash leaves nothing behind."""

    # One transfer

    def begin(self) -> None:
        """Begin a transfer."""

    def decide(self, gone: Gone) -> None:
        """Decide which workers take part."""

    def hand(self, turn: int, data: Tensor, recipients: Collection[WorkerId], last: bool) -> None:
        """Hand over a bucket that work on the current stream fills, number `turn` of this transfer. `data` (uint8) does
        not change until `reclaim` has returned for it."""

    def reclaim(self, turn: int, gone: Gone, stopped: Callable[[], bool]) -> None:
        """Wait until nobody reads the buckets up to this one, or until nobody is to be waited for (`stopped`)."""

    def finish(self, count: int, gone: Gone, stopped: Callable[[], bool]) -> None:
        """After `count` buckets, wait for work that no control call waits for."""

    def rest(self) -> None:
        """End a transfer, whatever its outcome."""

    def abort(self, reason: str) -> None:
        """Tell all workers that no more comes."""

    def close(self) -> None:
        """Free everything."""


class Expected(NamedTuple):
    """What comes to a worker in a transfer.

    Args:
        sizes: bytes of each bucket that comes, by its number, in order.
        placed: those of them that the trainer writes to the engine's tensors by itself.
        targets: of this worker's tensors, for a trainer in this process, which decides what it places.
        compare: get the bucket of what was placed, too.
        apart: those of them that not all workers of an NCCL group take.
    """

    sizes: Mapping[int, int]
    placed: Container[int] = ()
    targets: DirectTargets | None = None
    compare: bool = False
    apart: Container[int] = ()


class WorkerEnd:
    """A worker's end.

    Args:
        channel: this worker's `Sender.channel`.

    Attributes:
        once: whether a worker that has left one transfer cannot take part in another.
        over: whether no other transfer can follow, as it has left one.

    Raises:
        TransferAborted: another worker of the engine, or the trainer, failed at the same time.
        InvalidInput: the channel is not one of ours.
    """

    once: ClassVar[bool] = False

    def __init__(self, channel: Mapping[str, Any], device: torch.device) -> None:
        self.session, self.over = channel["session"], False
        self._nbytes, self._device = channel["nbytes"], device

    def receive(self, expected: Expected) -> Generator[Received, None, None]:
        """Yield buckets. One may be read until the next one is asked for; work on the current stream counts.

        Raises:
            TransferAborted: the trainer gave up, or is gone.
        """
        try:
            yield from self._received(expected)
        except BaseException:
            self.leave()
            raise

    def _received(self, expected: Expected) -> Iterator[Received]:
        for index, data in zip(expected.sizes, self.take(expected.sizes, expected.apart), strict=True):
            yield Received(index, data, index in expected.placed)

    def take(self, sizes: Mapping[int, int], apart: Container[int]) -> Iterator[Tensor]:
        """Yield the data of each bucket, to be read until the next one is asked for."""
        return iter(())

    def leave(self) -> None:
        """Report that this worker failed, so that nobody waits for it."""
        self.over = self.once

    def close(self) -> None:
        """Free buffers, and unmap the other side's memory."""
