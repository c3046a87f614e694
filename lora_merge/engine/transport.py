"""Buckets from the trainer to the workers of an engine.

| transport | where | how |
|---|---|---|
| local | same process | the worker pulls buckets out of the trainer's stream |
| shm | CPU, same host | two buffers in POSIX shared memory |
| ipc | same GPU, other process | two buffers of a cudaMalloc of their own, opened by the worker |
| nccl | other GPUs | one broadcast a bucket |

The trainer fills a buffer while workers load the other one. Who may touch which is settled in a mailbox, a small
piece of shared memory: the trainer counts buckets filled, each worker counts buckets done with. Over NCCL the
broadcast itself is the hand-over, and the last bytes of a bucket say whether it is good.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..buckets import ALIGNMENT, extent
from ..errors import InvalidInput
from ..stream import Sent, double_buffered

SHARED = Path("/dev/shm")
TAIL = ALIGNMENT
"""Bytes behind a bucket that an NCCL broadcast carries beside it."""
_LOCAL: weakref.WeakValueDictionary[str, Sender] = weakref.WeakValueDictionary()
_FILLED, _ABORTED, _CHANNELS = 0, 1, 2


class TransferAborted(RuntimeError):
    """The other side gave up in the middle of a transfer."""


def host_id() -> str:
    """Equal for processes that can share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    mounts = SHARED.stat().st_dev if SHARED.exists() else 0
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}/{mounts}"


