"""Buckets: flat uint8 buffers and the typed table of what lies in them. The one wire format of this package."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..errors import InvalidInput
from ..kernels.segments import raw
from ..shards import Box
from ..shards.ranks import even

_T = TypeVar("_T")
BUCKET_BYTES = 512 << 20

ALIGNMENT = 256
"""Slots start at multiples of this many bytes: any dtype can be viewed there, and every kernel may use wide loads."""


class Meta(NamedTuple):
    """Name, dtype and shape of one tensor of a stream or checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor, or a box of one, lies in its bucket.

    Args:
        name: HF checkpoint name.
        dtype, shape: of what lies there; contiguous.
        offset: first byte in the bucket, a multiple of `ALIGNMENT`.
        nbytes: bytes of it, without padding.
        start: index of its first element in the whole tensor.
        whole: shape of the whole tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    start: tuple[int, ...]
    whole: tuple[int, ...]

    @property
    def box(self) -> Box:
        return self.start, self.shape

    def view(self, data: Tensor) -> Tensor:
        """Return what lies there, as a view of its bucket's `data` (uint8, 1-D)."""
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
        """Yield `(name, tensor)` views of `data`."""
        return ((slot.name, slot.view(self.data)) for slot in self.slots)


Table = tuple[tuple[Slot, ...], ...]
"""The slots of every bucket of a stream."""


def check_bucket_bytes(bucket_bytes: Any) -> None:
    """Raise `InvalidInput` unless a bucket of this size can hold something."""
    if not isinstance(bucket_bytes, int) or isinstance(bucket_bytes, bool) or bucket_bytes < ALIGNMENT:
        raise InvalidInput(f"bucket_bytes must be a whole number of at least {ALIGNMENT} bytes, got {bucket_bytes!r}")


def lay_out(metas: Sequence[Meta], bucket_bytes: int) -> Table:
    """Lay out slots for a stream, in its order: a new bucket begins where the next tensor does not fit into
    `bucket_bytes`.

    A tensor larger than `bucket_bytes` gets a bucket of its own, as large as it needs to be.
    """
    check_bucket_bytes(bucket_bytes)
    buckets: list[list[Slot]] = []
    end = bucket_bytes
    for meta in metas:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        if not buckets or offset + meta.nbytes > bucket_bytes:
            buckets.append([])
            offset = 0
        buckets[-1].append(_slot(meta, ((0,) * len(meta.shape), meta.shape), offset))
        end = offset + meta.nbytes
    return tuple(map(tuple, buckets))


def _slot(meta: Meta, box: Box, offset: int) -> Slot:
    start, shape = box
    return Slot(meta.name, meta.dtype, shape, offset, prod(shape) * meta.dtype.itemsize, start, meta.shape)


def lay_out_parts(
    boxes: Sequence[Sequence[tuple[Meta, Box]]], bucket_bytes: int
) -> tuple[Table, tuple[tuple[int, ...], ...]]:
    """Lay out slots for a stream whose tensors lie in boxes on several ranks: a bucket is one part a rank, side by
    side.

    Every rank fills its own parts in its own order, each `bucket_bytes` / ranks; so parts are as even as what the
    ranks hold. A box that is larger than a part is cut into several slots.

    Args:
        boxes: of each rank.

    Returns:
        The table, and the bytes of each rank's part in each bucket.
    """
    check_bucket_bytes(bucket_bytes)
    room = _part_bytes(bucket_bytes, len(boxes))
    parts = [_parts(own, room) for own in boxes]
    table, sizes = [], []
    for bucket in zip_longest(*parts, fillvalue=()):
        sizes.append(tuple(even([max(extent(slots), ALIGNMENT) for slots in bucket])))
        table.append(tuple(side_by_side(bucket, sizes[-1])))
    return tuple(table), tuple(sizes)


def side_by_side(parts: Sequence[Sequence[Slot]], rooms: Sequence[int]) -> list[Slot]:
    """Return the slots of several parts by their place in the buffer in which all of these lie, one behind the other.

    Args:
        rooms: bytes of the parts.
    """
    return [
        replace(slot, offset=start + slot.offset)
        for start, slots in zip(accumulate(rooms, initial=0), parts, strict=False)
        for slot in slots
    ]


