"""Buckets over sockets: once a host, to nobody who does not know the secret, and nothing that was changed on the way.
What all transports have in common is in test_transport.py, two hosts and real engines in test_vllm_hosts.py."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import threading
import time
from base64 import b32encode, b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import leaving_nothing, shared

from lora_merge.engine.transport import tcp_link as links
from lora_merge.engine.transport import tcp_sender as outbox
from lora_merge.engine.transport.base import Expected, WorkerEnd
from lora_merge.engine.transport.liveness import TransferAborted
from lora_merge.engine.transport.memory import shared_path
from lora_merge.engine.transport.routing import worker_end
from lora_merge.engine.transport.sender import Sender
from lora_merge.engine.transport.tcp_link import Frame, Kind
from lora_merge.engine.transport.tcp_receiver import TcpReceiver
from tests.engine.test_transport import ALL, CPU, NBYTES, SIZES, SOON_S, Counting, Workers, die, own_address, processes

PLACES = [(0, 0), (0, 1), (0, 2), (1, 0)]
HOSTS = {(0, 0): "a", (0, 1): "a", (0, 2): "b", (1, 0): "a"}


def tcp(ours: Sender) -> outbox.TcpSender:
    end = ours.ends["tcp"]
    assert isinstance(end, outbox.TcpSender)
    return end


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    with leaving_nothing():
        yield
    end = time.monotonic() + SOON_S
    while (left := [t for t in threading.enumerate() if "_meet" in t.name or "_accept" in t.name]) and (
        time.monotonic() < end
    ):
        time.sleep(0.01)
    assert not left


def one() -> Sender:
    return Sender({(0, 0): "tcp"}, NBYTES, CPU)


class Taking:
    """A worker in a thread of this process: connects, and takes one transfer when told."""

    def __init__(self, channel: dict[str, Any], sizes: dict[int, int] = SIZES, pause: float = 0) -> None:
        self.seen: list[int] = []
        self.error = ""
        self.receiver: WorkerEnd | None = None
        self._go, self._channel, self._sizes, self._pause = threading.Event(), channel, sizes, pause
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self.receiver = worker_end(self._channel, CPU)
            self._go.wait(SOON_S)
            for received in self.receiver.receive(Expected(self._sizes)):
                assert received.data is not None
                assert (received.data[:1000] == received.index + 1).all()
                self.seen.append(received.index)
                time.sleep(self._pause)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            if self.receiver is not None:
                self.receiver.close()

    def go(self) -> None:
        self._go.set()

    def gone(self) -> set[int]:
        return set() if self._thread.is_alive() else {0}

    def end(self) -> str:
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()
        return self.error


def push(ours: Sender, worker: Taking) -> None:
    ours.connect(worker.gone)
    ours.begin(source := Counting())
    worker.go()
    ours.serve(source, {}, worker.gone)


# Once a host


def test_a_bucket_crosses_once_a_host() -> None:
    """Of one engine: another one's workers may take part in other pushes."""
    ours = Sender(dict.fromkeys(PLACES, "tcp"), NBYTES, CPU, hosts=HOSTS)
    workers = Workers(ours, "cpu", transfers=2)
    ours.connect(workers.gone)
    channels = [ours.channel(*place) for place in PLACES]
    files = {Path(shared_path(channel["shared"])) for channel in channels}
    assert len(files) == 3
    for secret in (bytes.fromhex(channel["secret"]) for channel in channels):  # everybody can list names of files
        for at in range(len(secret) - 2):
            piece = secret[at : at + 3]
            told = (piece.hex(), *(code(piece).decode().lower().rstrip("=")[:4] for code in (b32encode, b64encode)))
            assert not any(word in file.name.partition("tcp-")[2].lower() for word in told for file in files)
    for turn in (1, 2):
        workers.wait()
        ours.begin(source := Counting())
        workers.call({0, 1})
        ours.serve(source, {}, workers.gone)
        assert not files & shared(), "a crash leaves nothing behind"
        assert tcp(ours).nbytes == turn * 3 * sum(SIZES.values())
    assert workers.wait() == dict.fromkeys(PLACES, ALL * 2)
    ours.close()


