"""Everything that is checked about segments before the first byte is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..choices import DTYPES
from ..errors import InvalidInput
from .bindings.layout import MAX_RANK, MAX_SIDE
from .packed import Packed, in_reach, memory
from .segments import FLOATS, FP8, RAW, Segment, folded, moves_bits


def check_device(device: str | torch.device) -> torch.device:
    """Return a device by its name; raise `InvalidInput` unless tensors can be there."""
    try:
        found = torch.device(device)
        if found.type == "meta":
            raise ValueError("tensors on meta hold no values")
        torch.empty(1, device=found)
    except Exception as error:
        message = str(error).strip().partition("\n")[0]
        raise InvalidInput(
            f"device {str(device)!r} cannot be used here ({message}): expected cpu, or cuda where torch sees a GPU; "
            "lora-merge doctor says more"
        ) from error
    return found


def check_dtype(dtype: object) -> torch.dtype | None:
    """Return the dtype of results, which may be given by its name; None stays None.

    Raises:
        InvalidInput: it is none of bfloat16, float16 and float32.
    """
    found = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found is None and dtype is None:
        return None
    if not isinstance(found, torch.dtype) or found not in FLOATS:
        raise InvalidInput(f"dtype must be bfloat16, float16 or float32, got {dtype!r}")
    return found


def check_scaling(scaling: Any) -> float:
    """Return a factor as a float; raise `InvalidInput` unless it is one real number that a float holds."""
    if isinstance(scaling, Tensor):
        number = scaling.numel() == 1 and not scaling.is_complex()
    else:
        number = hasattr(type(scaling), "__float__")
    if not number:
        raise InvalidInput(f"scaling must be one real number, got {scaling!r}")
    try:
        return float(scaling)
    except OverflowError as error:
        raise InvalidInput("scaling must be finite in float32, got a number above 10^308") from error


def check_word(label: str, value: object) -> None:
    """Raise `InvalidInput` unless a value is a whole number that a word of the table holds."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInput(f"{label} must be a whole number, got {value!r}")
    if not -(2**63) <= value < 2**63:
        raise InvalidInput(f"{label} must fit in 64 bits, got one of {value.bit_length()} bits")


def check_dense(label: str, tensor: Tensor) -> None:
    """Raise `InvalidInput` unless a tensor's elements are numbers that lie at its strides."""
    kind = ""
    if tensor.is_nested:
        kind = "a nested tensor"
    elif tensor.layout is not torch.strided:
        kind = f"layout {tensor.layout}"
    elif tensor.is_quantized:
        kind = "a quantised one"
    elif tensor.is_neg() or tensor.is_conj():
        kind = "a lazily negated or conjugated view; pass its resolve_neg() or resolve_conj()"
    if kind:
        raise InvalidInput(f"{label} must be a dense tensor, got {kind}")


def check_segments(given: object) -> tuple[Segment, ...]:
    """Return the segments of a plan; raise `InvalidInput` unless they are segments whose tensors are tensors."""
    segments = tuple(given) if isinstance(given, Iterable) else (given,)
    for index, s in enumerate(segments):
        if not isinstance(s, Segment):
            raise InvalidInput(f"segments must be Segments, got a {type(s).__name__} at {index}")
        if not isinstance(s.name, str):
            raise InvalidInput(f"name of segment {index} must be a string, got {s.name!r}")
        for label in ("source", "destination", "lora_A", "lora_B", "row_scale"):
            value, optional = getattr(s, label), label not in ("source", "destination")
            if not isinstance(value, Tensor) and not (value is None and optional):
                raise InvalidInput(f"{s.name}: {label} must be a tensor, got a {type(value).__name__}")
        if not isinstance(s.scaling, float):
            check_scaling(s.scaling)
        check_word(f"{s.name}: first", s.first)
        if s.pitch is not None:
            if not isinstance(s.pitch, (tuple, list)) or len(s.pitch) != 2:
                raise InvalidInput(f"{s.name}: pitch must be two whole numbers, got {s.pitch!r}")
            for step in s.pitch:
                check_word(f"{s.name}: pitch", step)
    return segments


