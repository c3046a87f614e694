"""Tensors of one process, mapped into another one: an engine's into the trainer, which merges straight into them
(`write`), or a trainer's into an engine's worker (`pull`: worker/pull.py).

On GPUs over CUDA IPC, also from one GPU to another; on CPUs if the tensors lie in shared memory. What cannot be
exported (the memory of vLLM's sleep mode and SGLang's memory saver, expandable segments) is reached by buckets.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...shards import Box
from ...stream.buckets import dtype_name, dtype_of
from ...stream.direct_targets import DirectTargets
from .base import TrainerEnd
from .liveness import SHARED
from .memory import CudaMemory, NotExported, SharedFiles, allocations, exported

Found: TypeAlias = Mapping[str, Any]
"""A worker's `ExportedMemory.description`."""


class Memory:
    """Identity of the allocations that storages lie in. It differs if other memory lies at the same addresses later,
    and keeps no allocation alive."""

    def __init__(self, storages: Iterable[torch.UntypedStorage]) -> None:
        storages = list(storages)
        self._at = [storage.data_ptr() for storage in storages]
        # Another file may be mapped at the same address; an allocation of a GPU has a number of its own (`_marks`).
        self._living = [StorageWeakRef(storage) for storage in storages if storage.device.type == "cpu"]
        self.marks = _marks(storages)
        # Storages of one allocation stay or go together: CUDA is asked for one of each.
        alone = [storage.device.type == "cpu" or mark <= 0 for storage, mark in zip(storages, self.marks, strict=True)]
        firsts: dict[int, int] = {}
        for at, mark in enumerate(self.marks):
            firsts.setdefault(-1 - at if alone[at] else mark, at)
        self._asked = list(firsts.values())

    def stays(self, storages: Sequence[torch.UntypedStorage]) -> bool:
        """Return True if storages at the same addresses, in the same order, lie in these allocations."""
        return [self.marks[at] for at in self._asked] == _marks([storages[at] for at in self._asked])

    def same_as(self, other: Memory) -> bool:
        return sorted(self._at) == sorted(other._at)

    def same(self, held: Mapping[int, torch.UntypedStorage]) -> bool:
        """Return True if the present storages, by address, lie in these allocations."""
        if any(storage.expired() for storage in self._living):
            return False
        found = [held[at] for at in self._at if at in held]
        return len(found) == len(self._at) and self.stays(found)


class ExportedMemory:
    """What other processes of this host need to map tensors of this one, where these lie at the moment.

    Args:
        targets: of an engine, boxes of tensors of a stream; of a trainer, boxes of parameters, by the name of the
            tensor of the stream that they go to.
        blocked: names of tensors of the stream that the engine takes partly in another way.
        whose: "the engine's" or "the trainer's", for messages.

    Attributes:
        lies: the allocations.
        description: JSON values: `why` they cannot be mapped, or `memory`, `views` of it by name, and names that are
            `blocked`.
        digest: equal as long as a mapping stays good; "" if nothing can be mapped.
    """

    def __init__(self, targets: DirectTargets, blocked: Collection[str], whose: str = "the engine's") -> None:
        storages = (view.untyped_storage() for found in targets.views.values() for _, view in found)
        self._storages = list({storage.data_ptr(): storage for storage in storages}.values())
        self.lies = Memory(self._storages)
        try:
            memory, views = self._describe(targets)
            self.description: dict[str, Any] = {"why": "", "memory": memory, "views": views, "blocked": sorted(blocked)}
            content = repr((self.lies.marks, self.description))
            self.digest = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
        except NotExported as error:
            self.description, self.digest = {"why": f"{whose} weights cannot be mapped: {error}"}, ""

    def hold(self, held: Mapping[int, torch.UntypedStorage] | None = None) -> bool:
        """Return True if the tensors, at the same addresses, still lie in the same allocations; after `release`, `held`
        has the present storages by address."""
        if held is None:
            return self.lies.stays(self._storages)
        return self.lies.same(held)

    def release(self) -> None:
        """Drop the references to the tensors."""
        self._storages = []

    def _describe(self, targets: DirectTargets) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
        export = _Exporter()
        memory: dict[str, dict[str, Any]] = {}
        where: dict[int, tuple[int, int]] = {}
        names = {view.untyped_storage().data_ptr(): name for name, some in targets.views.items() for _, view in some}
        for storage, mark in zip(self._storages, self.lies.marks, strict=True):
            try:
                spec, offset = export(storage, mark)
            except NotExported as error:
                raise NotExported(f"{names[storage.data_ptr()]}: {error}") from error
            key = spec.get("handle") or spec["path"]
            memory.setdefault(key, spec)
            where[storage.data_ptr()] = list(memory).index(key), offset
        views: dict[str, list[Any]] = {}
        for name, found in targets.views.items():
            views[name] = []
            for (start, size), view in found:
                number, offset = where[view.untyped_storage().data_ptr()]
                at = offset + view.storage_offset() * view.element_size()
                laid = [dtype_name(view.dtype), list(view.shape), list(view.stride())]
                views[name].append([list(start), list(size), number, at, *laid])
        return list(memory.values()), views


