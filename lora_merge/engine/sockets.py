"""Buckets over plain sockets, to hosts that share neither memory nor an NCCL group with the trainer.

Every worker has a link to the trainer's rank that serves it (links.py), which listens until all have come. Of an
engine's workers on one host the first one leads: a thread of it asks for a bucket whenever it has room for one,
receives it, and publishes it where the others of that host read it, too. So a bucket crosses to a host once. With
several workers there its two buffers are in shared memory, beside a mailbox as the one of `transport`, whose words
carry the number of the transfer: that is what the others ask the trainer for.

As a worker asks for each bucket, nothing is on its way that nobody has room for, and one that leaves just closes its
link. Buckets of a GPU go through pinned memory on either side.
"""

from __future__ import annotations

import base64
import os
import socket
import threading
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .links import GREETING_S, Frame, Kind, Link, digest, reach, secret_of, welcome
from .memory import SharedMemory, shared_path
from .store import listen
from .transport import ABORTED, DONE, FILLED, LEFT, PID, WORDS, WORKERS, WorkerId, nobody
from .waiting import CHECK_S, TransferAborted, alive, told, until

STRANGERS = 64
"""Who has connected and not greeted yet: of more, the first one is shown out."""
_GAVE_UP = "the trainer gave up in the middle of a push"
_PAGE = 4096
"""Bytes: the buffers in shared memory begin at a page behind the mailbox."""


class _Filled(NamedTuple):
    """A bucket to be sent.

    Args:
        data: its bytes.
        ready: returns when they are there.
        digests: of its pieces.
    """

    data: memoryview
    ready: Callable[[], object]
    digests: list[Future[bytes]]


@dataclass(slots=True)
class _Member:
    """A worker as the trainer sees it.

    Args:
        leader: who takes the buckets for its host.
        link: once it has come.
        due: buckets of this transfer that it takes, of those that were handed over so far.
        sent: how many of these have gone out.
    """

    leader: WorkerId
    link: Link | None = None
    lost: bool = False
    due: list[int] = field(default_factory=list)
    sent: int = 0


