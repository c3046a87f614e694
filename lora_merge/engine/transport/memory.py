"""Memory of buffers: files in POSIX shared memory and plain allocations on a GPU, which other processes map, and
buffers on the host."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import os
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ...errors import InvalidInput
from .liveness import SHARED, TransferAborted

_PREFIX = "lora_merge-"
_BUFFER_ID, _IS_MANAGED, _MEMPOOL_HANDLE = 7, 8, 17
"""CU_POINTER_ATTRIBUTE_*"""


class MappableMemory:
    """Memory of this process that others map, or of another one that this one maps.

    Attributes:
        handle: by which other processes map it.
        tensor: its bytes.
    """

    handle: str
    tensor: Tensor

    def hide(self) -> None:
        """Remove the name that it has, if it has one, once everybody has mapped it: a crash leaves nothing behind."""

    def close(self) -> None:
        """Free it, or unmap it here; no view of `tensor` may be used after that."""
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")


class SharedMemory(MappableMemory):
    """A file in shared memory that goes away with its owner, or one of another process; `handle` is its path.

    Args:
        name: of a new file, or its `handle` in the process that made it.

    Raises:
        InvalidInput: the path is not one of ours, or there is not enough shared memory.
    """

    def __init__(self, name: str, nbytes: int, *, create: bool = False) -> None:
        self.handle = _checked(shared_path(name) if create else name)
        if create:
            descriptor = os.open(self.handle, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            weakref.finalize(self, _unlink, self.handle)
            try:
                os.posix_fallocate(descriptor, 0, nbytes)
            except OSError as error:
                self.hide()
                raise InvalidInput(
                    f"no {nbytes} bytes of shared memory in {SHARED}: {error}. Make it larger (docker run --shm-size), "
                    "or pass a smaller bucket_bytes"
                ) from error
            finally:
                os.close(descriptor)
        self.tensor = _mapped(self.handle, nbytes)

    def hide(self) -> None:
        _unlink(self.handle)


class NotExported(RuntimeError):
    """This memory cannot be mapped by another process."""


class CudaMemory(MappableMemory):
    """A cudaMalloc of its own, or one of another process: memory of PyTorch's and vLLM's allocators cannot always be
    exported (expandable segments, sleep mode). `close`, or the end of this object, frees it.

    Args:
        device: of `tensor`; another process may have made the memory on another device.
        handle: of another process's memory; None for memory of its own.
    """

    def __init__(self, nbytes: int, device: torch.device, handle: str | None = None) -> None:
        self._runtime = _cuda_runtime()
        free = self._runtime.cudaFree if handle is None else self._runtime.cudaIpcCloseMemHandle
        with torch.cuda.device(device):
            torch.cuda.current_stream(device)  # the context exists
            pointer = ctypes.c_void_p()
            if handle is None:
                self._check(self._runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes)), "cudaMalloc")
                exported = _IpcHandle()
                self._check(self._runtime.cudaIpcGetMemHandle(ctypes.byref(exported), pointer), "cudaIpcGetMemHandle")
                handle = str(exported)
            else:
                flags = ctypes.c_uint(1)  # cudaIpcMemLazyEnablePeerAccess
                theirs = _IpcHandle.from_buffer_copy(base64.b64decode(handle))
                code = self._runtime.cudaIpcOpenMemHandle(ctypes.byref(pointer), theirs, flags)
                self._check(code, "cudaIpcOpenMemHandle")
        self.handle = handle
        # Not by way of an array interface: a tensor on the device that uses it, also where the memory is another GPU's.
        storage = torch._C._construct_storage_from_data_pointer(pointer.value or 0, device, nbytes)
        self.tensor = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))
        self._free = weakref.finalize(self, _give_back, free, pointer, device)

    def _check(self, code: int, what: str) -> None:
        if code:
            self._runtime.cudaGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"{what} failed: {self._runtime.cudaGetErrorString(code).decode()}")

    def close(self) -> None:
        super().close()
        self._free()


def _give_back(free: Any, pointer: ctypes.c_void_p, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        free(pointer)


def exported(storage: torch.UntypedStorage, handles: dict[int, str]) -> tuple[str, int, int]:
    """Return how other processes map a storage on a GPU: the handle of its allocation, the bytes of that, and the
    offset of the storage in it.

    Args:
        handles: known ones, by the address of the allocation: CUDA takes half a millisecond for each.

    Raises:
        NotExported: managed memory, the memory of vLLM's sleep mode and SGLang's memory saver, expandable segments;
            says which where CUDA does.
    """
    runtime, handle = _cuda_runtime(), _IpcHandle()
    base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    with torch.cuda.device(storage.device):
        found = _driver().cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(storage.data_ptr())
        )
        if not found and base.value in handles:
            return handles[base.value], nbytes.value, storage.data_ptr() - base.value
        if found or runtime.cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(base.value)):
            runtime.cudaGetLastError()  # else the next kernel's check would find it
            raise NotExported(_maker(storage.data_ptr()))
    handles[base.value] = str(handle)
    return handles[base.value], nbytes.value, storage.data_ptr() - base.value


def _maker(address: int) -> str:
    """Return why CUDA does not export memory."""
    if _attribute(address, _IS_MANAGED, ctypes.c_int()):
        return "it is managed memory (cudaMallocManaged), which CUDA does not export"
    if _attribute(address, _MEMPOOL_HANDLE, ctypes.c_void_p()):
        return "it is of a pool of cudaMallocAsync, which CUDA does not export so (PYTORCH_CUDA_ALLOC_CONF)"
    return "an allocator made it whose memory CUDA does not export (sleep mode, memory saver, expandable segments)"


def _attribute(address: int, attribute: int, found: Any) -> Any:
    """Return an attribute of memory on a GPU; None if CUDA does not know it."""
    wrong = _driver().cuPointerGetAttribute(ctypes.byref(found), ctypes.c_int(attribute), ctypes.c_uint64(address))
    return None if wrong else found.value


def allocations(storages: Sequence[torch.UntypedStorage]) -> list[int]:
    """Return for each storage the number of its allocation, which no other allocation of this process ever has, at the
    same address or not; -1 if CUDA does not know it. All storages are on one GPU."""
    if not storages:
        return []
    number = ctypes.c_ulonglong()
    out, attribute, ask = ctypes.byref(number), ctypes.c_int(_BUFFER_ID), _driver().cuPointerGetAttribute
    found = []
    with torch.cuda.device(storages[0].device):
        for storage in storages:
            wrong = ask(out, attribute, ctypes.c_uint64(storage.data_ptr()))
            found.append(-1 if wrong else number.value)
    return found


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


class SharedFiles:
    """The files in shared memory that this process has mapped and open at the moment."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], str] = {}
        for entry in os.scandir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                there = Path(entry.path).stat()
                self._open[there.st_dev, there.st_ino] = f"/proc/{os.getpid()}/fd/{entry.name}"
        self._mapped: list[tuple[int, int, int, tuple[int, int]]] = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, access, offset, device, inode = line.split()[:5]
            if access[3] == "s":
                begin, end = (int(address, 16) for address in addresses.split("-"))
                major, minor = (int(number, 16) for number in device.split(":"))
                self._mapped.append((begin, end, int(offset, 16), (os.makedev(major, minor), int(inode))))

    def exported(self, storage: torch.UntypedStorage) -> tuple[str, int, int, int]:
        """Return how other processes of this user map a storage: a path, the file's inode (the path may name another
        file later) and bytes, and the offset of the storage in it.

        Raises:
            NotExported: it lies in this process's own memory.
        """
        at = storage.data_ptr()
        for begin, end, offset, file in self._mapped:
            if begin <= at < end and file in self._open:
                return self._open[file], file[1], Path(self._open[file]).stat().st_size, at - begin + offset
        raise NotExported("it lies in memory of its own process")


