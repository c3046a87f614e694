"""MergedWeights: base + adapters as a stream of HF checkpoint tensors, merged bucket by bucket.

The training weights are read and never written. One launch fills a bucket, merged weights and plain copies alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

from .buckets import Bucket, Meta, Slot, Table, capacity, digest_of, extent, lay_out
from .conversion import Conversion, read_conversion
from .delta import Delta, MergePlan, Operands, segments_for
from .errors import InvalidInput
from .lora import read_deltas
from .names import NamedTensor, named_tensors
from .plan import ROUNDINGS
from .segments import FLOATS, Segment
from .shards.layout import Layout

BUCKET_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One tensor of the stream and what it is made of.

    Args:
        meta: what goes out.
        parts: the parameters that it comes from; one, except where a conversion joins several.
        deltas: what the active adapters add to each of them; None where they add nothing.
        view: `(offset, shape, stride)` of the tensor in its parameter; None where the conversion has to be computed.
        conversion: computes it.
    """

    meta: Meta
    parts: tuple[NamedTensor, ...]
    deltas: tuple[Delta | None, ...]
    view: tuple[int, torch.Size, tuple[int, ...]] | None
    conversion: Conversion


class MergedWeights:
    """Re-iterable stream of `(name, tensor)`: every parameter and persistent buffer in HF checkpoint names and
    layouts, adapters merged, each element rounded once.

    It is what vLLM's trainer engines take as their `WeightSource`. A tensor that is yielded stays valid as long as
    somebody holds it: a buffer whose tensors are still held is not written again. Consumers on a stream of their own
    hold the tensors until that stream is done with them. Models without adapters stream their weights as they are.

    Args:
        model: any module, with or without PEFT adapters and wrappers; all weights on one device.
        bucket_bytes: size of a bucket. Two of them are in use. A tensor that is larger gets a bucket of its own, and
            both buffers are then as large as it is.
        dtype: of floating-point parameters as they go out; default: as they are. Buffers keep their dtype.
        rounding: "nearest" or "stochastic"; the n-th pass then draws with seed n, unless `buckets` is told otherwise.
        adapters: False streams the base weights without what the adapters add.

    Raises:
        InvalidInput: weights on several devices, or an argument that does not fit.
        UnsupportedAdapter, AlreadyMerged: as `read_deltas`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
        rounding: str = "nearest",
        adapters: bool = True,
    ) -> None:
        if rounding not in ROUNDINGS:
            raise InvalidInput(f"rounding must be one of {', '.join(ROUNDINGS)}, got {rounding!r}")
        if dtype is not None and dtype not in FLOATS:
            raise InvalidInput(f"dtype must be bfloat16, float16 or float32, got {dtype}")
        self.model, self.bucket_bytes, self.dtype, self.rounding = model, bucket_bytes, dtype, rounding
        self.adapters = adapters
        self.keep_tied = False
        """Stream every name of a tied weight, for an engine that holds them apart."""
        self.dtypes: Mapping[str, torch.dtype] = {}
        """dtypes of single tensors, by name, before `dtype`."""
        self._passes = 0
        self._filler: Filler | None = None
        self._conversion: Conversion | None = None

    def metadata(self) -> list[Meta]:
        """`(name, dtype, shape)` of what iteration yields, in its order; computes nothing."""
        return [entry.meta for entry in self.filler().entries]

    def filler(self) -> Filler:
        """The stream as it stands now: laid out, with plans that are kept as long as the model's tensors stay."""
        entries, key = self._read()
        if self._filler is None or self._filler.key != key:
            self._filler = Filler(entries, lay_out([e.meta for e in entries], self.bucket_bytes), key)
        return self._filler

    def buckets(self, *, seed: int | None = None) -> Iterator[Bucket]:
        """The stream as filled buckets.

        A bucket may be read until the next one is asked for; work on the current stream that was enqueued by then
        counts as done. Stopping early is fine.

        Args:
            seed: of stochastic rounding; default: the number of the pass.
        """
        filler, run = self.filler(), self._run(seed)
        with filler.buffers() as buffers:
            for index, data in double_buffered(filler, buffers, run):
                yield Bucket(index, filler.table[index], data[: extent(filler.table[index])])

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        filler, run = self.filler(), self._run(None)
        with filler.buffers() as buffers:
            for index, buffer in double_buffered(filler, buffers, run, held=filler.held):
                data = filler.lend(buffer)
                del buffer
                for slot in filler.table[index]:
                    yield slot.name, slot.view(data)
                del data

    def _run(self, seed: int | None) -> dict[str, Any]:
        self._passes += 1
        if self.rounding == "nearest":
            return {"rounding": "nearest"}
        return {"rounding": "stochastic", "seed": self._passes if seed is None else seed}

    def _read(self) -> tuple[list[Entry], tuple[Any, ...]]:
        """The entries of the stream, and a key that changes whenever a plan made from them would be wrong."""
        deltas = {(id(d.owner), d.attribute, d.name): d for d in (read_deltas(self.model) if self.adapters else ())}
        tensors = [(t, deltas.get((id(t.owner), t.attribute, t.name))) for t in named_tensors(self.model)]
        tensors = _untie(tensors, self.keep_tied)
        if self._conversion is None:
            self._conversion = read_conversion(self.model)
        key = (
            tuple((t.name, *_place(t.tensor), None if d is None else d.key()) for t, d in tensors),
            tuple(self.dtypes.items()),
        )
        if self._filler is not None and self._filler.key == key:
            return self._filler.entries, key
        if Layout(self.model).sharded:
            raise InvalidInput("the model is sharded (FSDP): MergedWeights takes weights that lie whole on one device")
        devices = {t.tensor.device for t, _ in tensors}
        if len(devices) > 1:
            raise InvalidInput(f"all weights must be on one device, got {', '.join(sorted(map(str, devices)))}")
        return self._entries(tensors), key

    def _entries(self, tensors: Sequence[tuple[NamedTensor, Delta | None]]) -> list[Entry]:
        assert self._conversion is not None
        by_name = {t.name: (t, d) for t, d in tensors}
        entries = []
        for made in self._conversion.outputs({t.name: t.tensor for t, _ in tensors}):
            parts = [by_name[name] for name in made.sources]
            first = parts[0][0]
            dtype = first.tensor.dtype
            if dtype in FLOATS:
                wanted = self.dtype if isinstance(first.tensor, nn.Parameter) else None
                dtype = self.dtypes.get(made.name) or wanted or dtype
            meta = Meta(made.name, dtype, tuple(made.shape))
            entries.append(
                Entry(meta, tuple(t for t, _ in parts), tuple(d for _, d in parts), made.view, self._conversion)
            )
        return entries