def device_id(device: torch.device) -> str:
    """A GPU's UUID; "cpu" for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def choose(trainer: Mapping[str, Any], worker: Mapping[str, Any]) -> str:
    """The transport between two ends that introduced themselves with `host`, `pid` and `device`.

    Raises:
        InvalidInput: none connects the two.
    """
    same_host = trainer["host"] == worker["host"]
    if same_host and trainer["pid"] == worker["pid"]:
        return "local"
    if trainer["device"] == "cpu" and worker["device"] == "cpu" and same_host:
        return "shm"
    if "cpu" in (trainer["device"], worker["device"]):
        raise InvalidInput(
            f"no transport from weights on {trainer['device']} to a worker on {worker['device']} "
            f"({'same' if same_host else 'other'} host): put the training weights on a GPU, or both ends on one host"
        )
    return "ipc" if same_host and trainer["device"] == worker["device"] else "nccl"


class Sender:
    """The trainer's end: two buffers, and a channel to every worker of every replica.

    Args:
        workers: for each replica the introductions of its workers, in rank order.
        nbytes: of one buffer.
        device: of the training weights.
    """

    def __init__(self, workers: Sequence[Sequence[Mapping[str, Any]]], nbytes: int, device: torch.device) -> None:
        self.session = secrets.token_hex(8)
        self.nbytes, self.device = nbytes, device
        me = {"host": host_id(), "pid": os.getpid(), "device": device_id(device)}
        self.kinds = [[choose(me, worker) for worker in replica] for replica in workers]
        flat = [kind for replica in self.kinds for kind in replica]
        self.local = "local" in flat
        if self.local and len(flat) > 1:
            raise InvalidInput("an engine in the trainer's own process cannot be pushed to together with others")
        self._shared: list[str] = []
        self._memory: list[Any] = []
        self._channels: dict[tuple[int, int], int] = {}
        self._group: Any = None
        self.pulled: Callable[[], Iterator[tuple[int, Tensor]]] | None = None
        self.buffers = self._allocate(flat)
        for r, replica in enumerate(self.kinds):
            for w, kind in enumerate(replica):
                if kind in ("shm", "ipc"):
                    self._channels[r, w] = len(self._channels)
        self._mailbox = self._share("mailbox", 8 * (_CHANNELS + 2 * len(self._channels))) if self._channels else None
        self._box = None if self._mailbox is None else self._mailbox[1].view(torch.int64).numpy()
        nccl = sum(kind == "nccl" for kind in flat)
        self._world = nccl + 1 if nccl else 0
        self._port = _free_port() if nccl else 0
        near = all(worker["host"] == me["host"] for replica in workers for worker in replica)
        self._host = "127.0.0.1" if near else socket.gethostbyname(socket.gethostname())
        self._nccl_ranks = {
            (r, w): i + 1
            for i, (r, w) in enumerate(
                (r, w) for r, kinds in enumerate(self.kinds) for w, kind in enumerate(kinds) if kind == "nccl"
            )
        }
        if self.local:
            _LOCAL[self.session] = self

    @staticmethod
    def lives_here(workers: Sequence[Mapping[str, Any]]) -> bool:
        """Whether an engine's worker runs in this very process."""
        return any(worker["host"] == host_id() and worker["pid"] == os.getpid() for worker in workers)

    def _allocate(self, kinds: list[str]) -> list[Tensor]:
        size = self.nbytes + TAIL
        if "shm" in kinds:
            self._data = self._share("data", 2 * size)
            return list(self._data[1].split(size))
        if "ipc" in kinds:
            memory = CudaMemory(2 * size, self.device)
            self._memory.append(memory)
            return list(memory.tensor.split(size))
        return [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]

    def _share(self, what: str, nbytes: int) -> tuple[str, Tensor]:
        path = SHARED / f"lora_merge-{self.session}-{what}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            path.unlink()
            raise InvalidInput(f"no {nbytes} bytes of shared memory in {SHARED}: {error}") from error
        finally:
            os.close(descriptor)
        self._shared.append(str(path))
        weakref.finalize(self, _unlink, str(path))
        return str(path), torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)

    def init_info(self, replica: int) -> dict[str, Any]:
        """What `init_weight_transfer_engine` gets: JSON values, one channel for each worker rank."""
        channels = []
        for w, kind in enumerate(self.kinds[replica]):
            channel: dict[str, Any] = {"kind": kind, "nbytes": self.nbytes}
            if (replica, w) in self._channels:
                assert self._mailbox is not None
                channel |= {"mailbox": self._mailbox[0], "words": len(self._mailbox[1]) // 8}
                channel |= {"index": self._channels[replica, w], "pid": os.getpid()}
            if kind == "shm":
                channel["data"] = self._data[0]
            elif kind == "ipc":
                channel["handle"] = base64.b64encode(self._memory[0].handle).decode()
            elif kind == "nccl":
                channel |= {"host": self._host, "port": self._port}
                channel |= {"rank": self._nccl_ranks[replica, w], "world": self._world}
            channels.append(channel)
        return {"session": self.session, "channels": channels}

    def connect(self) -> None:
        """Join the NCCL group; the workers do so in their `init_weight_transfer_engine` at the same time."""
        if self._world:
            self._group = _nccl_group(self._host, self._port, 0, self._world, self.device)

    def opened(self) -> None:
        """Every worker has mapped the shared memory: its names can go, so that nothing is left behind by a crash."""
        for path in self._shared:
            _unlink(path)

    def begin(self) -> None:
        """Reset the mailbox for a transfer."""
        if self._box is not None:
            self._box[:] = 0

    def serve(self, source: Sent, run: Mapping[str, Any], gone: Callable[[], set[int]]) -> None:
        """Fill and hand over every bucket of a source.

        Args:
            run: arguments of `Plan.run`.
            gone: replicas whose control call has ended; nobody waits for them any more.

        Raises:
            whatever filling raises; the workers are told to give up first.
        """
        size = 0
        try:
            for index, slots in enumerate(source.table):
                if self._await(index - 1, gone):
                    return
                buffer, size = self.buffers[index % 2], extent(slots)
                source.fill(index, buffer[: self.nbytes], run)
                if self._group is not None:
                    buffer[size : size + TAIL].zero_()
                    self._group.broadcast(buffer[: size + TAIL], 0)
                if self.device.type == "cuda":
                    torch.cuda.current_stream(self.device).synchronize()
                if self._box is not None:
                    self._box[_FILLED] = index + 1
        except BaseException:
            self.abort(size)
            raise

    def offer(self, source: Sent, run: Mapping[str, Any]) -> None:
        """Let the worker in this process pull the buckets of a source."""
        buffers = [buffer[: self.nbytes] for buffer in self.buffers]
        self.pulled = lambda: double_buffered(source, buffers, run)

    def abort(self, size: int) -> None:
        """Tell the workers, who wait for a bucket of `size` bytes, that none comes."""
        if self._box is not None:
            self._box[_ABORTED] = 1
        if self._group is not None:
            self.buffers[0][size : size + TAIL].fill_(1)
            self._group.broadcast(self.buffers[0][: size + TAIL], 0)

    def _await(self, done: int, gone: Callable[[], set[int]]) -> bool:
        """Wait until every worker that is left is done with `done` buckets; whether there is none left."""
        if self._box is None:
            return False
        pause = 0.0
        while True:
            left = gone()
            live = [c for (r, _), c in self._channels.items() if r not in left and not self._box[_CHANNELS + 2 * c + 1]]
            if not live and not self._world:
                return True
            if all(self._box[_CHANNELS + 2 * c] >= done for c in live):
                return False
            time.sleep(pause)
            pause = min(pause + 2e-6, 2e-4)

    def close(self) -> None:
        """Give everything back; workers close their ends when they shut down or connect anew."""
        _LOCAL.pop(self.session, None)
        self.opened()
        self.buffers, self._box, self._mailbox = [], None, None
        for memory in self._memory:
            memory.close()
        if hasattr(self._group, "destroy"):
            self._group.destroy()
        self._memory, self._group = [], None


class Receiver:
    """A worker's end.

    Args:
        session: of the sender.
        channel: this worker's entry of `Sender.init_info`.
        device: of the worker.
    """

    def __init__(self, session: str, channel: Mapping[str, Any], device: torch.device) -> None:
        self.session, self.kind, self._nbytes, self._device = session, channel["kind"], channel["nbytes"], device
        size = self._nbytes + TAIL
        self._group: Any = None
        self._memory: CudaMemory | None = None
        self._box: Any = None
        self._buffers: list[Tensor] = []
        if self.kind in ("shm", "ipc"):
            words = channel["words"]
            mailbox = torch.from_file(_checked(channel["mailbox"]), shared=True, size=8 * words, dtype=torch.uint8)
            self._box = mailbox.view(torch.int64).numpy()
            self._index, self._trainer = _CHANNELS + 2 * channel["index"], channel["pid"]
        if self.kind == "shm":
            data = torch.from_file(_checked(channel["data"]), shared=True, size=2 * size, dtype=torch.uint8)
            self._buffers = list(data.split(size))
        elif self.kind == "ipc":
            self._memory = CudaMemory(2 * size, device, base64.b64decode(channel["handle"]))
            self._buffers = list(self._memory.tensor.split(size))
        elif self.kind == "nccl":
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
            self._group = _nccl_group(channel["host"], channel["port"], channel["rank"], channel["world"], device)

    def receive(self, sizes: Sequence[int]) -> Generator[tuple[int, Tensor], None, None]:
        """Buckets: `(index, data)`. A bucket may be read until the next one is asked for; work on the current stream
        counts. A consumer that raises leaves the sender waiting for nobody.

        Args:
            sizes: bytes of each bucket.

        Raises:
            TransferAborted: the sender gave up, or is gone.
        """
        if self.kind == "local":
            sender = _LOCAL.get(self.session)
            if sender is None or sender.pulled is None:
                raise TransferAborted("the trainer of this process is gone; push again")
            yield from sender.pulled()
            return
        try:
            yield from self._shared(len(sizes)) if self._group is None else self._broadcast(sizes)
        except BaseException:
            if self._box is not None:
                self._box[self._index + 1] = 1
            raise

    def _shared(self, count: int) -> Iterator[tuple[int, Tensor]]:
        for index in range(count):
            pause = 0.0
            while self._box[_FILLED] <= index:
                if self._box[_ABORTED]:
                    raise TransferAborted("the trainer gave up in the middle of a push")
                if pause >= 2e-4 and not Path(f"/proc/{self._trainer}").exists():
                    raise TransferAborted("the trainer died in the middle of a push")
                time.sleep(pause)
                pause = min(pause + 2e-6, 2e-4)
            yield index, self._buffers[index % 2][: self._nbytes]
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            self._box[self._index] = index + 1

    def _broadcast(self, sizes: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        error: BaseException | None = None
        for index, size in enumerate(sizes):
            buffer = self._buffers[index % 2]
            self._group.broadcast(buffer[: size + TAIL], 0)
            if buffer[size : size + TAIL].any().item():
                raise TransferAborted("the trainer gave up in the middle of a push")
            if error is None:
                try:
                    yield index, buffer[: self._nbytes]
                except GeneratorExit as stop:  # the consumer failed: take part in the remaining broadcasts
                    error = stop
        if error is not None:
            raise error

    def close(self) -> None:
        """Let go of the other side's memory."""
        if hasattr(self._group, "destroy"):
            self._group.destroy()
        self._buffers, self._box, self._group = [], None, None
        if self._memory is not None:
            self._memory.close()


class CudaMemory:
    """A cudaMalloc of its own, or one of another process: what PyTorch's and vLLM's allocators hand out cannot
    always be exported (expandable segments, sleep mode)."""

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
        self.handle, self._pointer = handle, pointer
        self.tensor = torch.as_tensor(_Pointer(pointer.value or 0, nbytes), device=device)

    def _check(self, code: int, what: str) -> None:
        if code:
            self._runtime.cudaGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"{what} failed: {self._runtime.cudaGetErrorString(code).decode()}")

    def close(self) -> None:
        if self._pointer.value is None:
            return
        with torch.cuda.device(self._device):
            torch.cuda.synchronize(self._device)
            free = self._runtime.cudaFree if self._owner else self._runtime.cudaIpcCloseMemHandle
            free(self._pointer)
        self._pointer = ctypes.c_void_p()


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


def _nccl_group(host: str, port: int, rank: int, world: int, device: torch.device) -> Any:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    group = StatelessProcessGroup.create(host=host, port=port, rank=rank, world_size=world)
    return PyNcclCommunicator(group, device=device)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _checked(path: str) -> str:
    """A path off the wire: only our own names in shared memory are opened."""
    name = Path(path).name
    if path != str(SHARED / name) or not name.startswith("lora_merge-"):
        raise InvalidInput(f"{path!r} is not a buffer of lora_merge")
    return path


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()