class Outbox:
    """The trainer's end: hands buckets to workers as they ask for them.

    Args:
        address: at which it listens.
        hosts: of each worker.
        nbytes: of a buffer.
        device: of the buckets.

    Attributes:
        nbytes: bytes of buckets that have gone out so far.

    Raises:
        InvalidInput: this machine has no such address.
    """

    def __init__(self, address: str, hosts: Mapping[WorkerId, str], nbytes: int, device: torch.device) -> None:
        self._secret, self._address = os.urandom(32), address
        first: dict[tuple[int, str], WorkerId] = {}
        leaders = {place: first.setdefault((place[0], host), place) for place, host in hosts.items()}
        self._members = {place: _Member(leader) for place, leader in leaders.items()}
        self._changed = threading.Condition()
        self._number, self._aborted, self._closed = 0, False, False
        self._filled: dict[int, _Filled] = {}
        self._past = 0
        self._greeted: list[socket.socket] = []
        self.nbytes = 0
        self._pinned = _pinned(nbytes) if device.type == "cuda" else []
        self._listening = listen(address)
        self._port = self._listening.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    def channel(self, place: WorkerId) -> dict[str, Any]:
        """How this worker's `Inbox` reaches it: JSON values. Whoever has them is heard as this worker."""
        leader = self._members[place].leader
        together = [other for other, member in self._members.items() if member.leader == leader]
        name = base64.b32encode(secret_of(self._secret, leader)[:10]).decode().lower()
        return {"address": self._address, "port": self._port, "secret": secret_of(self._secret, place).hex()} | {
            "place": list(place), "at": together.index(place), "members": len(together), "shared": f"tcp-{name}"
        }  # fmt: skip

    def connect(self, gone: Callable[[], set[int]] = nobody) -> None:
        """Wait until all workers have come. From then on nobody else can connect.

        Args:
            gone: replicas whose control call has ended in which workers come.

        Raises:
            TransferAborted: a worker did not.
        """
        while True:
            ended = gone()  # asked first: a worker comes before its control call ends
            with self._changed:
                lacking = [place for place, member in self._members.items() if member.link is None]
                left = [place for place, member in self._members.items() if member.lost]
                if not lacking and not left:
                    break
                for r, w in left:
                    raise TransferAborted(f"worker {w} of engine {r} connected, and left again")
                for r, w in lacking:
                    if r in ended:
                        raise TransferAborted(f"worker {w} of engine {r} did not connect: its control call ended")
                self._changed.wait(CHECK_S)
        self._shut()

    def announce(self) -> None:
        """A transfer begins."""
        with self._changed:
            self._number, self._aborted = self._number + 1, False
            self._filled, self._past = {}, 0
            for member in self._members.values():
                member.due, member.sent = [], 0

    def hand(self, turn: int, data: Tensor, takers: Container[WorkerId]) -> None:
        """Queue a bucket for sending.

        Args:
            turn: its number in this transfer.
            data: uint8; stays as it is until `wait` has returned for it. Work on the current stream counts.
            takers: workers that take it: it goes to each host that has one.
        """
        leaders = {member.leader for place, member in self._members.items() if place in takers}
        if not leaders:
            return
        ready: Callable[[], object] = _at_once
        if self._pinned:
            data = self._pinned[turn % 2][: data.numel()].copy_(data, non_blocking=True)
            ready = torch.cuda.current_stream().record_event().synchronize
        view = _bytes(data)
        with self._changed:
            self._filled[turn] = _Filled(view, ready, digest(view, ready))
            for leader in leaders:
                self._members[leader].due.append(turn)
            self._changed.notify_all()

    def wait(self, turn: int, gone: Callable[[], set[int]], stopped: Callable[[], bool]) -> None:
        """Wait until everybody who is still there has the buckets up to this one.

        Args:
            gone: replicas whose control call has ended, or that have none.
            stopped: nobody is waited for any more.
        """
        while not stopped():
            left = gone()
            with self._changed:
                waiting = [
                    place
                    for place, member in self._members.items()
                    if not member.lost and place[0] not in left and any(t <= turn for t in member.due[member.sent :])
                ]
                if not waiting:
                    break
                self._changed.wait(CHECK_S)
        with self._changed:
            self._past = turn + 1
            self._filled.pop(turn, None)

    def abort(self) -> None:
        """End this transfer. Workers that have not connected yet cannot any more."""
        self._shut()
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
            lacking = any(member.link is None for member in self._members.values())
        if lacking:
            self.close()

    def close(self) -> None:
        """End all connections."""
        self._shut()
        with self._changed:
            self._closed, self._filled = True, {}
            self._changed.notify_all()
            links = [member.link for member in self._members.values() if member.link is not None]
            for connection in self._greeted:
                _hang_up(connection)
        for link in links:
            link.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(GREETING_S)
        self._pinned = []

    def _shut(self) -> None:
        _hang_up(self._listening)
        self._listening.close()

    # Threads

    def _run(self, work: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):  # it was shut
            while True:
                connection, _ = self._listening.accept()
                with self._changed:
                    self._greeted.append(connection)
                    if len(self._greeted) > STRANGERS:
                        _hang_up(self._greeted.pop(0))
                self._run(self._meet, connection)

    def _meet(self, connection: socket.socket) -> None:
        """Somebody has connected."""
        came = welcome(connection, self._secret)
        with self._changed:
            self._greeted = [other for other in self._greeted if other is not connection]
            member = self._members.get(came[0]) if came is not None else None
            if came is None or member is None or member.link is not None or self._closed:
                connection.close()
                return
            member.link = came[1]
            self._changed.notify_all()
        try:
            self._serve(member, came[1])
        except TransferAborted:
            pass
        finally:
            came[1].close()
            with self._changed:
                member.lost = True
                self._changed.notify_all()

    def _serve(self, member: _Member, link: Link) -> None:
        leader = self._members[member.leader]
        self._until(lambda: leader.link is not None or leader.lost, link)
        link.send(Frame(Kind.READY))
        while True:
            asked = link.receive()
            if asked.kind == Kind.WHICH:
                with self._changed:
                    answer = Frame(Kind.ABORT) if self._aborted else Frame(Kind.NOW, self._number)
                link.send(answer)
            elif asked.kind == Kind.TAKE:
                self._send(member, link, asked)
            else:
                raise TransferAborted(f"a worker says {asked.kind.name}")

    def _send(self, member: _Member, link: Link, asked: Frame) -> None:
        """Answer who has room for a bucket."""

        def over() -> bool:
            # What is past was not waited for on behalf of an engine whose control call has ended.
            if self._aborted or self._number != asked.transfer:
                return True
            return asked.bucket < len(member.due) and member.due[asked.bucket] < self._past

        if not over() and asked.bucket != member.sent:
            raise TransferAborted("a worker asks for a bucket whose turn it is not")
        self._until(lambda: over() or asked.bucket < len(member.due), link)
        with self._changed:
            bucket = None if over() else self._filled.get(member.due[asked.bucket])
        if bucket is None:
            link.send(asked._replace(kind=Kind.ABORT))
            return
        bucket.ready()
        frame = asked._replace(kind=Kind.BUCKET, nbytes=len(bucket.data))
        link.send_bucket(frame, bucket.data, bucket.digests)
        with self._changed:
            self.nbytes += len(bucket.data)
            if self._number == asked.transfer:
                member.sent = asked.bucket + 1
            self._changed.notify_all()

    def _until(self, ready: Callable[[], bool], link: Link) -> None:
        """Wait for something while nothing is due from the other side of a link."""
        with self._changed:
            while not ready():
                if self._closed:
                    raise TransferAborted("the channel was closed")
                link.look()
                self._changed.wait(CHECK_S)