class Filler:
    """Writes the buckets of a stream into buffers, with one plan for each bucket, made at its first use.

    Args:
        entries: the stream.
        table: its slots.
        key: see `MergedWeights._read`.
    """

    def __init__(self, entries: Sequence[Entry], table: Table, key: tuple[Any, ...]) -> None:
        self.entries, self.table, self.key = list(entries), table, key
        self.device = entries[0].parts[0].tensor.device if entries else torch.device("cpu")
        self.digest = digest_of(table)
        """Under which name an engine knows the table."""
        self._plans: dict[int, tuple[int, _BucketPlan]] = {}
        self._idle: list[Tensor] = []
        self._lent: dict[int, StorageWeakRef] = {}
        starts = [0]
        for slots in table:
            starts.append(starts[-1] + len(slots))
        self._bounds = list(pairwise(starts))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the stream."""
        return sum(entry.meta.nbytes for entry in self.entries)

    @contextmanager
    def buffers(self) -> Iterator[list[Tensor]]:
        """Two buffers that any bucket fits into, for one pass; kept for the next one, and its plans with them."""
        buffers, self._idle = self._idle, []
        size = capacity(self.table)
        buffers = buffers or [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        try:
            yield buffers
        finally:
            self._idle = buffers

    def lend(self, buffer: Tensor) -> Tensor:
        """A buffer's memory under a storage of its own, which lives as long as somebody holds views of it."""
        data = from_dlpack(buffer)
        self._lent[buffer.data_ptr()] = StorageWeakRef(data.untyped_storage())
        return data

    def held(self, buffer: Tensor) -> bool:
        """Whether somebody holds views of what was lent of a buffer."""
        lent = self._lent.get(buffer.data_ptr())
        return lent is not None and not lent.expired()

    def fill(self, index: int, buffer: Tensor, run: Mapping[str, Any]) -> None:
        """As `Source.fill`."""
        at, plan = self._plans.get(index, (0, None))
        if plan is None or at != buffer.data_ptr():
            begin, end = self._bounds[index]
            plan = _BucketPlan(self.entries[begin:end], self.table[index], buffer)
            self._plans[index] = (buffer.data_ptr(), plan)
        plan.run(run)


