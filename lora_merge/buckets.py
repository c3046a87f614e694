"""Buckets: flat uint8 buffers and the typed table of what lies in them. The one wire format of this package."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import InvalidInput

ALIGNMENT = 256
"""Slots start at multiples of this many bytes: any dtype can be viewed there, and every kernel may use wide loads."""


class Meta(NamedTuple):
    """Name, dtype and shape of one tensor of the stream."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies in its bucket.

    Args:
        name: HF checkpoint name.
        dtype, shape: of the tensor; contiguous.
        offset: first byte in the bucket, a multiple of `ALIGNMENT`.
        nbytes: bytes of the tensor, without padding.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def view(self, data: Tensor) -> Tensor:
        """The tensor, as a view of its bucket's `data` (uint8, 1-D)."""
        return data[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A filled buffer and its table.

    Args:
        index: position in the stream.
        slots: the table.
        data: uint8 `[nbytes]`, on the device of the training weights.
    """

    index: int
    slots: tuple[Slot, ...]
    data: Tensor

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """`(name, tensor)` views of `data`."""
        return ((slot.name, slot.view(self.data)) for slot in self.slots)


Table = tuple[tuple[Slot, ...], ...]
"""The slots of every bucket of a stream."""


def lay_out(metas: Sequence[Meta], bucket_bytes: int) -> Table:
    """Slots for a stream, in its order: a new bucket begins where the next tensor does not fit into `bucket_bytes`.

    A tensor larger than `bucket_bytes` gets a bucket of its own, as large as it needs to be.
    """
    if bucket_bytes < ALIGNMENT:
        raise InvalidInput(f"bucket_bytes must be at least {ALIGNMENT}, got {bucket_bytes}")
    buckets: list[list[Slot]] = []
    end = bucket_bytes
    for meta in metas:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        if not buckets or offset + meta.nbytes > bucket_bytes:
            buckets.append([])
            offset = 0
        buckets[-1].append(Slot(meta.name, meta.dtype, meta.shape, offset, meta.nbytes))
        end = offset + meta.nbytes
    return tuple(map(tuple, buckets))


def capacity(table: Table) -> int:
    """Bytes of a buffer that any bucket of the table fits into."""
    return max((extent(slots) for slots in table), default=0)


def extent(slots: Sequence[Slot]) -> int:
    """Bytes of one bucket, the last slot padded to the alignment."""
    return max((-(-(slot.offset + slot.nbytes) // ALIGNMENT) * ALIGNMENT for slot in slots), default=0)


def to_json(table: Table) -> list[Any]:
    """The table as JSON values: for each bucket a list of `[name, dtype, shape, offset, bytes]`."""
    return [[[s.name, dtype_name(s.dtype), list(s.shape), s.offset, s.nbytes] for s in slots] for slots in table]


def digest_of(table: Table) -> str:
    """Hex digest that names a table."""
    return hashlib.blake2b(repr(to_json(table)).encode(), digest_size=16).hexdigest()


def from_json(value: Any) -> Table:
    """Read a table off the wire.

    Raises:
        InvalidInput: a dtype that torch does not have, a slot that is misaligned or whose bytes do not fit its shape,
            or two slots that meet.
    """
    table = tuple(
        tuple(Slot(name, dtype_of(dtype), tuple(shape), offset, nbytes) for name, dtype, shape, offset, nbytes in slots)
        for slots in value
    )
    for slots in table:
        end = 0
        for slot in slots:
            if slot.offset % ALIGNMENT or slot.offset < end:
                raise InvalidInput(
                    f"{slot.name}: a slot at byte {slot.offset} is misaligned or overlaps the one before"
                )
            if slot.nbytes != Meta(slot.name, slot.dtype, slot.shape).nbytes:
                raise InvalidInput(f"{slot.name}: {slot.nbytes} bytes do not hold {slot.dtype} {slot.shape}")
            end = slot.offset + slot.nbytes
    return table


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidInput(f"unknown dtype {name!r} in a bucket table")
    return dtype


def checksum(tensor: Tensor) -> int:
    """63-bit checksum of a tensor's bytes, the same on every device: a sum over its 4-byte words, each multiplied by
    an odd number that depends on its place, so that order counts."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    tail = raw.numel() % 4
    total = 0
    words = raw[: raw.numel() - tail].view(torch.int32) if raw.numel() >= 4 else raw.new_zeros(0, dtype=torch.int32)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].long()
        place = torch.arange(start, start + chunk.numel(), device=chunk.device)
        total += int((chunk * (place * _STEP + 1)).sum().item())
    for i, byte in enumerate(raw[raw.numel() - tail :].tolist() if tail else []):
        total += (byte + 1) * (2 * i + 3)
    return (total + raw.numel()) & ((1 << 63) - 1)


_CHUNK = 1 << 24
_STEP = 2 * 0x1E3779B97F4A7C15
