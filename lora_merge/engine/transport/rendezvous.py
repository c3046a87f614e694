"""A store in the trainer's process, in which the members of an NCCL group tell each other what they do. It listens on
one interface alone, and counts only values of members that know the secret of its channel.

torch's TCPStore authenticates nobody. So each value carries a signature (HMAC-SHA256 of its key and itself) by the
secret, which travels with the channel over the engine's control plane. Values without it are ignored.
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
"""A store that does not answer for this long is gone."""
_ADDRESSES = ("VLLM_HOST_IP", "SGLANG_HOST_IP")
"""Variables that vLLM and SGLang read this machine's address from; the first that is set counts."""
_SIGNATURE = hashlib.sha256().digest_size


class Store:
    """Access to torch's store (`plain`), at the same address and with the same secret on all sides."""

    def __init__(self, plain: Any, secret: bytes, address: str, port: int) -> None:
        self.plain, self._secret, self._address, self._port = plain, secret, address, port

    def under(self, name: str) -> Store:
        """Return the part of the store that belongs to one group."""
        secret = hmac.digest(self._secret, name.encode(), "sha256")
        return Store(PrefixStore(name, self.plain), secret, self._address, self._port)

    def channel(self) -> dict[str, Any]:
        """Return how other processes reach the store: JSON values, with the secret."""
        return {"address": self._address, "port": self._port, "secret": self._secret.hex()}

    def set(self, key: str, value: bytes | str) -> None:
        self.plain.set(key, self._signed(key, value))

    def get(self, key: str) -> bytes | None:
        """Wait for a value, and return it; None if its signature is wrong."""
        return self._read(key, self.plain.get(key))

    def has(self, key: str) -> bool:
        """Return True if a member has set the key."""
        return bool(self.plain.check([key])) and self.get(key) is not None

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self._read(key, value) for key, value in zip(keys, self.plain.multi_get(list(keys)), strict=True)]

    def set_first(self, key: str, value: bytes | str) -> None:
        """Set a key unless a member has set it to something else than "" before."""
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
    """Return a socket that listens at a free port of the interface with this address.

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
    """Make a store in this process; see `listen`."""
    with listen(address) as listening:
        port = listening.getsockname()[1]
        plain = TCPStore(  # takes the socket over
            address, port, is_master=True, wait_for_workers=False, timeout=TIMEOUT, master_listen_fd=listening.detach()
        )
    return Store(plain, secrets.token_bytes(32), address, port)


def reach_store(channel: dict[str, Any]) -> Store:
    """Return the store of another process, by its `channel`."""
    address, port = channel["address"], channel["port"]
    plain = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
    return Store(plain, bytes.fromhex(channel["secret"]), address, port)


def interface(hosts: Sequence[str]) -> str:
    """Return the address at which this process listens for members on these hosts (`host_id`): 127.0.0.1 unless some
    are elsewhere.

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
            asked.connect((anybody, 80))  # this sends nothing, it chooses the interface
            return str(asked.getsockname()[0])
    raise InvalidInput(
        "some of the engine's workers are on other hosts, and this machine has no address that they could reach: set "
        f"{' or '.join(_ADDRESSES)} to that of the interface that they reach"
    )