class Inbox:
    """A worker's end.

    Args:
        channel: this worker's `Outbox.channel`.
        nbytes: of a buffer.
        device: of the worker.

    Raises:
        TransferAborted: the trainer is not reached, or has given up.
        InvalidInput: there is not enough shared memory.
    """

    def __init__(self, channel: Mapping[str, Any], nbytes: int, device: torch.device) -> None:
        self._at, self._members, self._device = channel["at"], channel["members"], device
        self._nbytes, self._why = nbytes, ""
        self._file: SharedMemory | None = None
        self._link: Link | None = None
        self._box: Any = None  # int64
        self._buffers: list[Tensor] = []
        self._bucket: Tensor | None = None
        self._unpin: Callable[[], object] = _at_once
        self._thread: threading.Thread | None = None
        try:
            if self._leads:
                self._prepare(channel["shared"])  # before the others hear that it is there
            self._link = link = _reached(channel)
            _told(link, Kind.READY)
            if not self._leads:
                self._prepare(channel["shared"])
            self._sign()
            if device.type != "cpu":
                self._bucket = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except BaseException:
            self.close()
            raise

    @property
    def _leads(self) -> bool:
        return self._at == 0

    @property
    def _mine(self) -> int:
        return WORKERS + WORDS * self._at

    def _sign(self) -> None:
        self._box[self._mine + PID] = os.getpid()
        if self._file is not None and self._box[WORKERS + PID :: WORDS].all():
            self._file.hide()  # all have mapped it: a crash leaves nothing behind

    def _prepare(self, name: str) -> None:
        """The mailbox and the buffers: the leader's own, and the others' if there are any."""
        words, cuda = WORKERS + WORDS * self._members, self._device.type == "cuda"
        begin = -(-8 * words // _PAGE) * _PAGE
        if self._members == 1:
            self._box = torch.zeros(words, dtype=torch.int64, device="cpu").numpy()
            self._buffers = _pinned(self._nbytes) if cuda else [_plain(self._nbytes) for _ in range(2)]
            return
        path = shared_path(name)
        self._file = SharedMemory(name if self._leads else path, begin + 2 * self._nbytes, create=self._leads)
        self._box = self._file.tensor[: 8 * words].view(torch.int64).numpy()
        data = self._file.tensor[begin:]
        if cuda:
            self._unpin = weakref.finalize(self, _pin(data))
        self._buffers = list(data.split(self._nbytes))

    def take(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """The buckets of a transfer, of these sizes: on the worker's device, to be read until the next one is asked
        for; work on the current stream counts.

        Raises:
            TransferAborted: no more comes.
        """
        link, box = self._link, self._box
        if link is None:
            raise TransferAborted("this channel is closed; push again")
        try:
            link.send(Frame(Kind.WHICH))
            number = _told(link, Kind.NOW).transfer
        except Exception as error:
            if self._leads:
                self._tell(error)
            raise
        if self._leads:
            self._thread = threading.Thread(target=self._receive, args=(link, number, sizes), daemon=True)
            self._thread.start()
        for index, size in enumerate(sizes):
            mark = _mark(number, index + 1)
            until(lambda: box[FILLED] >= mark or box[ABORTED], self._look)  # noqa: B023, it is called at once
            if box[FILLED] < mark:
                raise TransferAborted(self._why or _ABORTED[int(box[ABORTED])])
            data = self._buffers[index % 2]
            if self._bucket is None:
                yield data
            else:
                self._bucket[:size].copy_(data[:size], non_blocking=True)
                torch.cuda.current_stream(self._device).synchronize()
                box[self._mine + DONE] = mark
                yield self._bucket
            box[self._mine + DONE] = mark
        if self._thread is not None:
            self._thread.join()

    def leave(self) -> None:
        """Note that this worker takes no more buckets, of any transfer."""
        if self._box is not None and self._leads:
            self._give_up(_FAILED)
        elif self._box is not None:
            self._box[self._mine + LEFT] = 1
        if self._link is not None:
            self._link.close()

    def close(self) -> None:
        """Let go of everything; a bucket that is on its way is not waited for."""
        self.leave()
        if self._thread is not None:
            self._thread.join()
        self._unpin()
        if self._file is not None:
            self._file.hide()
        self._box, self._buffers, self._bucket, self._file, self._link = None, [], None, None, None

    def _look(self) -> None:
        """Raise `TransferAborted` where the worker that takes buckets for this host is gone."""
        if not alive(int(self._box[WORKERS + PID])):
            raise TransferAborted(_ABORTED[_FAILED])

    # The leader's thread

    def _receive(self, link: Link, number: int, sizes: Sequence[int]) -> None:
        """Ask for buckets as there is room, and publish them."""
        box, before = self._box, int(self._box[FILLED])
        try:
            for index, size in enumerate(sizes):
                self._room(before if index < 2 else _mark(number, index - 1))
                frame = Frame(Kind.TAKE, number, index)
                link.send(frame)
                bucket = Frame(Kind.BUCKET, number, index, size)
                if _told(link, Kind.BUCKET) != bucket:
                    raise TransferAborted("the trainer sends another bucket than the one that is due")
                link.receive_bucket(bucket, _bytes(self._buffers[index % 2])[:size])
                box[FILLED] = _mark(number, index + 1)
        except BaseException as error:
            self._tell(error)

    def _tell(self, error: BaseException) -> None:
        """Tell the others on this host why no more comes, before `leave` says that this worker failed."""
        self._why = str(error) if isinstance(error, TransferAborted) else told(error)
        self._give_up(_TRAINER if self._why == _GAVE_UP else _BROKE)

    def _room(self, mark: int) -> None:
        """Wait until everybody on this host is done with what lies where the next bucket goes."""
        box, ours = self._box, [WORKERS + WORDS * at for at in range(self._members)]

        def free() -> bool:
            return bool(box[ABORTED]) or all(box[at + DONE] >= mark or box[at + LEFT] for at in ours)

        def look() -> None:
            for at in ours:
                if box[at + PID] and not alive(int(box[at + PID])):
                    box[at + LEFT] = 1

        until(free, look)
        if box[ABORTED]:
            raise TransferAborted(_ABORTED[int(box[ABORTED])])

    def _give_up(self, code: int) -> None:
        self._box[ABORTED] = self._box[ABORTED] or code


_TRAINER, _BROKE, _FAILED = 1, 2, 3
_ABORTED = {
    _TRAINER: _GAVE_UP,
    _BROKE: "the connection to the trainer broke in the middle of a push",
    _FAILED: "the worker that takes the buckets for this host failed, or died, in the middle of a push",
}
"""Why no more comes, as the leader says it to the others."""


def _reached(channel: Mapping[str, Any]) -> Link:
    r, w = channel["place"]
    return reach(channel["address"], channel["port"], bytes.fromhex(channel["secret"]), (r, w))


def _told(link: Link, wanted: Kind) -> Frame:
    """What the trainer says.

    Raises:
        TransferAborted: that it gives up, or something else than what is due.
    """
    answer = link.receive()
    if answer.kind == Kind.ABORT:
        raise TransferAborted(_GAVE_UP)
    if answer.kind != wanted:
        raise TransferAborted(f"the trainer says {answer.kind.name} instead of {wanted.name}")
    return answer


def _at_once() -> None:
    """Nothing has to be done."""


def _mark(number: int, count: int) -> int:
    """So many buckets of a transfer, as a word of the mailbox: more than any of the transfers before."""
    return number << 32 | count


def _plain(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _pinned(nbytes: int) -> list[Tensor]:
    return [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu") for _ in range(2)]


def _pin(data: Tensor) -> Callable[[], object]:
    """Pin shared memory: what undoes it."""
    runtime, address = torch.cuda.cudart(), data.data_ptr()
    torch.cuda.check_error(runtime.cudaHostRegister(address, data.numel(), 0))
    return partial(runtime.cudaHostUnregister, address)


def _bytes(data: Tensor) -> memoryview:
    """Of a tensor in this process's memory."""
    return memoryview(cast(Any, data.numpy()))


def _hang_up(connection: socket.socket) -> None:
    """Close a socket while another thread waits in it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