class Source(Protocol):
    """What is sent: a table, and something that fills its buckets."""

    table: Table
    device: torch.device

    def fill(self, index: int, buffer: Tensor, run: Mapping[str, Any]) -> None:
        """Write bucket `index` into `buffer`, on the current stream. `run` are arguments of `Plan.run`."""


def double_buffered(
    source: Source,
    buffers: list[Tensor],
    run: Mapping[str, Any],
    *,
    held: Callable[[Tensor], bool] = lambda buffer: False,
) -> Iterator[tuple[int, Tensor]]:
    """Fill bucket after bucket, one ahead of the consumer, on a stream of its own; yield `(index, buffer)` when it may
    be read on the current stream, until the next one is asked for.

    Args:
        held: whether the consumer still needs what a buffer holds; it is then left to it and replaced in `buffers`.
    """
    cuda = source.device.type == "cuda"
    side = torch.cuda.Stream(source.device) if cuda else None
    events: list[Any] = []

    def launch(index: int) -> None:
        at = index % 2
        if held(buffers[at]):
            buffers[at] = torch.empty_like(buffers[at])
        if side is None:
            source.fill(index, buffers[at], run)
        else:
            # Everything that the caller enqueued, optimizer steps and reads of this buffer included, comes first.
            side.wait_stream(torch.cuda.current_stream(source.device))
            with torch.cuda.stream(side):
                source.fill(index, buffers[at], run)
                buffers[at].record_stream(side)
                events.append(side.record_event())

    count = len(source.table)
    if count:
        launch(0)
    for index in range(count):
        if index + 1 < count:
            launch(index + 1)
        if cuda:
            torch.cuda.current_stream(source.device).wait_event(events[index])
        yield index, buffers[index % 2]


class _BucketPlan:
    """What fills one bucket: a launch, and before it the conversions that have to be computed."""

    def __init__(self, entries: Sequence[Entry], slots: Sequence[Slot], buffer: Tensor) -> None:
        jobs: list[tuple[Delta, Tensor, Tensor]] = []
        copies: list[Segment] = []
        pieces: list[tuple[Entry, Delta, Tensor]] = []
        self._computed: list[tuple[Entry, Tensor]] = []
        for entry, slot in zip(entries, slots, strict=True):
            out, delta = slot.view(buffer), entry.deltas[0]
            if entry.view is None:
                self._computed.append((entry, out))
                continue
            source = entry.parts[0].tensor.detach()
            offset, shape, stride = entry.view
            whole = shape == source.shape and stride == source.stride()
            if delta is not None and whole:
                jobs.append((delta, source, out))
            elif delta is not None:
                pieces.append((entry, delta, out))
            else:
                copies.append(_copy(entry, source.as_strided(shape, stride, source.storage_offset() + offset), out))
        self._operands = Operands([delta for _, delta, _ in pieces])
        for (entry, delta, out), operands in zip(pieces, self._operands.factors, strict=True):
            source = entry.parts[0].tensor.detach()
            assert entry.view is not None
            wholes = segments_for(delta, operands, source, source)
            copies.append(cut(wholes, source, entry.view, out))
        self._plan = MergePlan(jobs, copies)

    def run(self, run: Mapping[str, Any]) -> None:
        for entry, out in self._computed:
            out.copy_(_compute(entry, run))
        self._operands.refresh()
        self._plan.run(**run)