def _mapped(path: str, nbytes: int) -> Tensor:
    """Return a file in shared memory as a tensor.

    Raises:
        TransferAborted: it does not exist any more. (`torch.from_file` would create it, and nobody remove it.)
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

    def __str__(self) -> str:
        return base64.b64encode(bytes(self)).decode()


@cache
def _cuda_runtime() -> Any:
    """Return the CUDA runtime that torch has loaded. To look for it takes milliseconds, and each tensor asks for it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcudart" in line:
            return ctypes.CDLL(line.split()[-1])
    major = (torch.version.cuda or "").partition(".")[0]
    return ctypes.CDLL(f"libcudart.so.{major}")


def host_buffers(nbytes: int, *, pinned: bool) -> list[Tensor]:
    """Return two buffers of `nbytes` each on the host; pinned ones for copies to and from GPUs."""
    return [torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned) for _ in range(2)]


def bytes_of(data: Tensor) -> memoryview:
    """Return the memory of a tensor on the host; no copy."""
    return memoryview(cast(Any, data.numpy()))


def shared_path(name: str) -> str:
    return str(SHARED / f"{_PREFIX}{name}")


def _checked(path: str) -> str:
    """Return a path that came over the network, if it is one of our names in shared memory."""
    name = Path(path).name
    if path != str(SHARED / name) or not name.startswith(_PREFIX):
        raise InvalidInput(f"{path!r} is not a buffer of lora_merge")
    return path


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()
