"""A connection between two processes that know a secret: nobody else is heard on it.

The secret travels over the engine's control plane. Each side proves that it knows it (HMAC-SHA256 over a nonce of
either side), and both derive a key for each direction. From then on every frame carries a MAC (keyed BLAKE2b over its
number, its words, and the digest of what it carries): a frame that somebody forged, repeated, left out or put elsewhere
is refused. Frames have one size, and what a frame carries is read into memory of a size that was known before: nothing
off the network decides what is allocated, and nothing is unpickled. It is not encrypted, as NCCL's connections are not.

A host that is gone shows: the kernel asks every few seconds whether the other one's is still there, and gives up after
`SILENT_S`, also when what was sent is not taken. A process that computes for long is not gone: its kernel answers.
(Sizes of the socket's buffers are left to the kernel, which makes them larger than it would let us ask for.)
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import IntEnum
from functools import cache
from typing import NamedTuple

from .liveness import TransferAborted

SILENT_S = 30
"""Seconds without a sign of the other host, after which it is gone."""
GREETING_S = 10.0
"""Seconds for a greeting: a stranger who says nothing is shown out."""
PIECE = 1 << 22
"""Bytes that are digested at a time, by several threads."""
_FRAME = struct.Struct("<BQQQ")
_MAC = 32
_PROTOCOL = b"lora_merge 1"
"""Whoever speaks another one is a stranger."""
_NONCE = 32
_PLACE = struct.Struct("<II")
_LINKS: weakref.WeakSet[TcpLink] = weakref.WeakSet()


class Kind(IntEnum):
    """What a frame says. To the trainer: WHICH, TAKE. To the worker: the others."""

    READY = 1
    """Whoever takes buckets for this host has come."""
    WHICH = 2
    """Which transfer is under way?"""
    NOW = 3
    """This one is."""
    TAKE = 4
    """There is room for a bucket."""
    BUCKET = 5
    """It follows."""
    SENT = 6
    """That was it: vouches for what came."""
    ABORT = 7
    """No more comes of this transfer."""


class Frame(NamedTuple):
    """One message.

    Args:
        transfer, bucket, nbytes: of the bucket that it is about; 0 where it is about none.
    """

    kind: Kind
    transfer: int = 0
    bucket: int = 0
    nbytes: int = 0


class TcpLink:
    """One end of a connection, after the greeting. One thread sends and receives; `close` is for any.

    Args:
        connection: to the other process.
        ours, theirs: keys of what goes out and of what comes in.
        other: who is at the other end, in words.
    """

    def __init__(self, connection: socket.socket, ours: bytes, theirs: bytes, other: str) -> None:
        self._socket, self._other = connection, other
        self._keys, self._counts = (ours, theirs), [0, 0]
        weakref.finalize(self, connection.close)
        _LINKS.add(self)

    def send(self, frame: Frame, digest: bytes = b"") -> None:
        """Send a frame; `digest` is of what it vouches for."""
        words = _FRAME.pack(*frame)
        self._write(words + self._mac(0, words, digest))

    def receive(self, digest: bytes = b"") -> Frame:
        """Wait for a frame.

        Raises:
            TransferAborted: the connection broke, or the frame is none of the other side's.
        """
        read = bytearray(_FRAME.size + _MAC)
        self._read(memoryview(read))
        words = bytes(read[: _FRAME.size])
        if not hmac.compare_digest(read[_FRAME.size :], self._mac(1, words, digest)):
            raise TransferAborted(f"what came from {self._other} was damaged, or somebody else sent it")
        kind, *numbers = _FRAME.unpack(words)
        return Frame(Kind(kind), *numbers)

    def send_bucket(self, frame: Frame, data: memoryview, digests: Sequence[Future[bytes]]) -> None:
        """Send a bucket.

        Args:
            frame: that announces it.
            digests: of `data`: see `digest`.
        """
        self.send(frame)
        self._write(data)
        self.send(frame._replace(kind=Kind.SENT), joined(digests))

    def receive_bucket(self, frame: Frame, data: memoryview) -> None:
        """Receive what a frame announced; it was checked by then.

        Raises:
            TransferAborted: the connection broke, or it is not what the other side sent.
        """
        digests = []
        for piece in _pieces(data):
            self._read(piece)
            digests.append(_pool().submit(_digest, piece))
        if self.receive(joined(digests)) != frame._replace(kind=Kind.SENT):
            raise TransferAborted(f"{self._other} sent something else than the bucket that it announced")

    def look(self) -> None:
        """Raise `TransferAborted` where the other side is gone, of which nothing is awaited at the moment."""
        try:
            asked = select.poll()  # `select` takes no descriptor above 1023
            asked.register(self._socket, select.POLLIN)
            heard = asked.poll(0)
        except (OSError, ValueError) as error:
            raise TransferAborted(f"the connection to {self._other} was closed") from error
        if heard:
            self._read(memoryview(bytearray(1)))
            raise TransferAborted(f"{self._other} spoke out of turn")

    def close(self) -> None:
        """End the connection, under whoever waits in it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        # Its descriptor goes with this: a thread that is in a call would go on with whatever had the number next.

    def forget(self) -> None:
        """In a process that was forked off: else the connection would outlive the process whose it is."""
        self._socket.close()

    def _mac(self, direction: int, words: bytes, digest: bytes) -> bytes:
        number = self._counts[direction] = self._counts[direction] + 1
        said = number.to_bytes(8, "little") + words + digest
        return hashlib.blake2b(said, key=self._keys[direction], digest_size=_MAC).digest()

    def _write(self, data: bytes | memoryview) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._broke(error) from error

    def _read(self, into: memoryview) -> None:
        try:
            _fill(self._socket, into)
        except (OSError, EOFError) as error:
            raise self._broke(error) from error

    def _broke(self, error: OSError | EOFError) -> TransferAborted:
        if isinstance(error, (EOFError, ConnectionResetError, BrokenPipeError)):
            return TransferAborted(f"{self._other} died, or left, in the middle of a push")
        return TransferAborted(f"the connection to {self._other} broke: {error}")