def check_segment(s: Segment) -> None:
    """Raise `InvalidInput`, naming the weight, unless shapes, dtypes, devices and scaling of one segment fit."""
    for label, tensor, dims in (
        ("source", s.source, 2),
        ("destination", s.destination, 2),
        ("lora_A", s.lora_A, 2),
        ("lora_B", s.lora_B, 2),
        ("row_scale", s.row_scale, 1),
    ):
        if tensor is None:
            continue
        check_dense(f"{s.name}: {label}", tensor)
        if tensor.dim() != dims:
            raise InvalidInput(f"{s.name}: {label} must have {dims} dimensions, got shape {tuple(tensor.shape)}")
        if tensor.device.type == "meta":
            raise InvalidInput(f"{s.name}: {label} is a meta tensor and holds no values; load it first")
        if tensor.device != s.source.device:
            raise InvalidInput(
                f"{s.name}: {label} is on {tensor.device}, the weight on {s.source.device}; move it there first"
            )
        if isinstance(tensor, Packed) and label != "source" and not only_norms(s):
            raise InvalidInput(f"{s.name}: {label} must be a plain tensor, got a quantised one")
        if tensor.numel() and tensor.data_ptr() == 0:
            raise InvalidInput(
                f"{s.name}: {label} has no memory: its storage was freed (as FSDP does), or it wraps other tensors "
                "(of a DTensor pass to_local())"
            )
    if not in_reach(s.source, s.source.device):
        raise InvalidInput(f"{s.name}: no kernel decodes the weight; pass a plain tensor, what its decoded() gives")
    if s.destination.shape != s.source.shape:
        raise InvalidInput(
            f"{s.name}: the destination must have the weight's shape {tuple(s.source.shape)}, "
            f"got {tuple(s.destination.shape)}"
        )
    if not _distinct(s.destination):
        raise InvalidInput(
            f"{s.name}: the destination's elements share memory (shape {tuple(s.destination.shape)}, strides "
            f"{s.destination.stride()}); pass a tensor of its own"
        )
    if s.row_scale is not None and (s.row_scale.dtype != torch.float32 or not s.row_scale.is_contiguous()):
        raise InvalidInput(f"{s.name}: row_scale must be contiguous float32, got {s.row_scale.dtype}")
    if s.row_scale is not None and s.row_scale.shape[0] != s.source.shape[0]:
        raise InvalidInput(f"{s.name}: row_scale must have {s.source.shape[0]} entries, got {s.row_scale.shape[0]}")
    if (s.lora_A is None) != (s.lora_B is None):
        raise InvalidInput(f"{s.name}: lora_A and lora_B must come together; pass both, or neither")
    if s.lora_A is None or s.lora_B is None:
        _check_copy(s)
        return
    for label, tensor in (
        ("the weight", s.source),
        ("the destination", s.destination),
        ("lora_A", s.lora_A),
        ("lora_B", s.lora_B),
    ):
        if tensor.dtype not in FLOATS and not (tensor is s.destination and tensor.dtype == FP8):
            raise InvalidInput(f"{s.name}: {label} must be bfloat16, float16 or float32, got {tensor.dtype}")
    (rows, cols), (rank, a_cols), (b_rows, b_rank) = s.source.shape, s.lora_A.shape, s.lora_B.shape
    if a_cols != cols:
        raise InvalidInput(f"{s.name}: lora_A must be [r, {cols}], got {tuple(s.lora_A.shape)}")
    if b_rows != rows or b_rank != rank:
        raise InvalidInput(f"{s.name}: lora_B must be [{rows}, {rank}], got {tuple(s.lora_B.shape)}")
    _check_side(s)
    if not 1 <= rank <= MAX_RANK:
        raise InvalidInput(f"{s.name}: the rank must be between 1 and {MAX_RANK}, got {rank}")
    if not abs(s.scaling) <= torch.finfo(torch.float32).max:
        raise InvalidInput(f"{s.name}: scaling must be finite in float32, got {s.scaling}")


