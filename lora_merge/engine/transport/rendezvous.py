"""Where the members of an NCCL group tell each other what they do: a store in the trainer's process, which listens on
one interface alone, and in which only those are heard who know the secret of its channel.

torch's TCPStore asks nobody who he is. So each value carries a signature (HMAC-SHA256 of its key and itself) by the
secret, which travels with the channel over the engine's control plane. What is not signed so is passed over.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ...errors import InvalidInput
from .liveness import host_id

TIMEOUT = timedelta(seconds=60)
"""A store that does not answer for so long is gone."""
_ADDRESSES = ("VLLM_HOST_IP", "SGLANG_HOST_IP")
"""Variables that vLLM and SGLang read this machine's address from; the first that is set counts."""
_SIGNATURE = hashlib.sha256().digest_size


class Store:
    """One side's access to a store.

    Args:
        plain: torch's.
        secret: of the channel; both sides have the same one.
        address: under which other processes reach it.
    """

    def __init__(self, plain: Any, secret: bytes, address: str, port: int) -> None:
        self.plain, self._secret, self._address, self._port = plain, secret, address, port

    def under(self, name: str) -> Store:
        """The part of it that belongs to one group."""
        part = Store(PrefixStore(name, self.plain), self._secret, self._address, self._port)
        part._secret = hmac.digest(self._secret, name.encode(), "sha256")
        return part

    def channel(self) -> dict[str, Any]:
        """How other processes reach it: JSON values. Whoever has them is heard."""
        return {"address": self._address, "port": self._port, "secret": self._secret.hex()}

    def set(self, key: str, value: bytes | str) -> None:
        self.plain.set(key, self._signed(key, value))

    def get(self, key: str) -> bytes | None:
        """The value, waited for; None where it is signed by nobody who may be heard."""
        return self._read(key, self.plain.get(key))

    def has(self, key: str) -> bool:
        """Whether somebody who may be heard has set it."""
        return bool(self.plain.check([key])) and self.get(key) is not None

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self._read(key, value) for key, value in zip(keys, self.plain.multi_get(list(keys)), strict=True)]

    def set_first(self, key: str, value: bytes | str) -> None:
        """Set it unless somebody who may be heard has said something else than "" there: the first word stands."""
        self.plain.compare_set(key, self._signed(key, ""), self._signed(key, value))
        if self.get(key) is None:
            self.set(key, value)

    def _signed(self, key: str, value: bytes | str) -> bytes:
        data = value.encode() if isinstance(value, str) else value
        return self._signature(key, data) + data

    def _read(self, key: str, signed: bytes) -> bytes | None:
        signature, data = signed[:_SIGNATURE], signed[_SIGNATURE:]
        return data if hmac.compare_digest(signature, self._signature(key, data)) else None

    def _signature(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + data, "sha256")


def listen(address: str) -> socket.socket:
    """A socket that listens at a free port of one interface.

    Args:
        address: of that interface.

    Raises:
        InvalidInput: this machine has no such address.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listening.bind((address, 0))
    except OSError as error:
        listening.close()
        raise InvalidInput(
            f"the trainer cannot listen at {address}, as this machine's own address: {error}. Set VLLM_HOST_IP (or "
            "SGLANG_HOST_IP) to the address of the interface that the engine's workers reach"
        ) from error
    listening.listen(1024)
    return listening


def serve_store(address: str) -> Store:
    """A store in this process, at a free port of one interface.

    Args:
        address: of that interface.

    Raises:
        InvalidInput: this machine has no such address.
    """
    with listen(address) as listening:
        port = listening.getsockname()[1]
        plain = TCPStore(  # takes the socket over
            address, port, is_master=True, wait_for_workers=False, timeout=TIMEOUT, master_listen_fd=listening.detach()
        )
    return Store(plain, secrets.token_bytes(32), address, port)


def reach_store(channel: dict[str, Any]) -> Store:
    """The store of another process, by its `channel`."""
    address, port = channel["address"], channel["port"]
    plain = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
    return Store(plain, bytes.fromhex(channel["secret"]), address, port)


def interface(hosts: Sequence[str]) -> str:
    """The address at which this process listens for members on these hosts (`host_id`): this machine's own, unless
    some are elsewhere.

    Raises:
        InvalidInput: some are, and this machine has no address that they could reach.
    """
    if set(hosts) <= {host_id()}:
        return "127.0.0.1"
    for name in _ADDRESSES:
        if given := os.environ.get(name):
            return given
    for family, anybody in ((socket.AF_INET, "8.8.8.8"), (socket.AF_INET6, "2001:4860:4860::8888")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect((anybody, 80))  # nothing is sent: which interface it would be
            return str(asked.getsockname()[0])
    raise InvalidInput(
        "some of the engine's workers are on other hosts, and this machine has no address that they could reach: set "
        f"{' or '.join(_ADDRESSES)} to that of the interface that they reach"
    )
