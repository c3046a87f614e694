"""MergedWeights: base + adapters as a stream of HF checkpoint tensors, merged bucket by bucket.

The training weights are read and never written. One launch fills a bucket, merged weights and plain copies alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidInput
from ..kernels.plan import ROUNDINGS
from ..kernels.segments import FLOATS, raw
from ..models.claims import Look, check_base, check_readable
from ..models.conversion import Conversion
from ..models.live import Live, check_model, live
from ..models.part import Part
from ..models.snapshot import Snapshot
from ..shards import Shard, cut
from ..shards.exchange import check_strategy
from ..shards.ranks import noted
from .buckets import BUCKET_BYTES, Bucket, Meta, Table, check_bucket_bytes, extent, lay_out, metas
from .filler import Entry, Filler, LazyParts, Source
from .window import window_of


class MergedWeights:
    """Re-iterable stream of `(name, tensor)`: every parameter and persistent buffer in HF checkpoint names and
    layouts, adapters merged, each element rounded once.

    It is what vLLM's trainer engines take as their `WeightSource`. A tensor that is yielded stays valid as long as
    somebody holds it: a buffer whose tensors are still held is not written again, and another one takes its place;
    who holds the last tensor only needs two. Consumers on a stream of their own hold the tensors until that
    stream is done with them. Models without adapters stream their weights as they are.

    `merged` refuses the model while a pass is under way, and a pass is refused inside `merged`. An iteration that will
    not be finished ends with its `close()`, or when nobody holds it any more.

    A sharded model (FSDP2, FSDP1, ZeRO-3) streams on every rank, and every rank sees every tensor whole: each merges
    what it holds, and merged shards are gathered, bucket by bucket. All ranks iterate, and to the end: every method is
    collective over them. The order of the stream is then that in which tensors become whole.

    Args:
        model: any module, with or without PEFT adapters and wrappers; all weights on one device. Or the chunks of a
            megatron-core model, as they are or in `lora_merge.megatron.Chunks`.
        bucket_bytes: size of a bucket. Two of them are in use. A tensor that is larger gets a bucket of its own, and
            both buffers are then as large as it is (`VllmSync` cuts it instead). Beside them lie, during a pass, the
            offloaded weights of one bucket, where weights are offloaded; and, twice, what one bucket needs of sharded
            adapters; `describe` says how much that is.
        dtype: of floating-point parameters as they go out; default: as they are. Buffers keep their dtype.
        rounding: "nearest" or "stochastic"; the n-th pass then draws with seed n, unless `buckets` is told otherwise.
        adapters: False streams the base weights without what the adapters add.
        strategy: None: each rank merges what it holds, and only what no shard can express is gathered first (see
            `describe`). "unshard": every parameter is gathered and merged whole; the same bits, for more bytes.

    Raises:
        InvalidInput: an argument that does not fit (at once); weights on several devices, quantised, sparse or without
            values, ranks that disagree on the model (when it is read).
        UnsupportedAdapter, AlreadyMerged: as `read_deltas`; AlreadyMerged with `adapters=False`, too.
        On a sharded model an error of one rank is raised there after the last bucket, as `InvalidInput` on the others:
        the tensors of that pass must not be used.
    """

    def __init__(
        self,
        model: Any,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
        rounding: str = "nearest",
        adapters: bool = True,
        strategy: str | None = None,
    ) -> None:
        if rounding not in ROUNDINGS:
            raise InvalidInput(f"rounding must be one of {', '.join(ROUNDINGS)}, got {rounding!r}")
        if dtype is not None and dtype not in FLOATS:
            raise InvalidInput(f"dtype must be bfloat16, float16 or float32, got {dtype}")
        if not isinstance(adapters, bool):
            raise InvalidInput(f"adapters must be True or False, got {adapters!r}; set_adapter chooses which ones act")
        check_strategy(strategy)
        check_bucket_bytes(bucket_bytes)
        check_model(model)
        self.model, self.bucket_bytes, self.dtype, self.rounding = model, bucket_bytes, dtype, rounding
        self.adapters, self.strategy = adapters, strategy
        self.keep_tied = False
        """Stream every name of a tied weight, for an engine that holds them apart."""
        self.dtypes: Mapping[str, torch.dtype] = {}
        """dtypes of single tensors, by name, before `dtype`."""
        self.left_out: frozenset[str] = frozenset()
        """Names of tensors that are not streamed, for engines that hold no such part of the model."""
        self._passes = 0
        self._fillers: dict[bool, Filler] = {}
        self._known: tuple[Any, torch.device, Conversion] | None = None
        """The key of the last reading, and what is kept of it."""

    def metadata(self) -> list[Meta]:
        """`(name, dtype, shape)` of what iteration yields, in its order; computes nothing."""
        filler = self.filler(whole=True)
        with filler.passing():
            if filler.ranks.alone:
                return [entry.meta for entry in filler.entries.values()]
            return [Meta(slot.name, slot.dtype, slot.whole) for slots in _completed(filler.table) for slot in slots]

    def filler(self, *, whole: bool = False) -> Filler:
        """The stream as it stands now: laid out, with plans that are kept as long as the model's tensors stay.

        Args:
            whole: no tensor is cut, where the model is not sharded.
        """
        model = live(self.model)
        with model.ranks.vote("MergedWeights"):
            source, key = self._read(model)
        whole = whole and model.ranks.alone
        known = self._fillers.get(whole)
        if model.ranks.any(known is None or known.key != key):
            source = replace(source, parts=model.united(source.parts))
            with model.ranks.vote("MergedWeights"):
                entries = self._entries(source.parts, source.conversion)
                lines = [f"strategy={self.strategy!r} bucket_bytes={self.bucket_bytes} rounding={self.rounding}"]
                lines += [_line(entry, source.parts) for entry in entries]
            model.ranks.same(lines, lambda: lines)
            unshard = self.strategy is not None
            with model.ranks.vote("MergedWeights"):
                known = Filler(source, entries, key, self.bucket_bytes, lines, whole=whole, unshard=unshard)
            self._fillers[whole] = known
        assert known is not None
        known.adopt(source)
        return known

    def buckets(self, *, seed: int | None = None) -> Iterator[Bucket]:
        """The stream as filled buckets of whole tensors.

        A bucket may be read until the next one is asked for; work on the current stream that was enqueued by then
        counts as done. Stopping early is fine (on all ranks of a sharded model, or on none).

        Args:
            seed: of stochastic rounding; default: the number of the pass.
        """
        filler, run = self.filler(whole=True), self._run(seed)
        with filler.buffers() as buffers:
            filled = filler.filled(buffers, run)
            if not filler.ranks.alone:
                yield from _assembled(filler.table, filled)
                return
            for index, data in filled:
                yield Bucket(index, filler.table[index], data[: extent(filler.table[index])])

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        filler, run = self.filler(whole=True), self._run(None)
        with filler.buffers() as buffers:
            if not filler.ranks.alone:
                for bucket in _assembled(filler.table, filler.filled(buffers, run)):
                    yield from bucket.tensors()
                return
            with closing(filler.handed(buffers, run)) as handed:
                for index, buffer, fill_next in handed:
                    data = filler.lend(buffer)
                    del buffer
                    for slot in filler.table[index]:
                        yield slot.name, slot.view(data)
                        fill_next()  # only now: who loops over this held a tensor of the other buffer until it got one
                    del data

    def release(self) -> None:
        """Let go of what `filler` has read of the model, unless a pass is under way; a pass does so by itself."""
        for filler in self._fillers.values():
            filler.release()

    def describe(self) -> str:
        """Which way every tensor goes, and what a pass costs, in words."""
        filler = self.filler()
        with filler.passing():
            return filler.describe()

    def _run(self, seed: int | None) -> dict[str, Any]:
        self._passes += 1
        if self.rounding == "nearest":
            return {"rounding": "nearest"}
        return {"rounding": "stochastic", "seed": self._passes if seed is None else seed}

    def _read(self, model: Live) -> tuple[Source, Any]:
        """What the stream is made from, and a key that changes whenever a plan made from it would be wrong: all that
        reading depends on. So the parts are read for a new key, and then for whoever asks for them."""
        with Look() as left:
            snapshot = model.snapshot(adapters=self.adapters)
            key = (snapshot.facts, self.keep_tied, tuple(self.dtypes.items()), self.left_out)
            held = [tensor.untyped_storage() for tensor in snapshot.tensors]
            check_readable(held)
            if not self.adapters:
                check_base(snapshot.modules)
            known = self._known
            if known is not None and known[0] == key:
                parts: Mapping[str, Part] = LazyParts(lambda: self._read_again(snapshot))
            else:
                parts = model.parts(adapters=self.adapters, keep_tied=self.keep_tied)
                devices = {part.shard.device for part in parts.values()}
                empty = [part.name for part in parts.values() if part.shard.device.type == "meta"]
                if empty and len(devices) > 1:
                    raise InvalidInput(
                        f"{empty[0]}: a meta tensor, which holds no values, beside others that do (loaded in part, or "
                        "offloaded by accelerate); load it first"
                    )
                if len(devices) > 1 and not model.sharded:
                    raise InvalidInput(f"all weights must be on one device, got {', '.join(sorted(map(str, devices)))}")
                device = model.device or next(iter(devices), torch.device("cpu"))
                known = key, device, model.conversion()
            check_readable(held, left)
        self._known = key, device, conversion = known
        return Source(parts, snapshot.tensors, held, model.ranks, model.merging, device, conversion), key

    def _read_again(self, snapshot: Snapshot) -> Mapping[str, Part]:
        model = live(self.model)
        with Look() as left:
            now = model.snapshot(adapters=self.adapters)
            if now.facts != snapshot.facts:
                raise InvalidInput("the model was changed while it was being streamed: finish the pass first")
            parts = model.parts(adapters=self.adapters, keep_tied=self.keep_tied)
            check_readable([tensor.untyped_storage() for tensor in now.tensors], left)
        return parts

    def _entries(self, parts: Mapping[str, Part], conversion: Conversion) -> list[Entry]:
        shapes = {name: _meta(part.shard) for name, part in parts.items()}
        entries = []
        outputs = conversion.outputs(shapes)
        named = {(made.sources, made.view): made.name for made in outputs}
        for made in outputs:
            if made.name in self.left_out:
                continue
            first = parts[made.sources[0]]
            dtype = first.shard.dtype
            if dtype in FLOATS:
                dtype = self.dtypes.get(made.name) or (self.dtype if first.trained else None) or dtype
            meta, like = Meta(made.name, dtype, tuple(made.shape)), shapes[first.name]
            window = None if made.view is None else window_of(made.view, like.shape, like.stride())
            tied = named.get(((first.tied,), made.view), "") if len(made.sources) == 1 else ""
            entries.append(Entry(meta, made.sources, window, tied))
        return entries


def _meta(shard: Shard) -> Tensor:
    """A parameter without values; what is sharded counts as contiguous."""
    if shard.whole:
        like = shard.pieces[0].tensor
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return torch.empty(shard.shape, dtype=shard.dtype, device="meta")


def _line(entry: Entry, parts: Mapping[str, Part]) -> str:
    """What must be equal on every rank, in words."""
    meta = entry.meta
    deltas = [delta.describe() for name in entry.sources if (delta := parts[name].delta) is not None]
    return f"{meta.name} {meta.dtype} {list(meta.shape)} from {', '.join(entry.sources)} {entry.window} {deltas}"


def _completed(table: Table) -> list[tuple[Any, ...]]:
    """For each bucket the whole tensors that it completes, laid out in a buffer of their own."""
    last = {slot.name: index for index, slots in enumerate(table) for slot in slots}
    groups: list[list[Meta]] = [[] for _ in table]
    for meta in metas(table).values():
        groups[last[meta.name]].append(meta)
    return [lay_out(group, 1 << 62)[0] if group else () for group in groups]


def _assembled(table: Table, filled: Iterator[tuple[int, Tensor]]) -> Iterator[Bucket]:
    """Buckets of whole tensors out of buckets of boxes."""
    groups = _completed(table)
    where = {slot.name: (index, slot) for index, slots in enumerate(groups) for slot in slots}
    begun: dict[int, Tensor] = {}
    errors: list[Exception] = []
    for index, data in filled:  # to the end, where the other ranks wait for this one
        with noted(errors):
            to, source = [], []
            for slot in table[index]:
                group, place = where[slot.name]
                if group not in begun:
                    begun[group] = torch.empty(extent(groups[group]), dtype=torch.uint8, device=data.device)
                to.append(cut(place.view(begun[group]), slot.box))
                source.append(slot.view(data))
            torch._foreach_copy_([raw(t) for t in to], [raw(t) for t in source])
        if groups[index] and not errors:
            yield Bucket(index, groups[index], begun.pop(index))
    if errors:
        raise errors[0]