def only_norms(s: Segment) -> bool:
    """Return True if a segment has a quantised weight in place, which gives norms of its rows and cannot be written."""
    source, destination = s.source, s.destination
    if not isinstance(source, Packed) or not isinstance(destination, Packed) or s.row_scale is None:
        return False
    return same_view(source, destination) and source.place == destination.place


def _check_copy(s: Segment) -> None:
    if moves_bits(s):
        contiguous = s.source.shape[1] <= 1 or (s.source.stride(1) == 1 and s.destination.stride(1) == 1)
        if not contiguous and s.source.element_size() not in RAW:
            raise InvalidInput(
                f"{s.name}: cannot copy {s.source.dtype} with a stride between elements; pass it contiguous"
            )
        if not (s.source.is_contiguous() and s.destination.is_contiguous()):  # else it is one run of bytes
            _check_side(s)
        return
    for tensor in (s.source, s.destination):
        if tensor.dtype not in FLOATS and not (tensor is s.destination and tensor.dtype == FP8):
            raise InvalidInput(
                f"{s.name}: cannot convert {s.source.dtype} to {s.destination.dtype}; "
                "only bfloat16, float16 and float32 convert"
            )
    for part in folded(s):
        _check_side(part)


def _check_side(s: Segment) -> None:
    side = max(s.source.shape)
    if side > MAX_SIDE:
        raise InvalidInput(f"{s.name}: a side of {side} is above {MAX_SIDE}; cut the weight into segments")


def check_overlaps(segments: Sequence[Segment]) -> None:
    """Raise `InvalidInput` if two segments write one byte, or one reads what another (or itself, shifted) writes.

    A segment may read exactly what it writes (in place). Extents are compared first; rows are enumerated only where
    extents meet, so interleaved rectangles (fused QKV) pass and cost little.
    """
    spans = _Spans()
    for index, s in enumerate(segments):
        if s.destination.numel() == 0:
            continue
        if not isinstance(s.destination, Packed):
            spans.add(index, s.destination, write=True)
        if isinstance(s.source, Packed) or not same_view(s.source, s.destination):
            for tensor in memory(s.source):
                spans.add(index, tensor, write=False)
        for factor in (s.lora_A, s.lora_B, s.row_scale):
            if factor is not None:
                spans.add(index, factor, write=False)
    clash = spans.clash()
    if clash is not None:
        (one, one_writes), (other, other_writes) = clash
        one_name, other_name = segments[one].name, segments[other].name
        if one_writes and other_writes:
            raise InvalidInput(
                f"{one_name} and {other_name}: two segments write the same place; give each a destination of its own"
            )
        writer, reader = (one_name, other_name) if one_writes else (other_name, one_name)
        raise InvalidInput(
            f"{writer}: the destination overlaps what {reader} reads; pass the weight itself to merge in place, "
            "or a tensor apart from it"
        )


def overlapping(tensors: Sequence[Tensor], written: Sequence[bool]) -> tuple[int, int] | None:
    """Return the numbers of two views that share a byte, a written one first; None if there are none.

    Args:
        tensors: strided, all of one device.
        written: which of them are.
    """
    spans = _Spans()
    for index, (tensor, write) in enumerate(zip(tensors, written, strict=True)):
        if tensor.numel():
            spans.add(index, tensor, write)
    clash = spans.clash()
    if clash is None:
        return None
    (one, one_writes), (other, _) = clash
    return (one, other) if one_writes else (other, one)


def same_view(x: Tensor, y: Tensor) -> bool:
    """Return True if two views are the same elements in the same order."""
    same = x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.dtype == y.dtype
    return same and all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), y.stride(), strict=True))


