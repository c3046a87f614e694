"""NCCL's library, as far as broadcasts take it: the one that torch has loaded, whichever engine runs beside it."""

from __future__ import annotations

import ctypes
from typing import Any

_NAME = "libnccl.so.2"
_UINT8 = 1
"""ncclUint8"""


class UniqueId(ctypes.Structure):
    """What the members of a communicator know it by."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


class Library:
    """NCCL's functions.

    Raises:
        RuntimeError: there is no such library here.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(_NAME)
        except OSError as error:
            raise RuntimeError(f"NCCL cannot be used here, as torch has brought no {_NAME}: {error}") from error
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        communicator, pointer = ctypes.c_void_p, ctypes.c_void_p
        self._library.ncclCommInitRank.argtypes = [ctypes.POINTER(communicator), ctypes.c_int, UniqueId, ctypes.c_int]
        self._library.ncclBroadcast.argtypes = [
            pointer, pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, communicator, pointer
        ]  # fmt: skip
        self._library.ncclCommAbort.argtypes = [communicator]

    def unique_id(self) -> bytes:
        """A new communicator's."""
        made = UniqueId()
        self._check(self._library.ncclGetUniqueId(ctypes.byref(made)), "ncclGetUniqueId")
        return bytes(made)

    def join(self, unique_id: bytes, rank: int, world: int) -> Any:
        """A communicator on the current GPU: returns when all members have come."""
        communicator = ctypes.c_void_p()
        known = UniqueId.from_buffer_copy(unique_id)
        code = self._library.ncclCommInitRank(ctypes.byref(communicator), world, known, rank)
        self._check(code, "ncclCommInitRank")
        return communicator

    def broadcast(self, communicator: Any, address: int, nbytes: int, stream: int) -> None:
        """Enqueue a broadcast of bytes from rank 0, in place.

        Args:
            address: of them, on the communicator's GPU.
            stream: of CUDA's.
        """
        code = self._library.ncclBroadcast(address, address, nbytes, _UINT8, 0, communicator, stream)
        self._check(code, "ncclBroadcast")

    def abort(self, communicator: Any) -> None:
        """End whatever a communicator waits for, and free it."""
        self._check(self._library.ncclCommAbort(communicator), "ncclCommAbort")

    def _check(self, code: int, what: str) -> None:
        if code:
            raise RuntimeError(f"{what} failed: {self._library.ncclGetErrorString(code).decode()}")