def lay_out_in_order(
    boxes: Sequence[Sequence[tuple[Meta, Box]]], names: Iterable[str], bucket_bytes: int
) -> tuple[Table, tuple[tuple[int, ...], ...]]:
    """Lay out slots like `lay_out_parts`, but so that tensors become whole in an order: all ranks go on to the next
    bucket where the part of one of them is full. A tensor of which a rank holds more than a part has buckets of its
    own.

    Args:
        names: of all tensors, in that order, which is the order of each rank's boxes.
    """
    check_bucket_bytes(bucket_bytes)
    room = _part_bytes(bucket_bytes, len(boxes))
    of_names: dict[str, list[list[tuple[Meta, Box]]]] = {name: [[] for _ in boxes] for name in names}
    for rank, own in enumerate(boxes):
        for meta, box in own:
            of_names[meta.name][rank].append((meta, box))
    runs: list[list[list[tuple[Meta, Box]]]] = []
    ends = [room + 1] * len(boxes)
    for held in of_names.values():
        sizes = [sum(_room_of(meta, box) for meta, box in own) for own in held]
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
        if not runs or max(ends) > room:
            runs.append([[] for _ in boxes])
            ends = sizes
        for mine, more in zip(runs[-1], held, strict=True):
            mine += more
    parts = [lay_out_parts(run, bucket_bytes) for run in runs]
    return tuple(slots for table, _ in parts for slots in table), tuple(size for _, sizes in parts for size in sizes)