class _Exporter:
    """Exports several storages of this process."""

    def __init__(self) -> None:
        self._files: SharedFiles | None = None
        self._handles: dict[int, str] = {}

    def __call__(self, storage: torch.UntypedStorage, mark: int) -> tuple[dict[str, Any], int]:
        """Return how a storage is mapped, and its offset; raise `NotExported` if it cannot be. `mark` is of its
        allocation, as the next one at the same address may have the same handle."""
        if storage.device.type == "cuda":
            handle, nbytes, offset = exported(storage, self._handles)
            return {"handle": handle, "nbytes": nbytes, "mark": mark}, offset
        self._files = self._files or SharedFiles()
        path, file, nbytes, offset = self._files.exported(storage)
        return {"path": path, "file": file, "nbytes": nbytes}, offset


def exportable(tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the names of those tensors that other processes can map where they lie."""
    export, found = _Exporter(), set()
    for name, tensor in tensors.items():
        with suppress(NotExported):
            export(tensor.untyped_storage(), 0)
            found.add(name)
    return found


def _marks(storages: Sequence[torch.UntypedStorage]) -> list[int]:
    """Return the numbers of the allocations that storages lie in; for those of the CPU, their bytes."""
    numbers = iter(allocations([storage for storage in storages if storage.device.type == "cuda"]))
    return [next(numbers) if storage.device.type == "cuda" else storage.nbytes() for storage in storages]


class MappedMemory:
    """The tensors of another process in this one; no view may be used once it is closed, or freed.

    Args:
        found: what that process exports; memory without views is not mapped.
        device: of the views: a GPU that reaches the other process's, or the CPU.

    Raises:
        RuntimeError, OSError: this process cannot map them.
    """

    def __init__(self, found: Found, device: torch.device, pid: int) -> None:
        self._memory: list[CudaMemory] = []
        self.views: dict[str, list[tuple[Box, Tensor]]] = {}
        try:
            used = {view[2] for views in found["views"].values() for view in views}
            memory = {number: self._map(found["memory"][number], device, pid) for number in sorted(used)}
            for name, views in found["views"].items():
                self.views[name] = [_view(spec, memory) for spec in views]
        except BaseException:
            self.close()
            raise

    def _map(self, spec: Found, device: torch.device, pid: int) -> Tensor:
        if device.type == "cpu":
            path = spec["path"]
            if not re.fullmatch(rf"/proc/{pid}/fd/\d+", path) or SHARED not in Path(path).readlink().parents:
                raise RuntimeError(f"{path!r} is not shared memory of process {pid}")
            return _opened(path, spec["file"], spec["nbytes"])
        self._memory.append(CudaMemory(spec["nbytes"], device, spec["handle"]))
        return self._memory[-1].tensor

    def close(self) -> None:
        self.views = {}
        for memory in self._memory:
            memory.close()
        self._memory = []


def _opened(path: str, file: int, nbytes: int) -> Tensor:
    """Return a file of another process as bytes."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        found = os.fstat(descriptor)
        if found.st_ino != file or found.st_size < nbytes:
            raise RuntimeError(f"{path} is another file by now: the memory behind it was given back")
        return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _view(spec: Sequence[Any], memory: Mapping[int, Tensor]) -> tuple[Box, Tensor]:
    """Return a box of a tensor of the stream and its view; raise RuntimeError if that is not inside of its memory."""
    start, size, number, at, dtype_spec, shape, stride = spec
    dtype, whole = dtype_of(dtype_spec), memory[number]
    last = at + (sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1) * dtype.itemsize
    if at < 0 or at % dtype.itemsize or min(stride, default=0) < 0 or last > whole.nbytes:
        raise RuntimeError(f"a view of bytes {at} to {last} is not inside of {whole.nbytes} bytes of memory")
    view = torch.empty(0, dtype=dtype, device=whole.device)
    view = view.set_(whole.untyped_storage(), at // dtype.itemsize, shape, stride)
    return (tuple(start), tuple(size)), view


class DirectWriteSet(NamedTuple):
    """The names of the tensors that the trainer can write into every worker, the same on every rank; or `why` there are
    none."""

    names: frozenset[str] = frozenset()
    why: str = ""


def direct(workers: Sequence[Found]) -> DirectWriteSet:
    """Find which tensors can be written straight into all of these workers."""
    why = next((worker["why"] for worker in workers if worker["why"]), "")
    if why or not workers:
        return DirectWriteSet(why=why)
    some = frozenset().union(*(worker["views"] for worker in workers))
    return DirectWriteSet(some.difference(*(worker["blocked"] for worker in workers)))


def united(mapped: Iterable[MappedMemory]) -> DirectTargets:
    """Join the targets of several workers: a tensor is written to every worker that has it."""
    views: dict[str, list[tuple[Box, Tensor]]] = {}
    for one in mapped:
        for name, found in one.views.items():
            views.setdefault(name, []).extend(found)
    return DirectTargets(views)


class WriteSender(TrainerEnd):
    """No buckets: the trainer writes through the `targets` of a `Route`, and the worker takes nothing."""

    takes_buckets, needs_buffers = False, False
