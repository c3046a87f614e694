"""Memory that other processes map: files in POSIX shared memory, and plain allocations on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidInput
from .waiting import SHARED, TransferAborted

_PREFIX = "lora_merge-"


class SharedMemory:
    """A file in shared memory that goes away with its owner, or one of another process.

    Args:
        name: of a new file, or its `path` in the process that made it.
        nbytes: of the file.

    Raises:
        InvalidInput: the path is none of ours, or there is not enough shared memory.
    """

    def __init__(self, name: str, nbytes: int, *, create: bool = False) -> None:
        self.path = str(SHARED / f"{_PREFIX}{name}") if create else _checked(name)
        if create:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            weakref.finalize(self, _unlink, self.path)
            try:
                os.posix_fallocate(descriptor, 0, nbytes)
            except OSError as error:
                self.hide()
                raise InvalidInput(f"no {nbytes} bytes of shared memory in {SHARED}: {error}") from error
            finally:
                os.close(descriptor)
        self.tensor: Tensor = _mapped(self.path, nbytes)

    def hide(self) -> None:
        """Everybody has mapped it: the name can go, so that a crash leaves nothing behind."""
        _unlink(self.path)


class CudaMemory:
    """A cudaMalloc of its own, or one of another process: what PyTorch's and vLLM's allocators hand out cannot
    always be exported (expandable segments, sleep mode). Given back by `close`, or when nobody holds this any more; no
    view of `tensor` may be used after that."""

    def __init__(self, nbytes: int, device: torch.device, handle: bytes | None = None) -> None:
        self._device, self._runtime, self._owner = device, _cuda_runtime(), handle is None
        with torch.cuda.device(device):
            torch.cuda.current_stream(device)  # the context exists
            pointer = ctypes.c_void_p()
            if handle is None:
                self._check(self._runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes)), "cudaMalloc")
                exported = _IpcHandle()
                self._check(self._runtime.cudaIpcGetMemHandle(ctypes.byref(exported), pointer), "cudaIpcGetMemHandle")
                handle = bytes(exported)
            else:
                flags = ctypes.c_uint(1)  # cudaIpcMemLazyEnablePeerAccess
                code = self._runtime.cudaIpcOpenMemHandle(
                    ctypes.byref(pointer), _IpcHandle.from_buffer_copy(handle), flags
                )
                self._check(code, "cudaIpcOpenMemHandle")
        self.handle = handle
        self.tensor = torch.as_tensor(_Pointer(pointer.value or 0, nbytes), device=device)
        free = self._runtime.cudaFree if self._owner else self._runtime.cudaIpcCloseMemHandle
        self._free = weakref.finalize(self, _give_back, free, pointer, device)

    def _check(self, code: int, what: str) -> None:
        if code:
            self._runtime.cudaGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"{what} failed: {self._runtime.cudaGetErrorString(code).decode()}")

    def close(self) -> None:
        self._free()


def _give_back(free: Any, pointer: ctypes.c_void_p, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        free(pointer)


def _mapped(path: str, nbytes: int) -> Tensor:
    """A file in shared memory as a tensor.

    Raises:
        TransferAborted: there is none any more. (`torch.from_file` would make one, which nobody would take away.)
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError as error:
        raise TransferAborted("the trainer has closed its channel, or is gone; push again") from error
    try:
        if os.fstat(descriptor).st_size < nbytes:
            raise InvalidInput(f"{path} holds {os.fstat(descriptor).st_size} bytes, {nbytes} were announced")
        return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)
    finally:
        os.close(descriptor)


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * 64)]


class _Pointer:
    """Device memory that torch may view."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
            "strides": None,
        }


def _cuda_runtime() -> Any:
    """The CUDA runtime that torch has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcudart" in line:
            return ctypes.CDLL(line.split()[-1])
    major = (torch.version.cuda or "").partition(".")[0]
    return ctypes.CDLL(f"libcudart.so.{major}")


def _checked(path: str) -> str:
    """A path off the wire: only our own names in shared memory are opened."""
    name = Path(path).name
    if path != str(SHARED / name) or not name.startswith(_PREFIX):
        raise InvalidInput(f"{path!r} is not a buffer of lora_merge")
    return path


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()