@pytest.mark.parametrize("how", ["breaks", "dies", "dawdles"])
@pytest.mark.parametrize("at", [-1, 0, 3, 6])
@pytest.mark.parametrize("wrong", [(0, 0), (0, 1)], ids=["leader", "another one"])
def test_one_of_several_workers_on_a_host_fails(wrong: tuple[int, int], at: int, how: str) -> None:
    """The others end when the one fails that takes buckets for all of them, and go on when another one does."""
    ours = Sender(dict.fromkeys(PLACES, "tcp"), NBYTES, CPU, hosts=HOSTS)
    workers = Workers(ours, "cpu", wrong=wrong, at=at, how=how)
    ours.connect(workers.gone)
    ours.begin(source := Counting())
    workers.call({0, 1})
    began = time.monotonic()
    ours.serve(source, {}, lambda: workers.gone() - ({0} if how == "breaks" else set()))
    assert time.monotonic() - began < SOON_S
    assert source.filled == ALL
    found = workers.wait()
    assert time.monotonic() - began < SOON_S
    assert found[1, 0] == ALL, "another engine"
    if how == "dawdles" and at >= 0:
        assert found == dict.fromkeys(PLACES, ALL)
    elif how == "breaks":
        assert found[wrong][-1].startswith("RuntimeError")
        assert found[0, 2] == ALL, "on a host of its own"
        other = found[0, 1 - wrong[1]]
        if wrong == (0, 1):
            assert other == ALL
        elif other != ALL:  # it was at most two buckets behind
            assert other[-1].startswith("TransferAborted: the worker that takes the buckets for this host failed")
    elif how == "dies":
        assert found[wrong] == "dead"
        assert all(said == ALL or said[-1].startswith("TransferAborted") for said in found.values() if said != "dead")
    ours.close()


def test_a_worker_that_leaves_while_it_connects_is_noticed() -> None:
    ours = Sender({(0, 0): "tcp", (0, 1): "tcp"}, NBYTES, CPU, hosts={(0, 0): "a", (0, 1): "a"})
    follower = Taking(ours.channel(0, 1))  # waits for its leader
    time.sleep(0.2)
    assert follower.gone() == set()
    with pytest.raises(TransferAborted, match="worker 0 of engine 0 did not connect: its control call ended"):
        ours.connect(lambda: {0})
    # On a busy machine it may not have greeted by then.
    assert re.search("TransferAborted: the trainer (died, or left|.* did not greet)", follower.end())
    ours.close()


def test_no_room_in_shared_memory_is_an_error_for_all() -> None:
    ours = Sender({(0, 0): "tcp", (0, 1): "tcp"}, NBYTES, CPU, hosts={(0, 0): "a", (0, 1): "a"})
    leader, follower = (Taking(ours.channel(0, w) | {"nbytes": 1 << 50}) for w in range(2))
    with pytest.raises(TransferAborted, match="worker 0 of engine 0 did not connect"):
        ours.connect(leader.gone)
    assert "InvalidInput: no " in leader.end()
    assert "TransferAborted" in follower.end()
    ours.close()


# Strangers


def knock(channel: dict[str, Any], said: bytes) -> socket.socket:
    connection = socket.create_connection((channel["address"], channel["port"]), SOON_S)
    connection.sendall(said)
    return connection


@pytest.mark.parametrize("count", [1, 2 * outbox.STRANGERS])
def test_strangers_are_not_heard_and_hold_nobody_up(count: int) -> None:
    """Silence, junk, a worker's place without its secret: before, while and after a worker connects."""
    ours = one()
    channel = ours.channel(0, 0)
    place = bytes(8)
    junk = [b"", b"\0", os.urandom(5000), place + os.urandom(64), b"GET / HTTP/1.1\r\n\r\n" * 10]
    held = [knock(channel, junk[i % len(junk)]) for i in range(count)]
    worker = Taking(channel)
    held += [knock(channel, said) for said in junk]
    push(ours, worker)
    assert worker.end() == ""
    assert worker.seen == ALL
    with pytest.raises(OSError):  # noqa: PT011, refused or reset
        knock(channel, b"")
    for connection in held:
        connection.close()
    ours.close()


