"""The NCCL library that torch has loaded, with the few functions that a push uses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from torch import Tensor

_NAME = "libnccl.so.2"
_UINT8 = 1
"""ncclUint8"""


class UniqueId(ctypes.Structure):
    """The id that the members of one communicator share."""

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
        for function in (self._library.ncclSend, self._library.ncclRecv):
            function.argtypes = [pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, communicator, pointer]
        self._library.ncclCommAbort.argtypes = [communicator]

    def unique_id(self) -> bytes:
        """Return the id of a new communicator."""
        made = UniqueId()
        self._check(self._library.ncclGetUniqueId(ctypes.byref(made)), "ncclGetUniqueId")
        return bytes(made)

    def join(self, unique_id: bytes, rank: int, world: int) -> Any:
        """Make a communicator on the current GPU; return when all members have come."""
        communicator = ctypes.c_void_p()
        known = UniqueId.from_buffer_copy(unique_id)
        code = self._library.ncclCommInitRank(ctypes.byref(communicator), world, known, rank)
        self._check(code, "ncclCommInitRank")
        return communicator

    def broadcast(self, communicator: Any, data: Tensor, stream: int) -> None:
        """Enqueue a broadcast of a contiguous tensor's bytes from rank 0, in place, on a stream of CUDA's."""
        at, nbytes = data.data_ptr(), data.nbytes
        self._check(self._library.ncclBroadcast(at, at, nbytes, _UINT8, 0, communicator, stream), "ncclBroadcast")

    def send(self, communicator: Any, data: Tensor, ranks: Sequence[int], stream: int) -> None:
        """Enqueue the same to some of the others at the same time."""
        self._check(self._library.ncclGroupStart(), "ncclGroupStart")
        codes = [
            self._library.ncclSend(data.data_ptr(), data.nbytes, _UINT8, rank, communicator, stream) for rank in ranks
        ]
        codes.append(self._library.ncclGroupEnd())  # also behind one that failed: else the next would join the group
        for code in codes:
            self._check(code, "ncclSend")

    def receive(self, communicator: Any, data: Tensor, stream: int) -> None:
        """Enqueue the other end of a `send` by rank 0."""
        code = self._library.ncclRecv(data.data_ptr(), data.nbytes, _UINT8, 0, communicator, stream)
        self._check(code, "ncclRecv")

    def abort(self, communicator: Any) -> None:
        """End whatever a communicator waits for, and free it."""
        self._check(self._library.ncclCommAbort(communicator), "ncclCommAbort")

    def _check(self, code: int, what: str) -> None:
        if code:
            raise RuntimeError(f"{what} failed: {self._library.ncclGetErrorString(code).decode()}")