def _part_bytes(bucket_bytes: int, ranks: int) -> int:
    return max(bucket_bytes // ranks // ALIGNMENT, 1) * ALIGNMENT


def _room_of(meta: Meta, box: Box) -> int:
    return -(-prod(box[1]) * meta.dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _parts(boxes: Sequence[tuple[Meta, Box]], room: int) -> list[tuple[Slot, ...]]:
    """Return one rank's slots, in parts of up to `room` bytes."""
    parts: list[list[Slot]] = [[]]
    end = 0
    rest = list(reversed(boxes))
    while rest:
        meta, (start, size) = rest.pop()
        nbytes = prod(size) * meta.dtype.itemsize
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        if offset + nbytes > room and nbytes > room and prod(size) > 1:
            dim = next(d for d, n in enumerate(size) if n > 1)
            step = nbytes // size[dim]
            count = (room - offset) // step or (1 if step > room else 0)
            if count:
                head = (*size[:dim], count, *size[dim + 1 :])
                tail = (*size[:dim], size[dim] - count, *size[dim + 1 :])
                if tail[dim]:
                    rest.append((meta, ((*start[:dim], start[dim] + count, *start[dim + 1 :]), tail)))
                rest.append((meta, (start, head)))
                continue
        if parts[-1] and offset + nbytes > room:
            parts.append([])
            offset = end = 0
            if nbytes > room:
                rest.append((meta, (start, size)))
                continue
        parts[-1].append(_slot(meta, (start, size), offset))
        end = offset + nbytes
    return [tuple(slots) for slots in parts if slots]


def batched(items: Sequence[_T], nbytes: Sequence[int], most: int) -> Iterator[list[_T]]:
    """Yield runs of items of up to `most` bytes together, at least one each."""
    batch: list[_T] = []
    size = 0
    for item, n in zip(items, nbytes, strict=True):
        if batch and size + n > most:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += n
    if batch:
        yield batch


def extent(slots: Sequence[Slot]) -> int:
    """Return the bytes of one bucket, the last slot padded to the alignment."""
    return max((-(-(slot.offset + slot.nbytes) // ALIGNMENT) * ALIGNMENT for slot in slots), default=0)


def to_json(table: Table) -> list[Any]:
    """Return the table as JSON values: for each bucket a list of `[name, dtype, shape, offset, bytes, start,
    whole]`."""
    return [
        [[s.name, dtype_name(s.dtype), list(s.shape), s.offset, s.nbytes, list(s.start), list(s.whole)] for s in slots]
        for slots in table
    ]


def digest_of(table: Table) -> str:
    """Return the hex digest that names a table."""
    return hashlib.blake2b(repr(to_json(table)).encode(), digest_size=16).hexdigest()


def contents_of(table: Table) -> str:
    """Return the hex digest that names what is in a table, wherever it lies there."""
    known = sorted((m.name, dtype_name(m.dtype), m.shape) for m in metas(table).values())
    return hashlib.blake2b(repr(known).encode(), digest_size=16).hexdigest()


def from_json(value: Any) -> Table:
    """Read a table off the wire.

    Raises:
        InvalidInput: a dtype that torch does not have, a slot that is misaligned, outside of its tensor or whose bytes
            do not fit its shape, or two slots that meet.
    """
    table = tuple(
        tuple(
            Slot(name, dtype_of(dtype), tuple(shape), offset, nbytes, tuple(start), tuple(whole))
            for name, dtype, shape, offset, nbytes, start, whole in slots
        )
        for slots in value
    )
    for slots in table:
        end = 0
        for slot in slots:
            if slot.offset % ALIGNMENT or slot.offset < end:
                raise InvalidInput(
                    f"{slot.name}: a slot at byte {slot.offset} is misaligned or overlaps the one before"
                )
            if slot.nbytes != prod(slot.shape) * slot.dtype.itemsize:
                raise InvalidInput(f"{slot.name}: {slot.nbytes} bytes do not hold {slot.dtype} {slot.shape}")
            inside = zip(slot.start, slot.shape, slot.whole, strict=True)
            if any(s < 0 or s + n > m for s, n, m in inside):
                raise InvalidInput(f"{slot.name}: {slot.shape} at {slot.start} is not inside {slot.whole}")
            end = slot.offset + slot.nbytes
    return table


def metas(table: Table) -> dict[str, Meta]:
    """Return the whole tensors of a table, by name, in the order in which they begin."""
    return {slot.name: Meta(slot.name, slot.dtype, slot.whole) for slots in table for slot in slots}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidInput(f"unknown dtype {name!r} in a bucket table")
    return dtype


def checksum(tensor: Tensor, start: Sequence[int] | None = None, whole: Sequence[int] | None = None) -> int:
    """Return a 63-bit checksum of a tensor's bits, the same on every device: a sum over its elements, each multiplied
    by an odd number that depends on its place, so that order counts. Those of the boxes of a tensor add up to its own
    (`combined`).

    Args:
        start, whole: of a box: where it begins in the tensor, and the tensor's shape.
    """
    bits = raw(tensor.detach().contiguous())
    shape = tuple(tensor.shape if whole is None else whole)
    return _checksum(bits, tuple(start or (0,) * len(shape)), shape) & _MASK


def combined(sums: Iterable[int]) -> int:
    """Return the checksum of a tensor from those of its boxes."""
    return sum(sums) & _MASK


def _checksum(bits: Tensor, start: tuple[int, ...], whole: tuple[int, ...]) -> int:
    if bits.numel() == 0:
        return 0
    first = sum(s * prod(whole[d + 1 :]) for d, s in enumerate(start))
    if bits.shape[1:] == whole[1:] or bits.dim() < 2:  # one run
        total, flat = bits.numel(), bits.view(-1)
        for begin in range(0, flat.numel(), _SUMMED_AT_A_TIME):
            chunk = flat[begin : begin + _SUMMED_AT_A_TIME].long()
            place = torch.arange(first + begin, first + begin + chunk.numel(), device=chunk.device)
            total += int((chunk * (place * _STEP + 1)).sum().item())
        return total
    if bits.dim() == 2:
        total, (rows, cols) = bits.numel(), bits.shape
        across = torch.arange(cols, device=bits.device)
        count = max(_SUMMED_AT_A_TIME // cols, 1)
        for begin in range(0, rows, count):
            chunk = bits[begin : begin + count].long()
            down = torch.arange(begin, begin + chunk.shape[0], device=bits.device) * whole[1]
            total += int((chunk * ((first + down[:, None] + across) * _STEP + 1)).sum().item())
        return total
    # A slice of it, as a box of all slices put below each other.
    inner = (start[0] * whole[1] + start[1], *start[2:])
    return sum(
        _checksum(part, (inner[0] + i * whole[1], *inner[1:]), (whole[0] * whole[1], *whole[2:]))
        for i, part in enumerate(bits)
    )


_SUMMED_AT_A_TIME = 1 << 24
_STEP = 2 * 0x1E3779B97F4A7C15
_MASK = (1 << 63) - 1