def test_a_stranger_who_says_nothing_is_shown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one who says a byte now and then."""
    monkeypatch.setattr(links, "GREETING_S", 0.5)
    ours = one()
    silent, slow = (knock(ours.channel(0, 0), b"") for _ in range(2))
    began = time.monotonic()
    with contextlib.suppress(OSError):
        while time.monotonic() - began < SOON_S:
            slow.sendall(b"\0")
            time.sleep(0.1)
    assert time.monotonic() - began < SOON_S
    silent.settimeout(SOON_S)
    assert len(silent.recv(100)) == 32, "a nonce, which is no secret"
    assert silent.recv(1) == b""
    ours.close()


@pytest.mark.parametrize("how", ["another secret", "another worker's place"])
def test_who_does_not_know_a_workers_secret_is_none(how: str) -> None:
    ours = Sender({(0, 0): "tcp", (0, 1): "tcp"}, NBYTES, CPU)
    changed = {"secret": "00" * 32} if how == "another secret" else {"place": [0, 1]}
    wrong = Taking(ours.channel(0, 0) | changed)
    assert "did not greet this worker" in wrong.end()
    workers = [Taking(ours.channel(0, w)) for w in range(2)]
    ours.connect()
    ours.begin(source := Counting())
    for worker in workers:
        worker.go()
    ours.serve(source, {})
    assert [worker.end() for worker in workers] == ["", ""]
    ours.close()


def test_a_worker_cannot_come_twice() -> None:
    ours = Sender({(0, 0): "tcp", (0, 1): "tcp"}, NBYTES, CPU)
    first, again = Taking(ours.channel(0, 0)), ""
    end = time.monotonic() + SOON_S
    while first.receiver is None and time.monotonic() < end:
        time.sleep(0.01)
    again = Taking(ours.channel(0, 0)).end()
    assert again.startswith("TransferAborted: the trainer died, or left")
    other = Taking(ours.channel(0, 1))
    ours.connect()
    ours.begin(source := Counting())
    first.go()
    other.go()
    ours.serve(source, {})
    assert first.end() == other.end() == ""
    ours.close()


@pytest.mark.parametrize("how", ["silent", "repeats", "guesses"])
def test_somebody_else_who_listens_there_is_told_nothing(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "GREETING_S", 0.5)
    listening = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.settimeout(SOON_S)
            connection.sendall(bytes(32))
            said = connection.recv(4096)
            if how != "silent":
                connection.sendall(said[-32:] if how == "repeats" else os.urandom(32))
            connection.recv(1)

    thread = threading.Thread(target=pretend, daemon=True)
    thread.start()
    ours = one()
    worker = Taking(ours.channel(0, 0) | {"port": listening.getsockname()[1]})
    assert "did not greet this worker" in worker.end()
    thread.join(SOON_S)
    listening.close()
    ours.close()


def test_nobody_listens_there() -> None:
    ours = one()
    channel = ours.channel(0, 0)
    ours.close()
    assert "Set VLLM_HOST_IP (or SGLANG_HOST_IP) where the trainer runs" in Taking(channel).end()


def test_it_listens_at_one_interface_alone() -> None:
    ours = one()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((own_address(), ours.channel(0, 0)["port"]), 5)
    ours.close()
    with pytest.raises(Exception, match="VLLM_HOST_IP"):
        Sender({(0, 0): "tcp"}, NBYTES, CPU, "192.0.2.77")


# Somebody in between

HEAD = links._FRAME.size + 32
GREETING = 64
"""Bytes that the trainer says first."""


class Between:
    """Passes on what both sides say, and changes what the trainer says once."""

    def __init__(self, port: int, change: Callable[[bytearray], bytes | None]) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._change, self._trainer = change, port
        threading.Thread(target=self._pass, daemon=True).start()

    def _pass(self) -> None:
        worker, _ = self._listening.accept()
        trainer = socket.create_connection(("127.0.0.1", self._trainer))
        threading.Thread(target=self._one, args=(worker, trainer, lambda data: data), daemon=True).start()
        self._one(trainer, worker, self._through())

    def _through(self) -> Callable[[bytes], bytes | None]:
        """What has come so far is changed once all of it is there that the test wants."""
        came, done = bytearray(), False

        def through(data: bytes) -> bytes | None:
            nonlocal came, done
            if done:
                return data
            came += data
            changed = self._change(came)
            if changed == came:
                return data
            done = True
            return None if changed is None else changed[len(came) - len(data) :]

        return through

    @staticmethod
    def _one(source: socket.socket, to: socket.socket, through: Callable[[bytes], bytes | None]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                changed = through(data)
                if changed is None:
                    break
                to.sendall(changed)
        for end in (source, to):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


BUCKET = GREETING + 2 * HEAD
"""Where the first bucket's frame begins: behind READY and NOW."""


