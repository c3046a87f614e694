"""The stream of HF tensors out of what the ranks hold: which box of which parameter lands in which slot of a bucket,
and how buckets are filled, one launch each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import groupby
from operator import sub
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

from ..errors import InvalidInput
from ..inference import outside_inference_mode
from ..kernels.packed import Packed, in_reach
from ..kernels.ranges import check_range, narrows, run_in_range
from ..kernels.segments import copies, name_key
from ..models.claims import reading
from ..models.delta import Job, whole_job
from ..models.operands import Operands, Turn, merge_plan
from ..models.part import Part
from ..models.staging import needed
from ..shards import Box, cut, overlap
from ..shards.exchange import Exchange
from ..shards.owners import divide
from ..shards.ranks import noted, uninterrupted
from .bucket_plans import BucketPlans
from .buckets import Meta, Slot, Table, digest_of, extent, lay_out, lay_out_in_order, lay_out_parts
from .direct_targets import DirectTargets
from .double_buffer import DoubleBuffer, Reads
from .source import Entry, LazyParts, Source
from .unwritten import Unwritten, layers_of


class BucketWriter:
    """Writes the buckets of a stream into buffers, with one plan for each bucket, made at its first use.

    Making one, and filling, are collective over `source.ranks`.

    Args:
        source: what the stream is laid out from.
        entries: the stream, the same on every rank.
        key: see `MergedWeights._read`.
        bucket_bytes: see `MergedWeights`.
        lines: the stream in words.
        whole: tensors become whole in the order of the entries; where this process holds the model alone, they are not
            cut, whatever their size.
        unshard: entries whose parts are gathered, merged whole, and cut.

    Attributes:
        source: of the last `adopt`, until `release`. Passes in several threads have one each, which they hand to
            `passing`, `filled` and `fill`.
    """

    def __init__(
        self,
        source: Source,
        entries: Sequence[Entry],
        key: Any,
        bucket_bytes: int,
        lines: Sequence[str],
        *,
        whole: bool,
        unshard: bool,
    ) -> None:
        self.source, self.key, self.ranks, self.device = source, key, source.ranks, source.device
        self.lines, self.lines_key = lines, name_key("\n".join(lines))
        self.entries = {entry.meta.name: entry for entry in entries}
        self.ties = {entry.meta.name: entry.tied for entry in entries if entry.tied}
        """Name -> name of the tensor here that is the same one."""
        self._elsewhere = {name: part for name, part in source.parts.items() if not part.shard.pieces}
        self._order, self._layers = tuple(source.parts), layers_of(source)
        self._narrow = frozenset(entry.meta.name for entry in entries if _narrow(entry, source.parts))
        self._wholly = {name for name, entry in self.entries.items() if entry.window is None or unshard}
        self.table, self._sizes = self._lay_out(source, bucket_bytes, whole)
        self.capacity = max(map(sum, self._sizes), default=0)
        """Bytes of a buffer that any bucket fits into."""
        self._wholly_in = [dict.fromkeys(s.name for s in slots if s.name in self._wholly) for slots in self.table]
        self.digest = digest_of(self.table)
        """Under which name an engine knows the table."""
        self.collective = self.shared = not self.ranks.alone
        self._uninterrupted = uninterrupted(self.collective)
        self.recipients: Mapping[int, frozenset[tuple[int, int]]] = {}
        with self.ranks.vote("MergedWeights"):
            turns, staged = self._turns(), self._staged()
        ranks = self.ranks if any(turn.everything for turn in turns) else source.merging
        self.operands = Operands(turns, ranks, self.device)
        self._plans = BucketPlans(self.entries, self.operands, self.device, staged)
        self.joins = self.ranks.alone and not staged and not self.operands.held
        """True if all inputs of every bucket are local and resident."""
        self._due: tuple[ref[DirectTargets], list[list[tuple[int, Slot]]]] | None = None
        self._ahead = DoubleBuffer(self.device)
        self._filling = threading.Lock()
        """Of passes in several threads, which share the operands of a bucket, one fills at a time."""
        self._lent: dict[int, StorageWeakRef] = {}
        self._idle: list[Tensor] = []
        self._passes = 0
        self._lock = threading.RLock()
        """Of the buffers that are idle, the number of passes, and `release`: the last pass alone releases. An iterator
        that is collected as garbage may end its pass in the middle of these."""

    def adopt(self, source: Source) -> Source:
        """Return what this rank holds now, for a pass; parts of which it holds nothing stay as they were."""
        order, elsewhere = self._order, self._elsewhere
        parts = LazyParts(lambda: {name: source.parts.get(name) or elsewhere[name] for name in order})
        self.source = adopted = replace(source, parts=parts)
        return adopted

    def _lay_out(self, source: Source, bucket_bytes: int, whole: bool) -> tuple[Table, tuple[tuple[int, ...], ...]]:
        """Return the table, and the bytes of each rank's part in each bucket."""
        if whole and self.ranks.alone:
            table = lay_out([entry.meta for entry in self.entries.values()], bucket_bytes)
            return table, tuple((extent(slots),) for slots in table)
        boxes = self._boxes(source)
        return lay_out_in_order(boxes, self.entries, bucket_bytes) if whole else lay_out_parts(boxes, bucket_bytes)

    def _boxes(self, source: Source) -> list[list[tuple[Meta, Box]]]:
        """Return what each rank sends: of every tensor, the boxes that it owns."""
        direct = dict.fromkeys(e.sources[0] for e in self.entries.values() if e.meta.name not in self._wholly)
        names = [name for name in source.parts if name in direct]
        owned = dict(zip(names, divide(names, [source.parts[n].shard for n in names], self.ranks), strict=True))
        sent: list[list[tuple[Meta, Box]]] = [[] for _ in range(self.ranks.size)]
        for turn, entry in enumerate(self.entries.values()):
            if entry.meta.name in self._wholly:
                box = ((0,) * len(entry.meta.shape), entry.meta.shape)
                sent[turn % self.ranks.size].append((entry.meta, box))
                continue
            assert entry.window is not None
            for rank, boxes in enumerate(owned[entry.sources[0]]):
                met = [found for box in boxes if (found := overlap(box, entry.window.box)) is not None]
                sent[rank] += [(entry.meta, entry.window.inner(box)) for box in met]
        return sent

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the stream."""
        return sum(entry.meta.nbytes for entry in self.entries.values())

    def alone(self, index: int) -> bool:
        """See `Sent.alone`."""
        return not self.collective

    def mine(self, index: int) -> list[Slot]:
        """Return the slots of a bucket that this rank fills."""
        begin = sum(self._sizes[index][: self.ranks.rank])
        end = begin + self._sizes[index][self.ranks.rank]
        return [slot for slot in self.table[index] if begin <= slot.offset < end]

    def _turns(self) -> list[Turn]:
        """Return what merging needs of the adapters, bucket by bucket: all of an adapter for what is merged whole."""
        parts, turns = self.source.parts, []
        for index, slots in enumerate(self.table):
            entries = {slot.name: self.entries[slot.name] for slot in slots}
            named = {part: parts[part].delta for entry in entries.values() for part in entry.sources}
            wholly = {part for name in self._wholly_in[index] for part in entries[name].sources}
            deltas = {part: delta for part, delta in named.items() if delta is not None}
            jobs = [
                Job(delta, start, view, view)
                for slot in self.mine(index)
                if slot.name not in self._wholly and (delta := deltas.get(entries[slot.name].sources[0])) is not None
                for start, _, view in self.source.views(entries[slot.name], slot.box)
            ]
            everything = {delta.name for part, delta in deltas.items() if part in wholly}
            turns.append(Turn(list(deltas.values()), jobs, everything))
        return turns

    def _staged(self) -> int:
        """Return the bytes of weights that are brought for the largest bucket of this rank."""
        pieces = (piece for part in self.source.parts.values() for piece in part.shard.pieces)
        if all(in_reach(piece.tensor, self.device) for piece in pieces):
            return 0
        for part in self.source.parts.values():
            if part.shard.device != self.device and any(isinstance(p.tensor, Packed) for p in part.shard.pieces):
                raise InvalidInput(
                    f"{part.name}: a quantised weight that is offloaded to {part.shard.device} cannot be merged on "
                    f"{self.device}: keep it on {self.device} while the stream is read (no CPU offloading of the base)"
                )
        own = ([slot for slot in self.mine(index) if slot.name not in self._wholly] for index in range(len(self.table)))
        views = ([view for s in slots for _, view in self.held(s.name, s.box)] for slots in own)
        return max((sum(needed(v) for v in some if not in_reach(v, self.device)) for some in views), default=0)

    def held(self, name: str, box: Box) -> list[tuple[tuple[int, ...], Tensor]]:
        """Return the live parameter's views that make up a box of a tensor, each with its start in the parameter."""
        return [(start, view) for start, _, view in self.source.views(self.entries[name], box)]

    def storages(self) -> Mapping[int, torch.UntypedStorage]:
        """Return the memory of the model by address."""
        return self.source.storages

    def windows(self) -> list[str]:
        """Return the names of the tensors of which each rank sends boxes of parameters, as it holds them."""
        return [name for name in self.entries if name not in self._wholly]

    @contextmanager
    def buffers(self, source: Source | None = None) -> Iterator[list[Tensor]]:
        """Begin a pass, like `passing`, with two buffers that any bucket fits into. They are kept for the next one."""
        with self._lock:
            buffers, self._idle = self._idle, []
        if not buffers:
            with self.ranks.vote("two buckets"):
                buffers = [room(self.capacity, self.device) for _ in range(2)]
        with self.passing(source):
            try:
                yield buffers
            finally:
                self._idle = buffers

    @contextmanager
    def passing(self, source: Source | None = None) -> Iterator[None]:
        """Begin a pass into any buffers, which ends with the block. After the last one plans are kept, but no tensor of
        the model: what its owner lets go of between passes is freed.

        Args:
            source: of the pass; default: the last one that was adopted.

        Raises:
            AlreadyMerged: the weights are inside `merged`.
            InvalidInput: what the pass reads was written meanwhile; of sharded models `handed` raises it, on all ranks.
        """
        source = source or self.source
        with self._lock:
            self._passes += 1
        try:
            with reading(source.held, source.reader):
                read = Unwritten(source, self._layers) if self.ranks.alone else None
                yield
                if read is not None:
                    read.check()
        finally:
            with self._lock:
                self._passes -= 1
                self.release()

    def release(self) -> None:
        """Release plans and the model, like `Plan.release`, unless a pass is under way."""
        with self._lock:
            if self._passes:
                return
            self.operands.release()
            self._plans.release()
            self.source = replace(self.source, parts={}, tensors=(), counted=(), modules=(), held=())

    def filled(
        self, buffers: list[Tensor], run: Mapping[str, Any], source: Source | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Fill bucket after bucket; yield `(index, buffer)`, to be read as `DoubleBuffer` says.

        Args:
            buffers: two; one of which the consumer still holds what was lent is left to it and replaced here.
            source: see `passing`.

        Raises:
            the first error of this rank, when the others have what they wait for; InvalidInput, after the last bucket,
            for an error of another rank: what it had its part in is not to be used.
        """
        with closing(self.handed(buffers, run, source)) as handed:
            for index, buffer, fill_next, _ in handed:
                fill_next()
                yield index, buffer

    def handed(
        self, buffers: list[Tensor], run: Mapping[str, Any], source: Source | None = None
    ) -> Generator[tuple[int, Tensor, Callable[[], None], Reads], None, None]:
        """Fill like `filled`, but the consumer says when the next bucket is filled, and on which streams it reads, as
        `DoubleBuffer.handed` says."""
        errors: list[Exception] = []
        pass_source = source or self.source
        read = None if self.ranks.alone else Unwritten(pass_source, self._layers)

        def free(index: int) -> None:
            buffer = buffers[index % 2]
            if self._held_outside(buffer):
                with self._filling:
                    self._plans.forget(buffer.data_ptr())
                buffers[index % 2] = room(buffer.numel(), buffer.device)

        def fill(index: int) -> tuple[int, Tensor]:
            buffer = buffers[index % 2]
            with noted(errors):
                self.fill(index, buffer, run, pass_source)
            if errors and self.ranks.alone:
                raise errors[0]
            if self._ahead.stream is not None:
                buffer.record_stream(self._ahead.stream)
            return index, buffer

        with closing(self._ahead.handed(free, fill, len(self.table))) as handed:
            for (index, buffer), fill_next, reads in handed:
                if not errors:
                    yield index, buffer, fill_next, reads
        with self.ranks.vote("a pass over the weights"):
            if errors:
                raise errors[0]
            if read is not None:
                read.check()

    def lend(self, buffer: Tensor) -> Tensor:
        """Return a buffer's memory under a storage of its own, which lives as long as somebody holds views of it."""
        data = from_dlpack(buffer)
        self._lent[buffer.data_ptr()] = StorageWeakRef(data.untyped_storage())
        return data

    def _held_outside(self, buffer: Tensor) -> bool:
        """Return True if somebody holds views of what was lent of a buffer."""
        lent = self._lent.get(buffer.data_ptr())
        return lent is not None and not lent.expired()

    @outside_inference_mode
    def fill(self, index: int, buffer: Tensor, run: Mapping[str, Any], source: Source | None = None) -> None:
        """Fill a bucket, see `Sent.fill`; `source` as in `passing`. An error of this rank, and an interrupt, is raised
        after the bucket's collectives."""
        errors: list[BaseException] = []
        source = source or self.source
        with self._filling, self._uninterrupted():  # one rank alone may be
            with noted(errors, BaseException):
                self.operands.refresh(index, lambda: source.storages)
                own = [slot for slot in self.mine(index) if slot.name not in self._wholly]
                targets = ((slot.name, slot.box, slot.view(buffer), index) for slot in own)
                if not self._plans.of(source, (index, False), buffer.data_ptr(), targets).run(run):
                    narrow = [slot for slot in own if slot.name in self._narrow]
                    written = ((slot.name, slot.box, slot.view(buffer), index) for slot in narrow)
                    results = ((slot.name, slot.view(buffer)) for slot in narrow)
                    check_range(results, lambda: source.made(self.entries, written))
            if self._wholly_in[index]:
                self._fill_wholly(source, index, buffer, run, errors)
            self._together(index, buffer)
        if errors:
            raise errors[0]

    def _together(self, index: int, buffer: Tensor) -> None:
        """Bring the ranks' parts of a bucket together."""
        self.ranks.all_gather_parts(buffer, self._sizes[index])()

    def direct_buckets(self, names: Container[str]) -> frozenset[int]:
        """Return the buckets whose tensors all have a place and are windows of what the ranks hold; see
        `Sent.direct_buckets`."""
        return frozenset(
            index
            for index, slots in enumerate(self.table)
            if not self._wholly_in[index] and all(slot.name in names for slot in slots)
        )

    @outside_inference_mode
    def write_direct(self, index: int, targets: DirectTargets, run: Mapping[str, Any]) -> None:
        """Write a bucket, see `Sent.write_direct`. An error of this rank is raised after the collectives of the
        bucket."""
        source = self.source
        with self._filling, self._uninterrupted():
            self.operands.refresh(index, lambda: source.storages)
            places = self._targets(index, targets)
            plan = self._plans.of(source, (index, True), ref(targets), places, targets.scaled)
            if plan.run(run):
                return
            if narrow := self._narrow | targets.narrow:
                written = [target for target in self._targets(index, targets) if target[0] in narrow]
                views = ((name, view) for name, _, view, _ in written)
                check_range(views, lambda: source.made(self.entries, written), targets.scaled)

    def _targets(self, index: int, targets: DirectTargets) -> Iterator[tuple[str, Box, Tensor, int]]:
        """Yield the `targets` of `_plan` for a bucket that is written directly."""
        return (
            (slot.name, met, cut(view, (tuple(map(sub, met[0], box[0])), met[1])), turn)
            for turn, slot in self._due_with(index, targets)
            for box, view in targets.views.get(slot.name, ())
            if (met := overlap(slot.box, box)) is not None
        )

    def _due_with(self, index: int, targets: DirectTargets) -> list[tuple[int, Slot]]:
        """Return the slots that are written with a bucket, each with its own bucket: tensors that are written as one
        come with the last of them."""
        if not targets.together:
            return [(index, slot) for slot in self.mine(index)]
        if self._due is None or self._due[0]() is not targets:
            last = {slot.name: at for at, slots in enumerate(self.table) for slot in slots}
            for some in targets.together:
                last |= dict.fromkeys(some, max(last[name] for name in some))
            due: list[list[tuple[int, Slot]]] = [[] for _ in self.table]
            for at in range(len(self.table)):
                for slot in self.mine(at):
                    due[last[slot.name] if slot.name in targets.views else at].append((at, slot))
            self._due = ref(targets), due
        return self._due[1][index]

    def _fill_wholly(
        self, source: Source, index: int, buffer: Tensor, run: Mapping[str, Any], errors: list[BaseException]
    ) -> None:
        """Gather whole parameters, merge and convert them, and keep what this rank sends of the result."""
        mine = self.mine(index)
        for sources, names in groupby(self._wholly_in[index], lambda name: self.entries[name].sources):
            dtype = self.entries[next(iter(names))].meta.dtype
            with noted(errors, BaseException):
                parts = [source.parts[name] for name in sources]
                wholes = Exchange(sources, [part.shard for part in parts], self.ranks, self.device).run()
                wanted = [slot for slot in mine if self.entries[slot.name].sources == sources]
                merged = self._merged(index, parts, wholes, dtype, run) if wanted else {}
                for slot in wanted:
                    entry = self.entries[slot.name]
                    if entry.window is None:
                        made = source.conversion.compute(merged, entry.made)
                    else:
                        made = entry.window.fold(cut(merged[sources[0]], entry.window.box))
                    slot.view(buffer).copy_(cut(made, slot.box))

    def _merged(
        self, index: int, parts: Sequence[Part], wholes: Sequence[Tensor], dtype: torch.dtype, run: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Merge the whole parameters of one bucket; return them by name."""
        merged = {}
        for part, whole in zip(parts, wholes, strict=True):
            merged[part.name] = out = torch.empty(whole.shape, dtype=dtype, device=self.device)
            jobs = [] if part.delta is None else [whole_job(part.delta, whole, out)]
            segments = copies(part.name, whole, out) if part.delta is None else []
            run_in_range(merge_plan(jobs, self.operands, segments, index), run)
        return merged


def _narrow(entry: Entry, parts: Mapping[str, Part]) -> bool:
    """Return True if an entry's merged values can be infinite where what they are made of is not."""
    some = [parts[name] for name in entry.sources]
    return any(narrows(part.shard.dtype, entry.meta.dtype, part.delta is not None) for part in some)


@outside_inference_mode
def room(nbytes: int, device: torch.device) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)
