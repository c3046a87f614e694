"""`nccl`: a group of a trainer's rank and the workers of one replica, and why nobody is left hanging in it.

NCCL itself never gives up: a broadcast that one member does not join spins on the GPUs of all others. So the trainer's
process has a store beside it. Before anybody broadcasts, the workers report there that they are ready, and the trainer
whether the transfer takes place. A member that fails later says so there as well; a thread of every member polls the
store, and aborts its communicator, which ends a broadcast that waits for ever. A member that dies is noticed, too: a
trainer by its store, a worker by its control call. The communicator itself is made in a thread, which is left behind if
it waits for a member that does not come.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from .base import Gone, Setup, TrainerEnd, WorkerEnd, WorkerId
from .liveness import CHECK_S, TransferAborted, wait_until
from .nccl_library import Library
from .rendezvous import TIMEOUT, Store, reach_store, serve_store

GRACE_S = 2.0
"""Seconds in which a broadcast ends once its receivers have all its data."""
_MISSING = "a worker of the engine did not come: its control call ended before the NCCL group was complete"


class Done(Protocol):
    """A CUDA event: tells whether a broadcast is complete."""

    def query(self) -> bool: ...


class Nccl:
    """A communicator with one GPU a member, on a stream of its own: rank 0 sends to all or some."""

    def __init__(self, store: Store, rank: int, world: int, device: torch.device) -> None:
        self._library, self._device = Library(), device
        if rank == 0:
            known = self._library.unique_id()
            store.set("id", known)
        else:
            known = _unique_id(store)
        with torch.cuda.device(device):
            self._communicator = self._library.join(known, rank, world)
        self._stream = torch.cuda.Stream(device)
        # The first broadcast waits for all members while it is enqueued, to connect them.
        first = torch.zeros(1, dtype=torch.uint8, device=device)
        self.broadcast(first)
        self._stream.synchronize()
        del first  # not before: its memory would be somebody else's

    @staticmethod
    def check() -> None:
        """Raise if no communicator can be made here, before the other members wait for one."""
        Library()

    def broadcast(self, data: Tensor) -> Done:
        return self._after(lambda stream: self._library.broadcast(self._communicator, data, stream))

    def send(self, data: Tensor, ranks: Sequence[int]) -> Done:
        """Send to some members at the same time."""
        return self._after(lambda stream: self._library.send(self._communicator, data, ranks, stream))

    def receive(self, data: Tensor) -> Done:
        """Receive what rank 0 sends to this member alone."""
        return self._after(lambda stream: self._library.receive(self._communicator, data, stream))

    def _after(self, enqueue: Callable[[int], None]) -> Done:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device):
            enqueue(self._stream.cuda_stream)
        return self._stream.record_event()

    def abort(self) -> None:
        self._library.abort(self._communicator)


def _unique_id(store: Store) -> bytes:
    """Return the communicator's id, which the trainer puts into the store. Not by a `get` that waits: the rest of this
    process could not ask the store meanwhile which member has left."""
    wait_until(lambda: store.has("id") or bool(store.get("left")), lambda: None)
    known = store.get("id") if store.has("id") else None
    if known is None:
        raise TransferAborted((store.get("left") or b"").decode())
    return known


class Group:
    """A member: rank 0 is the trainer's, the others are the workers of one replica.

    Args:
        store: see `serve_store` and `reach_store`.
        name: of the group in its store.
    """

    def __init__(self, store: Store, name: str, rank: int, world: int, device: torch.device) -> None:
        self._store, self._rank, self._world, self._device = store.under(name), rank, world, device
        self._number = 0
        self._nccl: Nccl | None = None
        self._lock = threading.Lock()
        self._over: threading.Event | None = None
        self._last: Done | None = None
        self._awaited: Done | None = None
        self.lost = ""
        if rank == 0:
            start = {"transfer": "0", "verdict": "", "left": ""} | dict.fromkeys(self._ready_keys(), "-1")
            for key, value in start.items():
                self._store.set(key, value)

    def open(self, gone: Callable[[], bool] = lambda: False) -> None:
        """Make the communicator; every member does so at the same time.

        Args:
            gone: returns True once the workers' control call has ended.

        Raises:
            TransferAborted: a member has failed before or meanwhile.
            RuntimeError: NCCL cannot be used here.
        """
        try:
            Nccl.check()
            if self._rank:
                self.join()
            elif why := self.decide(gone, TIMEOUT.total_seconds()):
                raise TransferAborted(why)
            self._make(gone)
        except TransferAborted as error:
            self.leave(str(error))
            raise
        except BaseException as error:
            self.leave(f"a member of the NCCL group could not join it: {error}")
            raise

    def _make(self, gone: Callable[[], bool]) -> None:
        """Make the communicator in a thread: NCCL waits for all members in one call that nothing ends."""
        raised: list[BaseException] = []

        def make() -> None:
            try:
                made = Nccl(self._store, self._rank, self._world, self._device)
            except BaseException as error:
                raised.append(error)
                return
            with self._lock:
                if not self.lost:
                    self._nccl = made
                    return
            made.abort()

        thread = threading.Thread(target=make, daemon=True)
        patience = GRACE_S

        def check() -> None:
            nonlocal patience
            reason = self._reason()
            if not reason and gone():
                patience -= CHECK_S
                reason = "its control call ended before its NCCL group was made" if patience < 0 else ""
            if reason:
                raise TransferAborted(reason)

        thread.start()
        wait_until(lambda: not thread.is_alive(), check)
        if raised:
            raise raised[0]

    # The trainer

    def announce(self) -> None:
        """Begin a transfer, before its workers are called."""
        self._number += 1
        with suppress(Exception):
            self._store.set("transfer", str(self._number))

    def decide(self, gone: Callable[[], bool], seconds: float = math.inf) -> str:
        """Wait until all workers are ready, or one never will be. Return why no transfer takes place; "" if it does.

        The workers get the same answer: a worker that reads it first and leaves must not put another reason there.
        """
        why, end = "", time.monotonic() + seconds

        def settled() -> bool:
            nonlocal why
            over = gone() or time.monotonic() > end
            # Asked last: a worker that fails says why before its control call ends.
            why = self._reason() or (_MISSING if over else "")
            return bool(why) or all(int(n or -1) == self._number for n in self._store.multi_get(self._ready_keys()))

        wait_until(settled, lambda: None)
        with suppress(Exception):
            self._store.set("verdict", f"{self._number} {why}")
        return why

    # A worker

    def join(self) -> None:
        """Report that this worker is ready for the announced transfer; return when it takes place.

        Raises:
            TransferAborted: it does not.
        """
        try:
            number = int(self._store.get("transfer") or -1)
            self._store.set(f"ready/{self._rank}", str(number))
        except Exception as error:
            raise TransferAborted("the trainer is gone") from error

        def settled() -> bool:
            reason, decided, why = self._reason(), "", ""
            with suppress(Exception):  # the trainer has died since: the next `_reason` says so
                decided, _, why = (self._store.get("verdict") or b"").decode().partition(" ")
            # Another worker that read it before has left because of it.
            reason = (why if decided == str(number) else "") or reason
            if reason:
                raise TransferAborted(reason)
            return decided == str(number)

        wait_until(settled, lambda: None)

    # Both

    def watch(self, gone: Callable[[], bool] = lambda: False) -> None:
        """Abort the communicator when a member has left, until `rest`."""
        self._over = threading.Event()
        threading.Thread(target=self._watch, args=(self._over, gone), daemon=True).start()

    def rest(self) -> None:
        if self._over is not None:
            self._over.set()

    def hand(self, data: Tensor, ranks: Sequence[int]) -> Done | None:
        """Enqueue a bucket on rank 0, for some members, after the current stream's work so far; return None if the
        group is lost, or nobody takes it."""
        if len(ranks) == self._world - 1:
            return self._enqueue(lambda nccl: nccl.broadcast(data))
        return self._enqueue(lambda nccl: nccl.send(data, ranks)) if ranks else None

    def take(self, data: Tensor, apart: bool = False) -> Done | None:
        """Enqueue a bucket of rank 0, on a worker; `apart`: not all members take it."""
        return self._enqueue(lambda nccl: nccl.receive(data) if apart else nccl.broadcast(data))

    def _enqueue(self, start: Callable[[Nccl], Done]) -> Done | None:
        with self._lock:
            if self.lost or self._nccl is None:
                return None
            self._last = start(self._nccl)
            return self._last

    def wait(self, done: Done | None) -> bool:
        """Wait for a broadcast; return whether it was completed."""
        self._awaited = done
        wait_until(lambda: bool(self.lost) or done is None or done.query(), lambda: None)
        return not self.lost and done is not None

    def leave(self, reason: str) -> None:
        """Tell all members to give up, and give up: the group cannot be used any more."""
        with suppress(Exception):
            self._store.set_first("left", reason)
        self.close(reason)

    def close(self, reason: str = "closed") -> None:
        """Abort the communicator and whatever waits in it."""
        self.rest()
        with self._lock:
            self.lost = self.lost or reason
            nccl, self._nccl = self._nccl, None
            if nccl is not None:
                nccl.abort()

    def _watch(self, over: threading.Event, gone: Callable[[], bool]) -> None:
        patience = GRACE_S
        while not over.wait(CHECK_S):
            reason = self._reason()
            # Not if all broadcasts are complete: this engine may be done, and the trainer wait for another one.
            under_way = any(done is not None and not done.query() for done in (self._awaited, self._last))
            if not reason and gone() and under_way:
                patience -= CHECK_S
                reason = "its control call ended in the middle of the transfer" if patience < 0 else ""
            if reason:
                self.leave(reason)

    def _reason(self) -> str:
        """Return why a member has left; "" if none has."""
        try:
            return (self._store.get("left") or b"").decode()
        except Exception:
            return "the trainer died in the middle of a push"

    def _ready_keys(self) -> list[str]:
        return [f"ready/{rank}" for rank in range(1, self._world)]


class NcclSender(TrainerEnd):
    """A group for each replica: a broadcast a bucket, or sends of one that not all of its workers take."""

    networked = True

    def __init__(self, setup: Setup, places: Sequence[WorkerId]) -> None:
        super().__init__(setup, places)
        members: dict[int, list[WorkerId]] = {}
        for place in places:
            members.setdefault(place[0], []).append(place)
        self._ranks = {place: rank for some in members.values() for rank, place in enumerate(some, 1)}
        self._worlds = {replica: 1 + len(some) for replica, some in members.items()}
        self._store = serve_store(setup.address)
        self.groups = {r: Group(self._store, str(r), 0, world, setup.device) for r, world in self._worlds.items()}
        self._sent: dict[int, list[Done | None]] = {}

    @staticmethod
    def reaches(trainer: Mapping[str, Any], worker: Mapping[str, Any], group: Collection[str]) -> bool:
        # NCCL takes every GPU once in a group.
        return worker["device"] not in group and "cpu" not in (trainer["device"], worker["device"])

    @staticmethod
    def shared_with(
        place: WorkerId, peers: Mapping[WorkerId, str], hosts: Mapping[WorkerId, str]
    ) -> Collection[WorkerId]:
        return {place}

    @staticmethod
    def group(place: WorkerId, peers: Mapping[WorkerId, str]) -> set[WorkerId]:
        return {other for other, kind in peers.items() if other[0] == place[0] and kind == peers[place]}

    def channel(self, place: WorkerId) -> dict[str, Any]:
        group = {"group": str(place[0]), "rank": self._ranks[place], "world": self._worlds[place[0]]}
        return {"store": self._store.channel(), **group}

    def connect(self, gone: Gone) -> None:
        for replica, group in self.groups.items():
            group.open(_among(gone, replica))

    def begin(self) -> None:
        self._sent = {}
        for group in self.groups.values():
            group.announce()

    def decide(self, gone: Gone) -> None:
        for replica, group in self.groups.items():
            ended = _among(gone, replica)
            if not group.decide(ended):
                self._sent[replica] = []
                group.watch(ended)

    def hand(self, turn: int, data: Tensor, recipients: Collection[WorkerId], last: bool) -> None:
        for replica, sent in self._sent.items():
            ranks = [rank for place, rank in self._ranks.items() if place[0] == replica and place in recipients]
            sent.append(self.groups[replica].hand(data, ranks))

    def reclaim(self, turn: int, gone: Gone, stopped: Callable[[], bool]) -> None:
        for replica, sent in self._sent.items():
            self.groups[replica].wait(sent[turn])

    def finish(self, count: int, gone: Gone, stopped: Callable[[], bool]) -> None:
        for replica, sent in self._sent.items():
            self.groups[replica].wait(next((done for done in reversed(sent) if done is not None), None))

    def rest(self) -> None:
        for group in self.groups.values():
            group.rest()

    def abort(self, reason: str) -> None:
        for group in self.groups.values():
            group.leave(reason)

    def close(self) -> None:
        for group in self.groups.values():
            group.close()


class NcclReceiver(WorkerEnd):
    once = True

    def __init__(self, channel: Mapping[str, Any], device: torch.device) -> None:
        super().__init__(channel, device)
        store = reach_store(channel["store"])
        self._group = Group(store, channel["group"], channel["rank"], channel["world"], device)
        self._buffers: list[Tensor] = []
        try:
            self._buffers = [torch.empty(self._nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
            self._group.open()
        except BaseException:
            self.leave()
            raise

    def take(self, sizes: Mapping[int, int], apart: Container[int]) -> Iterator[Tensor]:
        group, due = self._group, list(sizes.items())
        group.join()
        group.watch()

        def start(turn: int) -> Done | None:
            index, size = due[turn]
            return group.take(self._buffers[turn % 2][:size], index in apart)

        try:
            # One bucket comes in while the one before is loaded.
            started = [start(0)] if due else []
            for turn in range(len(due)):
                if turn + 1 < len(due):
                    started.append(start(turn + 1))
                if not group.wait(started[turn]):
                    raise TransferAborted(group.lost)
                yield self._buffers[turn % 2]
        finally:
            group.rest()

    def leave(self) -> None:
        super().leave()
        self._group.leave("a worker of the engine failed in the middle of a push")

    def close(self) -> None:
        self._group.close()
        self._buffers = []
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # or torch keeps what the buffers took


def _among(gone: Gone, replica: int) -> Callable[[], bool]:
    return lambda: replica in gone()