def flip(at: int) -> Callable[[bytearray], bytes]:
    def change(came: bytearray) -> bytes:
        changed = bytearray(came)
        if len(came) > at:
            changed[at] ^= 1
        return bytes(changed)

    return change


def swap(came: bytearray) -> bytes:
    """The first bucket's frame is that of NOW, once more: it was right before."""
    if len(came) < BUCKET + HEAD:
        return bytes(came)
    return bytes(came[:BUCKET] + came[BUCKET - HEAD : BUCKET] + came[BUCKET + HEAD :])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (flip(40), "did not greet this worker"),
        (flip(GREETING), "was damaged, or somebody else sent it"),
        (flip(GREETING + HEAD + 5), "was damaged, or somebody else sent it"),
        (flip(BUCKET + 20), "was damaged, or somebody else sent it"),  # its length
        (flip(BUCKET + HEAD - 1), "was damaged, or somebody else sent it"),
        (flip(BUCKET + HEAD + 500), "was damaged, or somebody else sent it"),  # the bucket itself
        (flip(BUCKET + HEAD + SIZES[0] + 3), "was damaged, or somebody else sent it"),
        (swap, "was damaged, or somebody else sent it"),
        (lambda came: None if len(came) > BUCKET + HEAD + 100 else bytes(came), "the trainer died, or left"),
    ],
)
def test_what_is_changed_on_the_way_is_refused(change: Callable[[bytearray], bytes | None], word: str) -> None:
    ours = one()
    channel = ours.channel(0, 0)
    worker = Taking(channel | {"port": Between(channel["port"], change).port})
    with contextlib.suppress(TransferAborted):  # that it did not connect
        push(ours, worker)
    assert word in worker.end()
    assert worker.seen == []
    ours.close()


@pytest.mark.parametrize("wrong", [{0: 10**12}, {0: 1}, {5: SIZES[0]}])
def test_what_comes_is_what_was_announced(wrong: dict[int, int]) -> None:
    """The worker knows from the control plane which buckets come, and how large they are."""
    ours = one()
    worker = Taking(ours.channel(0, 0), wrong)
    push(ours, worker)
    if list(wrong.values()) == [SIZES[0]]:  # by its turn it is the first one
        assert "AssertionError" in worker.end()
    else:
        assert "another bucket than the one that is due" in worker.end()
    ours.close()


# A push that ends early


@pytest.mark.parametrize("at", [0, 3])
def test_a_push_that_is_cancelled_tells_its_workers(at: int) -> None:
    ours = one()
    worker = Taking(ours.channel(0, 0), pause=0.3)
    ours.connect(worker.gone)
    ours.begin(source := Counting(CPU, at, ours.stop))
    worker.go()
    began = time.monotonic()
    with pytest.raises(TransferAborted, match="cancelled"):
        ours.serve(source, {}, worker.gone)
    assert worker.end() == "TransferAborted: the trainer gave up in the middle of a push"
    assert time.monotonic() - began < SOON_S
    ours.close()