def digest(data: memoryview, ready: Callable[[], object] = lambda: None) -> list[Future[bytes]]:
    """Of each piece of some data; made by other threads.

    Args:
        ready: returns when there is something to digest.
    """
    return [_pool().submit(_digest, piece, ready) for piece in _pieces(data)]


def joined(digests: Sequence[Future[bytes]]) -> bytes:
    """One digest of all pieces."""
    return hashlib.blake2b(b"".join(piece.result() for piece in digests), digest_size=_MAC).digest()


def _digest(piece: memoryview, ready: Callable[[], object] = lambda: None) -> bytes:
    ready()
    return hashlib.blake2b(piece, digest_size=_MAC).digest()


def _pieces(data: memoryview) -> list[memoryview]:
    return [data[at : at + PIECE] for at in range(0, len(data), PIECE)]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), "lora_merge-digest")


# ---- the greeting ----------------------------------------------------------------------------------------------------


def secret_of(secret: bytes, place: tuple[int, int]) -> bytes:
    """That of one worker: no worker can pass for another one."""
    return hmac.digest(secret, _PROTOCOL + _PLACE.pack(*place), "sha256")


def welcome(connection: socket.socket, secret: bytes) -> tuple[tuple[int, int], TcpLink] | None:
    """Greet whoever has connected.

    Args:
        secret: from which that of each worker is made.

    Returns:
        which worker it is, and the link; None for a stranger.
    """
    try:
        with _greeting(connection):
            nonce = secrets.token_bytes(_NONCE)
            connection.sendall(nonce)
            answer = _exactly(connection, _PLACE.size + _NONCE + _MAC)
            place, theirs, proof = answer[: _PLACE.size], answer[_PLACE.size : -_MAC], answer[-_MAC:]
            worker: tuple[int, int] = _PLACE.unpack(place)
            own, said = secret_of(secret, worker), place + nonce + theirs
            if not hmac.compare_digest(proof, hmac.digest(own, b"worker" + said, "sha256")):
                return None
            connection.sendall(hmac.digest(own, b"trainer" + said, "sha256"))
    except (OSError, EOFError):
        return None
    keys = _keys(own, said)
    return worker, TcpLink(connection, keys[0], keys[1], f"worker {worker[1]} of engine {worker[0]}")


def reach(address: str, port: int, secret: bytes, place: tuple[int, int]) -> TcpLink:
    """Connect to a trainer.

    Args:
        secret: of this worker.
        place: of this worker.

    Raises:
        TransferAborted: it is not reached, or whoever listens there is somebody else.
    """
    try:
        connection = socket.create_connection((address, port), SILENT_S)
    except OSError as error:
        raise TransferAborted(
            f"the trainer is not reached at {address}, port {port}, from {socket.gethostname()}: {error}. Set "
            "VLLM_HOST_IP (or SGLANG_HOST_IP) where the trainer runs to the address of the interface that this host "
            "reaches, and let firewalls pass connections to any port of it"
        ) from error
    try:
        with _greeting(connection):
            nonce, packed = secrets.token_bytes(_NONCE), _PLACE.pack(*place)
            said = packed + _exactly(connection, _NONCE) + nonce
            connection.sendall(packed + nonce + hmac.digest(secret, b"worker" + said, "sha256"))
            proof = _exactly(connection, _MAC)
            if not hmac.compare_digest(proof, hmac.digest(secret, b"trainer" + said, "sha256")):
                raise EOFError("somebody else listens there")
    except (OSError, EOFError) as error:
        connection.close()
        raise TransferAborted(f"the trainer at {address}, port {port}, did not greet this worker: {error}") from error
    keys = _keys(secret, said)
    return TcpLink(connection, keys[1], keys[0], "the trainer")


def watched(connection: socket.socket) -> None:
    """From now on the kernel notices when the other host is gone, and ends every call on this connection."""
    every = max(1, SILENT_S // 4)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_S)


@contextlib.contextmanager
def _greeting(connection: socket.socket) -> Iterator[None]:
    """A connection with a limit for what is said in here; without one afterwards."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    watched(connection)
    connection.settimeout(GREETING_S)
    yield
    connection.settimeout(None)


def _keys(secret: bytes, said: bytes) -> list[bytes]:
    """Of what goes to the worker, and of what goes to the trainer."""
    return [hmac.digest(secret, to + said, "sha256") for to in (b"to the worker", b"to the trainer")]


def _exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes, in `GREETING_S` altogether."""
    read, end = bytearray(count), time.monotonic() + GREETING_S
    _fill(connection, memoryview(read), end)
    return bytes(read)


def _fill(connection: socket.socket, into: memoryview, end: float | None = None) -> None:
    """Read as many bytes as there is room for.

    Args:
        end: until when.

    Raises:
        EOFError: the other side closed the connection.
        OSError: it broke, or that took too long.
    """
    while into:
        if end is not None:
            connection.settimeout(max(end - time.monotonic(), 1e-3))
        count = connection.recv_into(into)
        if not count:
            raise EOFError("it was closed")
        into = into[count:]


def _forked() -> None:
    for link in list(_LINKS):
        link.forget()
    _pool.cache_clear()


os.register_at_fork(after_in_child=_forked)