class _Spans:
    """Address ranges of strided views, and the search for a written one that meets another."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.owner: list[int] = []
        self.write: list[bool] = []

    def add(self, owner: int, tensor: Tensor, write: bool) -> None:
        self.tensors.append(tensor)
        self.owner.append(owner)
        self.write.append(write)

    def clash(self) -> tuple[tuple[int, bool], tuple[int, bool]] | None:
        if not self.tensors:
            return None
        begin = np.array([t.data_ptr() for t in self.tensors], dtype=np.int64)
        end = begin + np.array([_extent(t) for t in self.tensors], dtype=np.int64)
        write = np.array(self.write, dtype=bool)
        # Rows are looked at only where extents meet a written one.
        close = np.flatnonzero(_in_written_clusters(begin, end, write))
        if not len(close):
            return None
        rows = [_row_ranges(self.tensors[i]) for i in close]
        which = np.repeat(close, [len(r) for r in rows])
        starts = np.concatenate(rows)
        width = np.array([_row_bytes(t) for t in self.tensors], dtype=np.int64)[which]
        pair = _first_meeting(starts, starts + width, write[which])
        if pair is None:
            return None
        one, other = (int(which[p]) for p in pair)
        return (self.owner[one], self.write[one]), (self.owner[other], self.write[other])


def _in_written_clusters(begin: np.ndarray, end: np.ndarray, write: np.ndarray) -> np.ndarray:
    """Return a mask of the ranges that lie in a run of several overlapping ones, one of them written."""
    order = np.argsort(begin, kind="stable")
    reach = np.maximum.accumulate(end[order])
    cluster = np.concatenate([[0], np.cumsum(begin[order][1:] >= reach[:-1])])
    crowded = (np.bincount(cluster) > 1) & (np.bincount(cluster, weights=write[order]) > 0)
    mask = np.zeros(len(begin), dtype=bool)
    mask[order] = crowded[cluster]
    return mask


def _first_meeting(begin: np.ndarray, end: np.ndarray, write: np.ndarray) -> tuple[int, int] | None:
    """Return the indices of two ranges that meet, at least one of them written; None if there are none.

    Sorted by start, a range meets an earlier one if it starts before the furthest end so far: against every
    earlier range if it is written itself, against the written ones if not.
    """
    order = np.argsort(begin, kind="stable")
    begin, end, write = begin[order], end[order], write[order]
    lowest = np.iinfo(np.int64).min
    for reach_of, hit_if in ((np.ones_like(write), write), (write, np.ones_like(write))):
        reach = np.maximum.accumulate(np.where(reach_of, end, lowest))
        hits = np.flatnonzero(hit_if[1:] & (begin[1:] < reach[:-1]))
        if len(hits):
            later = int(hits[0]) + 1
            earlier = next(i for i in range(later) if reach_of[i] and end[i] > begin[later])
            return int(order[earlier]), int(order[later])
    return None


def _distinct(t: Tensor) -> bool:
    """Return True if nested strides guarantee that every element of a view has memory of its own."""
    need = 1
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1):
        if stride < need:
            return False
        need = stride * (size - 1) + need
    return True


def _extent(t: Tensor) -> int:
    return (
        (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size() if t.numel() else 0
    )


def _inner(t: Tensor) -> int | None:
    """Return the dimension along which elements are adjacent."""
    return next((d for d in reversed(range(t.dim())) if t.stride(d) == 1 or t.shape[d] == 1), None)


def _row_bytes(t: Tensor) -> int:
    inner = _inner(t)
    return t.element_size() * (1 if inner is None else t.shape[inner])


def _row_ranges(t: Tensor) -> np.ndarray:
    """Return where a view's rows of adjacent bytes start (its single elements where none are adjacent)."""
    inner = _inner(t)
    starts = np.array([t.data_ptr()], dtype=np.int64)
    for d in range(t.dim()):
        if d != inner:
            steps = np.arange(t.shape[d], dtype=np.int64) * (t.stride(d) * t.element_size())
            starts = (starts[:, None] + steps[None, :]).reshape(-1)
    return starts