def test_a_stop_does_not_wait_for_a_slow_worker() -> None:
    ours = one()
    worker = Taking(ours.channel(0, 0), pause=SOON_S)
    ours.connect(worker.gone)
    ours.begin(source := Counting())
    worker.go()
    threading.Timer(0.5, ours.stop).start()
    began = time.monotonic()
    with pytest.raises(TransferAborted, match="cancelled"):
        ours.serve(source, {}, worker.gone)
    ours.close()
    assert time.monotonic() - began < SOON_S / 2
    assert worker.receiver is not None
    worker.receiver.close()


def test_a_closed_channel_ends_whatever_waits_in_it() -> None:
    ours = one()
    worker = Taking(ours.channel(0, 0))
    ours.connect(worker.gone)
    worker.go()  # nothing comes
    time.sleep(0.1)
    ours.close()
    assert "TransferAborted" in worker.end()


def fork_and_die(tell: Any) -> None:
    """A trainer with children, as those of a data loader, that outlive it for a while."""
    ours = one()
    tell.send(ours.channel(0, 0))
    ours.connect()
    if not os.fork():
        time.sleep(SOON_S)
        os._exit(0)
    ours.begin(source := Counting(CPU, 2, die))
    tell.send("begun")
    tell.recv()
    ours.serve(source, {})


def test_a_trainers_children_do_not_keep_its_connections() -> None:
    pipe, theirs = processes.Pipe()
    process = processes.Process(target=fork_and_die, args=(theirs,), daemon=True)
    process.start()
    receiver = worker_end(pipe.recv(), CPU)
    assert pipe.recv() == "begun"
    pipe.send("go")
    began = time.monotonic()
    with pytest.raises(TransferAborted, match="the trainer died, or left"):
        list(receiver.receive(Expected(SIZES)))
    assert time.monotonic() - began < SOON_S / 2
    receiver.close()
    process.join(SOON_S)


def test_the_kernel_watches_both_ends() -> None:
    """What a pulled cable does is in test_vllm_hosts.py; here, that it is asked for."""
    ours = one()
    worker = Taking(ours.channel(0, 0))
    ours.connect()
    ends = [member.link for member in tcp(ours)._members.values()]
    while worker.receiver is None:
        time.sleep(0.01)
    inbox = worker.receiver
    assert isinstance(inbox, TcpReceiver)
    for link in (*ends, inbox._link):
        assert link is not None
        option = link._socket.getsockopt
        assert option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * links.SILENT_S
        probes = option(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) * option(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
        assert option(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) + probes <= links.SILENT_S
        assert option(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert option(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    ours.close()
    worker.go()  # else it ends at its own limit, which is the one of `end`
    assert worker.end() == "" or "Aborted" in worker.error


def test_descriptors_above_1023_are_as_good() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 1200:
        pytest.skip("this machine gives no process so many")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 1200), limits[1]))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        ours = one()
        worker = Taking(ours.channel(0, 0), pause=0.05)
        push(ours, worker)
        assert (worker.end(), worker.seen) == ("", ALL)
        ours.close()
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_large_bucket_is_digested_in_pieces() -> None:
    """As one of several pieces, the last one short; what is not a multiple of anything."""
    near, far = socket.socketpair()
    left, right = links.TcpLink(near, b"a" * 32, b"b" * 32, "right"), links.TcpLink(far, b"b" * 32, b"a" * 32, "left")
    data = torch.randint(0, 256, (2 * links.PIECE + 12345,), dtype=torch.uint8)
    into = torch.zeros_like(data)
    frame = Frame(Kind.BUCKET, 1, 2, data.numel())
    view = memoryview(data.numpy())
    thread = threading.Thread(target=left.send_bucket, args=(frame, view, links.digest(view)))
    thread.start()
    assert right.receive() == frame
    right.receive_bucket(frame, memoryview(into.numpy()))
    thread.join(SOON_S)
    assert torch.equal(data, into)
    left.close()
    with pytest.raises(TransferAborted):
        right.check()
