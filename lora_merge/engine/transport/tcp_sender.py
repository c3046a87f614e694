"""`tcp`, the trainer's end: buckets over plain sockets, to hosts that share neither memory nor an NCCL group with it.
The workers' end is tcp_receiver.py.

Every worker has a link (tcp_link.py) to the trainer's rank that serves it, which listens until all are connected. Of an
engine's workers on one host the first one leads: it asks for a bucket whenever it has room for one, and publishes it to
the others on that host. So a bucket crosses to a host once, nothing is sent that nobody has room for, and a worker
leaves by closing its link. Buckets of a GPU go through pinned memory on either side.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .base import Gone, Setup, TrainerEnd, WorkerId, nobody
from .liveness import CHECK_S, TransferAborted
from .memory import bytes_of, host_buffers
from .rendezvous import listen
from .tcp_link import GREETING_S, Frame, Kind, TcpLink, digest, secret_of, welcome

STRANGERS = 64
"""Most connections that may be open before they greet; the oldest is closed if there are more."""


class _Filled(NamedTuple):
    """A bucket to be sent, once `ready` has returned; `digests` of its pieces."""

    data: memoryview
    ready: Callable[[], object]
    digests: list[Future[bytes]]


@dataclass(slots=True)
class _Member:
    """A worker as the trainer sees it.

    Args:
        leader: takes the buckets for its host.
        link: None until it is connected.
        due: buckets of this transfer that it takes, of those that were handed over so far.
        sent: how many of these were sent.
    """

    leader: WorkerId
    link: TcpLink | None = None
    lost: bool = False
    due: list[int] = field(default_factory=list)
    sent: int = 0


class TcpSender(TrainerEnd):
    """The trainer's end: sends buckets to workers as they ask for them. Without its host in `Setup.hosts`, a worker has
    a host to itself.

    Attributes:
        nbytes: bytes of buckets that were sent so far.

    Raises:
        InvalidInput: this machine has no such address.
    """

    networked = has_threads = True

    def __init__(self, setup: Setup, places: Sequence[WorkerId]) -> None:
        super().__init__(setup, places)
        self._secret, self._address = os.urandom(32), setup.address
        hosts = {place: setup.hosts.get(place, str(place)) for place in places}
        first: dict[tuple[int, str], WorkerId] = {}
        leaders = {place: first.setdefault((place[0], host), place) for place, host in hosts.items()}
        self._members = {place: _Member(leader) for place, leader in leaders.items()}
        # Everybody on a host can list these names, so they hold nothing of a secret.
        self._shared = {leader: f"tcp-{secrets.token_hex(10)}" for leader in leaders.values()}
        self._changed = threading.Condition()
        self._number, self._aborted, self._closed = 0, False, False
        self._filled: dict[int, _Filled] = {}
        self._past = 0
        self._greeted: list[socket.socket] = []
        self.nbytes = 0
        self._pinned = host_buffers(setup.nbytes, pinned=True) if setup.device.type == "cuda" else []
        self._listening = listen(setup.address)
        self._port = self._listening.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    @staticmethod
    def reaches(trainer: Mapping[str, Any], worker: Mapping[str, Any], group: Collection[str]) -> bool:
        return True

    @staticmethod
    def shared_with(
        place: WorkerId, peers: Mapping[WorkerId, str], hosts: Mapping[WorkerId, str]
    ) -> Collection[WorkerId]:
        # A bucket comes to a host once.
        return {at for at in peers if (at[0], hosts.get(at)) == (place[0], hosts.get(place))}

    def channel(self, place: WorkerId) -> dict[str, Any]:
        # Whoever has these values is heard as this worker.
        leader = self._members[place].leader
        together = [other for other, member in self._members.items() if member.leader == leader]
        return {"address": self._address, "port": self._port, "secret": secret_of(self._secret, place).hex()} | {
            "place": list(place), "at": together.index(place), "members": len(together), "shared": self._shared[leader]
        }  # fmt: skip

    def connect(self, gone: Gone = nobody) -> None:
        """Wait until all workers have connected. From then on nobody else can."""
        while True:
            ended = gone()  # asked first: a worker connects before its control call ends
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

    def begin(self) -> None:
        with self._changed:
            self._number, self._aborted = self._number + 1, False
            self._filled, self._past = {}, 0
            for member in self._members.values():
                member.due, member.sent = [], 0

    def hand(self, turn: int, data: Tensor, recipients: Collection[WorkerId], last: bool = False) -> None:
        """Queue a bucket for sending to each host that has a recipient."""
        leaders = {member.leader for place, member in self._members.items() if place in recipients}
        if not leaders:
            return
        ready: Callable[[], object] = _at_once
        if self._pinned:
            data = self._pinned[turn % 2][: data.numel()].copy_(data, non_blocking=True)
            ready = torch.cuda.current_stream().record_event().synchronize
        view = bytes_of(data)
        with self._changed:
            self._filled[turn] = _Filled(view, ready, digest(view, ready))
            for leader in leaders:
                self._members[leader].due.append(turn)
            self._changed.notify_all()

    def reclaim(self, turn: int, gone: Gone, stopped: Callable[[], bool]) -> None:
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

    def finish(self, count: int, gone: Gone, stopped: Callable[[], bool]) -> None:
        if count:
            self.reclaim(count - 1, gone, stopped)

    def abort(self, reason: str = "") -> None:
        """End this transfer. Workers that are not connected yet cannot connect any more."""
        self._shut()
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
            lacking = any(member.link is None for member in self._members.values())
        if lacking:
            self.close()

    def close(self) -> None:
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
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listening.accept()
                with self._changed:
                    self._greeted.append(connection)
                    if len(self._greeted) > STRANGERS:
                        _hang_up(self._greeted.pop(0))
                self._run(self._meet, connection)

    def _meet(self, connection: socket.socket) -> None:
        """Greet a connection, and serve it if it is a worker's."""
        place, link = welcome(connection, self._secret) or (None, None)
        with self._changed:
            self._greeted = [other for other in self._greeted if other is not connection]
            member = self._members.get(place) if place is not None else None
            if link is None or member is None or member.link is not None or self._closed:
                connection.close()
                return
            member.link = link
            self._changed.notify_all()
        try:
            self._serve(member, link)
        except TransferAborted:
            pass
        finally:
            link.close()
            with self._changed:
                member.lost = True
                self._changed.notify_all()

    def _serve(self, member: _Member, link: TcpLink) -> None:
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

    def _send(self, member: _Member, link: TcpLink, asked: Frame) -> None:
        """Answer a worker that has room for a bucket."""

        def over() -> bool:
            # Buckets in the past were not kept for an engine whose control call has ended.
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

    def _until(self, ready: Callable[[], bool], link: TcpLink) -> None:
        """Wait for something while the other side of a link has nothing to say."""
        with self._changed:
            while not ready():
                if self._closed:
                    raise TransferAborted("the channel was closed")
                link.check()
                self._changed.wait(CHECK_S)


def _at_once() -> None:
    """Do nothing: there is nothing to wait for."""


def _hang_up(connection: socket.socket) -> None:
    """End a socket's connection under a thread that waits in it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
