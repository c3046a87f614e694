"""A connection between two processes that know a secret: nobody else is heard on it.

The secret travels over the engine's control plane. Each side proves that it knows it (HMAC-SHA256 over a nonce of
either side), and both derive a key for each direction. From then on every frame carries a MAC (keyed BLAKE2b over its
number, its words, and the digest of its data): a frame that is forged, repeated, left out or moved is refused. Frames
have one size, and data is read into memory of a size that was known before: nothing from the network decides what is
allocated, and nothing is unpickled. It is not encrypted, like NCCL's connections.

A host that is gone is noticed: the kernel probes the other one every few seconds, and gives up after `SILENT_S`, also
if sent data is not acknowledged. A process that computes for long is not gone: its kernel answers. (The kernel sizes
the socket's buffers, and makes them larger than it would let us ask for.)
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
"""Seconds for a greeting; a connection that has sent none is closed."""
PIECE = 1 << 22
"""Bytes that are digested at a time, by several threads."""
_FRAME = struct.Struct("<BQQQ")
_MAC = 32
_PROTOCOL = b"lora_merge 1"
_NONCE = 32
_PLACE = struct.Struct("<II")
_LINKS: weakref.WeakSet[TcpLink] = weakref.WeakSet()


class Kind(IntEnum):
    """What a frame means. To the trainer: WHICH, TAKE. To the worker: the others."""

    READY = 1
    """The worker that takes buckets for this host is connected."""
    WHICH = 2
    """Which transfer is under way?"""
    NOW = 3
    """This one is."""
    TAKE = 4
    """There is room for a bucket."""
    BUCKET = 5
    """A bucket follows."""
    SENT = 6
    """The bucket was sent; carries its digest."""
    ABORT = 7
    """No more comes of this transfer."""


class Frame(NamedTuple):
    """One message; transfer, bucket and nbytes are 0 if it is about no bucket."""

    kind: Kind
    transfer: int = 0
    bucket: int = 0
    nbytes: int = 0


class TcpLink:
    """One end of a connection, after the greeting. One thread sends and receives; any may call `close`.

    Args:
        ours, theirs: keys of what is sent and of what is received.
        other: the other end, in words.
    """

    def __init__(self, connection: socket.socket, ours: bytes, theirs: bytes, other: str) -> None:
        self._socket, self._other = connection, other
        self._keys, self._counts = (ours, theirs), [0, 0]
        weakref.finalize(self, connection.close)
        _LINKS.add(self)

    def send(self, frame: Frame, digest: bytes = b"") -> None:
        """Send a frame, and a digest with it."""
        words = _FRAME.pack(*frame)
        self._write(words + self._mac(0, words, digest))

    def receive(self, digest: bytes = b"") -> Frame:
        """Wait for a frame.

        Raises:
            TransferAborted: the connection broke, or the frame is not the other side's.
        """
        read = bytearray(_FRAME.size + _MAC)
        self._read(memoryview(read))
        words = bytes(read[: _FRAME.size])
        if not hmac.compare_digest(read[_FRAME.size :], self._mac(1, words, digest)):
            raise TransferAborted(f"what came from {self._other} was damaged, or somebody else sent it")
        kind, *numbers = _FRAME.unpack(words)
        return Frame(Kind(kind), *numbers)

    def send_bucket(self, frame: Frame, data: memoryview, digests: Sequence[Future[bytes]]) -> None:
        """Send a bucket: the frame that announces it, its data, and the digests of that (see `digest`)."""
        self.send(frame)
        self._write(data)
        self.send(frame._replace(kind=Kind.SENT), joined(digests))

    def receive_bucket(self, frame: Frame, data: memoryview) -> None:
        """Receive the bucket that a frame announced; raise `TransferAborted` if it is not what the other side sent."""
        digests = []
        for piece in _pieces(data):
            self._read(piece)
            digests.append(_pool().submit(_digest, piece))
        if self.receive(joined(digests)) != frame._replace(kind=Kind.SENT):
            raise TransferAborted(f"{self._other} sent something else than the bucket that it announced")

    def check(self) -> None:
        """Raise `TransferAborted` if the other side, which has nothing to say now, is gone."""
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
        """End the connection, also under a thread that waits in it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        # The descriptor is closed with this object: a thread in a call would go on with the next one of that number.

    def forget(self) -> None:
        """Close the descriptor in a forked process, which would keep the connection alive."""
        self._socket.close()

    def _mac(self, direction: int, words: bytes, digest: bytes) -> bytes:
        number = self._counts[direction] = self._counts[direction] + 1
        content = number.to_bytes(8, "little") + words + digest
        return hashlib.blake2b(content, key=self._keys[direction], digest_size=_MAC).digest()

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
    """Digest each piece of some data in other threads, once `ready` has returned."""
    return [_pool().submit(_digest, piece, ready) for piece in _pieces(data)]


def joined(digests: Sequence[Future[bytes]]) -> bytes:
    """Return one digest of all pieces."""
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
    """Return the secret of one worker, so that none can pass for another one."""
    return hmac.digest(secret, _PROTOCOL + _PLACE.pack(*place), "sha256")


def welcome(connection: socket.socket, secret: bytes) -> tuple[tuple[int, int], TcpLink] | None:
    """Greet a connection; return the worker and the link, or None if it does not know its secret (`secret_of`)."""
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
    """Connect a worker, by its secret, to a trainer; raise `TransferAborted` if the trainer cannot be reached, or
    another process listens there."""
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
    """Have the kernel end every call on this connection when the other host is gone."""
    every = max(1, SILENT_S // 4)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_S)


@contextlib.contextmanager
def _greeting(connection: socket.socket) -> Iterator[None]:
    """Limit the time of a connection's calls in a block."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    watched(connection)
    connection.settimeout(GREETING_S)
    yield
    connection.settimeout(None)


def _keys(secret: bytes, said: bytes) -> list[bytes]:
    """Return the keys of what goes to the worker, and of what goes to the trainer."""
    return [hmac.digest(secret, to + said, "sha256") for to in (b"to the worker", b"to the trainer")]


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Read `count` bytes, in `GREETING_S` altogether."""
    read, end = bytearray(count), time.monotonic() + GREETING_S
    _fill(connection, memoryview(read), end)
    return bytes(read)


def _fill(connection: socket.socket, into: memoryview, end: float | None = None) -> None:
    """Fill memory, until the time `end`.

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