def cut(
    wholes: Sequence[Segment], source: Tensor, view: tuple[int, torch.Size, tuple[int, ...]], out: Tensor
) -> Segment:
    """The segment of one expert, or of some of its rows or columns, from those of the whole parameter."""
    offset, shape, stride = view
    dims = [d for d, size in enumerate(shape) if size > 1] or [0]
    start = source.storage_offset() + offset
    for s in wholes:
        rows, cols = s.source.shape
        inside = start - s.source.storage_offset()
        row_step, col_step = s.source.stride()
        row, col = (inside // row_step, inside % row_step // col_step) if row_step >= col_step else (
            inside % col_step // row_step, inside // col_step
        )  # fmt: skip
        if inside < 0 or row >= rows or col >= cols:
            continue
        window = source.as_strided(shape, stride, start)
        if len(shape) != 2 or len(dims) > 2:
            raise InvalidInput(f"{s.name}: cannot cut a piece of shape {tuple(shape)} out of an adapted weight")
        if stride != (row_step, col_step):
            window, out = window.t(), out.t()
        if window.stride() != (row_step, col_step):
            raise InvalidInput(f"{s.name}: cannot cut strides {stride} out of an adapted weight")
        (m, n), (p0, p1) = window.shape, s.pitch or (cols, 1)
        assert s.lora_A is not None
        assert s.lora_B is not None
        return replace(
            s,
            source=window,
            destination=out,
            lora_A=s.lora_A[:, col : col + n],
            lora_B=s.lora_B[row : row + m],
            first=s.first + row * p0 + col * p1,
            pitch=(p0, p1),
        )
    raise AssertionError(f"a view at {offset} lies outside of its parameter")


def _copy(entry: Entry, source: Tensor, out: Tensor) -> Segment:
    """A plain copy, the tensor seen as a matrix."""
    if source.dim() == 2:
        return Segment(entry.meta.name, source, out)
    if not source.is_contiguous():
        raise InvalidInput(f"{entry.meta.name}: a weight of shape {tuple(source.shape)} must be contiguous")
    return Segment(entry.meta.name, source.view(1, -1), out.view(1, -1))


def _compute(entry: Entry, run: Mapping[str, Any]) -> Tensor:
    """A tensor whose conversion moves elements about in a way that no view expresses: merge its parts, convert."""
    merged = {}
    for part, delta in zip(entry.parts, entry.deltas, strict=True):
        source = part.tensor.detach()
        out = torch.empty(source.shape, dtype=entry.meta.dtype, device=source.device)
        whole = replace(entry, meta=Meta(part.name, out.dtype, tuple(out.shape)))
        plan = MergePlan([(delta, source, out)]) if delta is not None else MergePlan([], [_copy(whole, source, out)])
        plan.run(**run)
        merged[part.name] = out
    return entry.conversion.compute(merged, entry.meta.name)


def _untie(tensors: Sequence[tuple[NamedTensor, Delta | None]], keep: bool) -> list[tuple[NamedTensor, Delta | None]]:
    """Tied weights once, under their first name; but under each name where adapters differ, or where `keep` asks."""
    groups: dict[Any, list[tuple[NamedTensor, Delta | None]]] = {}
    for t, delta in tensors:
        groups.setdefault((*_place(t.tensor), t.name if t.tensor.numel() == 0 else None), []).append((t, delta))
    dropped = {
        t.name
        for group in groups.values()
        if not keep and len({None if d is None else d.key()[1:] for _, d in group}) == 1
        for t, _ in group[1:]
    }
    return [(t, delta) for t, delta in tensors if t.name not in dropped]


def _place(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype
