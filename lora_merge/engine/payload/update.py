"""What training has changed since the base, for engines that merge by themselves: factors of adapters, and tensors that
are trained whole.

An engine that holds the base gets lora_A and lora_B as they are, the factors of DoRA's rows, and every tensor that is
no base weight plus a product: what training changes itself (`modules_to_save`, biases), buffers, and what only the
trainer can convert to the checkpoint's layout, merged there. Its workers add the products to their own slices with the
kernel that the trainer would have used, so the bits are those of a merge in the trainer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

from torch import Tensor

from ...errors import PushRefused
from ...kernels.plan import Plan
from ...kernels.segments import copies
from ...models.brought import brought
from ...models.conversion import TRAIN_AS_ONE
from ...models.delta import Delta
from ...models.live import live
from ...models.part import Learning, Part
from ...stream.bucket_writer import BucketWriter
from ...stream.buckets import ALIGNMENT, Meta, Table, contents_of, dtype_name, extent, lay_out, to_json
from ...stream.source import Entry
from ...stream.weights import MergedWeights
from ...stream.window import Window
from ..transport.routing import Route, WorkerId
from .base import BucketPayload, Terms, WireSpecs, WorkerOp
from .factors import GatheredFactors, slots_of
from .recipients import Recipients, shares_of


class SidePayload(BucketPayload):
    """What workers need beside a base that they can read, as buckets: adapters' factors first, then whole tensors.

    Args:
        adapted: the stream of the model with its adapters; its settings are those that fit the engines.
        whole: the stream of the tensors that go whole; None where there are none.
        base: digest of what is in the table of the base (`contents_of`); "" where the base is read with it.
        straight: of the adapted stream, by name, what the engine makes of boxes of parameters and factors.
        recipients: which workers take which tensors; None where all take all.
        read: of factors, by name: which of them workers read where they lie; they go in no bucket. The same on every
            rank. None: all go in buckets.

    Attributes:
        recipients: of buckets that not all workers take: who does.
        device: on which buckets are filled; may be set to another one than the model's.
        spec: what workers have to know to merge it, as JSON values, but for the scalings.
        scalings: of each adapter of each delta.
        digest: of `spec`.
        changed: names of the tensors that it changes.
        whole_names: those of them that go whole.
    """

    def __init__(
        self,
        adapted: BucketWriter,
        whole: BucketWriter | None,
        base: str,
        straight: Mapping[str, Entry],
        bucket_bytes: int,
        recipients: Recipients | None = None,
        read: Callable[[Mapping[str, Tensor]], Container[str]] | None = None,
    ) -> None:
        super().__init__(adapted.device, not adapted.source.ranks.alone)
        self._adapted, self.whole = adapted, whole
        parts = adapted.source.parts
        self.whole_names = frozenset(() if whole is None else whole.entries)
        # Number the deltas; tensors of one parameter share one.
        numbers: dict[int, int] = {}
        deltas: list[Delta] = []
        self._parts: list[str] = []
        merged = {name: delta for name, e in straight.items() if (delta := parts[e.sources[0]].delta) is not None}
        for name, delta in merged.items():
            if numbers.setdefault(id(delta), len(deltas)) == len(deltas):
                deltas.append(delta)
                self._parts.append(straight[name].sources[0])
        self.scalings = [[f.scaling for f in delta.factors] for delta in deltas]
        self._fresh = False
        # Who takes what of them, and which factors workers read where they lie: these go in no bucket.
        windows = ((name, numbers[id(delta)], _box(straight[name])) for name, delta in merged.items())
        self._shares = shares_of(deltas, windows, recipients)
        self._factors: GatheredFactors | None = None
        there: list[str] = []
        known = list(slots_of(deltas, self._shares))
        if read is not None:
            found = read(self._gathered().tensors)
            there = [meta.name for _, meta in known if meta.name in found]
        # Lay out the others, in buckets of their own for each set of workers.
        groups: dict[frozenset[WorkerId] | None, list[Meta]] = {}
        for them, meta in known:
            if meta.name not in there:
                groups.setdefault(them, []).append(meta)
        self._plans: dict[int, tuple[int, Plan]] = {}
        laid = {them: lay_out(metas, max(bucket_bytes, ALIGNMENT)) for them, metas in groups.items()}
        factors = tuple(slots for table in laid.values() for slots in table)
        who = [them for them, table in laid.items() for _ in table]
        self.recipients = {index: them for index, them in enumerate(who) if them is not None}
        self._count = len(factors)
        self.table: Table = (*factors, *(() if whole is None else whole.table))
        self.capacity = max([extent(slots) for slots in factors] + [0 if whole is None else whole.capacity])
        self.changed = self.whole_names.union(straight)
        self.spec: dict[str, Any] = {
            "base": base,
            "slots": to_json(self.table),
            "factors": self._count,
            "there": there,
            "deltas": [_described(delta) for delta in deltas],
            "shares": [[share.number, share.first, share.many] for share in self._shares],
            "tensors": [[name, numbers[id(delta)]] for name, delta in merged.items()],
            "windows": [[name, *_window(entry)] for name, entry in straight.items()],
        }
        self.digest = hashlib.blake2b(json.dumps(self.spec).encode(), digest_size=16).hexdigest()

    def _deltas(self) -> list[Delta]:
        # Read each time: a delta holds its weight, and a model's weights are not held between pushes.
        deltas = [self._adapted.source.parts[name].delta for name in self._parts]
        return [delta for delta in deltas if delta is not None]

    def _gathered(self, workers: Container[WorkerId] | None = None) -> GatheredFactors:
        """Return the factors on this rank; the first call lays them out and is collective.

        Args:
            workers: whose shares are gathered here then; None for all.
        """
        if self._factors is None:
            ranks = self._adapted.source.ranks
            self._factors = GatheredFactors(self._deltas(), self._shares, workers, ranks, self.device)
        return self._factors

    def alone(self, index: int) -> bool:
        return not self.collective or 0 < index < self._count  # the factors are gathered with the first bucket

    def fill(self, index: int, buffer: Tensor, run: Mapping[str, Any]) -> None:
        # Ranks that share a model do so together, with the first bucket, which all of them fill. Another one may begin
        # with any: nobody whom it serves takes those before.
        if index == 0 or (not self.collective and not self._fresh):
            self._refresh()
            self._fresh = True
        if index >= self._count:
            assert self.whole is not None
            here = buffer.to(self.whole.device)  # the buffer itself, unless `device` was set to another one
            self.whole.fill(index - self._count, here, run)
            if here is not buffer:
                buffer.copy_(here)
            return
        gathered = self._gathered()
        if not gathered.for_some_of(self.recipients.get(index)):
            return  # it is filled for the sake of other ranks
        at, plan = self._plans.get(index, (0, None))
        if plan is None or at != buffer.data_ptr():
            sources = [(slot, gathered.tensors[slot.name]) for slot in self.table[index]]
            plan = Plan([part for slot, s in sources for part in copies(slot.name, s, slot.view(buffer).view(s.shape))])
            plan.release()  # the buffer is its owner's; its address is compared above
            self._plans[index] = buffer.data_ptr(), plan
        plan.run()

    def _refresh(self) -> None:
        """Read the factors as the live adapters have them now."""
        self._gathered().refresh(self._adapted.storages)

    @contextmanager
    def passing(self) -> Iterator[None]:
        self._fresh = False
        with ExitStack() as stack:
            for writer in (self._adapted, self.whole):
                if writer is not None:
                    stack.enter_context(writer.passing())
            try:
                yield
            finally:
                if self._factors is not None:
                    self._factors.release()


class UpdatePayload(SidePayload):
    """What training has changed since the base that an engine holds.

    Attributes:
        staged: see `Payload`; may be set.
    """

    writes = False  # before `merge`
    merges = True
    _served: Mapping[WorkerId, int] | None = None

    def transfer_op(self, terms: Terms, route: Route, comes: WireSpecs | None) -> WorkerOp | None:
        op = "stage_update" if self.staged else "receive_update"
        return WorkerOp(op, {"digest": self.digest, "scalings": self.scalings, "comes": comes})

    def serves(self, served: Mapping[WorkerId, int] | None) -> bool:
        return self._factors is not None and served == self._served

    def serve(self, served: Mapping[WorkerId, int] | None, rank: int) -> None:
        self.forget()
        self._gathered(None if served is None else {place for place, by in served.items() if by == rank})
        self._served = served

    def forget(self) -> None:
        self._factors, self._plans = None, {}

    @cached_property
    def separate(self) -> bool:  # type: ignore[override]
        sizes = [sum(slot.nbytes for slot in slots) for slots in self.table]
        own = sum(size * len(self.recipients[index]) for index, size in enumerate(sizes) if index in self.recipients)
        workers = frozenset().union(*self.recipients.values())
        return own > len(workers) * sum(size for index, size in enumerate(sizes) if index not in self.recipients)


def converted(adapted: BucketWriter) -> list[str]:
    """Return the names of the tensors that adapters change and that go whole, as only a conversion of the base's values
    makes them."""
    parts = adapted.source.parts
    return [
        name
        for name, entry in adapted.entries.items()
        if not _by_factors(entry, parts) and any(parts[source].delta for source in entry.sources)
    ]


def _by_factors(entry: Entry, parts: Mapping[str, Part]) -> bool:
    """Return True if a tensor of the stream is a box of one parameter that an adapter adds to. With replaced rows it
    goes whole."""
    delta = parts[entry.sources[0]].delta
    return entry.window is not None and delta is not None and not delta.rows


def _box(entry: Entry) -> Window:
    assert entry.window is not None
    return entry.window


def _check(straight: Mapping[str, Entry], parts: Mapping[str, Part], instead: str) -> None:
    """Raise `PushRefused` where a merge in the engine would not have the bits of one in the trainer."""
    for name, entry in straight.items():
        dtype = parts[entry.sources[0]].shard.dtype
        if dtype != entry.meta.dtype:
            raise PushRefused(
                f"{name} is {dtype} here and {entry.meta.dtype} in the engine: merged there it would be rounded twice; "
                f"start the engine with the dtype of the base, or {instead}"
            )


def _window(entry: Entry) -> list[Any]:
    window = _box(entry)
    return [list(window.start), list(window.size), list(window.dims)]


def _described(delta: Delta) -> dict[str, Any]:
    return {
        "name": delta.name,
        "shape": list(delta.weight.shape),
        "dtype": dtype_name(delta.weight.dtype),
        "experts": delta.experts,
        "transposed": delta.transposed,
        "adapters": len(delta.factors),
        "row_scale": delta.magnitude is not None,
    }


class UpdateBuilder:
    """Makes the update of a model; kept while the model stays what it was.

    Args:
        weights: the stream of the model.
        trains: whether the model trains, so that buffers move. Else it is an adapter from a folder.
    """

    def __init__(self, weights: MergedWeights, *, trains: bool = True) -> None:
        self._trains = trains
        serve = "merge it with PEFT, and start an engine on that"
        self.instead = 'let the trainer merge (merge="trainer")' if trains else serve
        self._adapted, self._whole = weights.beside(), weights.beside()
        self._adapted.as_it_lies = self._whole.as_it_lies = False
        self._learning = Learning(())
        self._known: tuple[BucketWriter, Any, UpdatePayload] | None = None

    def __call__(self, weights: MergedWeights, base: BucketWriter, recipients: Recipients) -> UpdatePayload:
        """Return the update of the model as it is now. Collective over the ranks of the model.

        Args:
            weights: the stream of the base, with the settings with which it fits the engines.
            recipients: which workers take which tensors of it.

        Raises:
            PushRefused: only the trainer can merge this; says why.
        """
        for stream in (self._adapted, self._whole):
            stream.keep_tied, stream.dtypes = weights.keep_tied, weights.dtypes
            stream.renames = weights.renames
        self._adapted.left_out = weights.left_out
        adapted = self._adapted.bucket_writer()
        moved = self._learning.moved
        known, key = self._known, (base.digest, recipients.key)
        whole = None if known is None or known[2].whole is None else self._whole.bucket_writer()
        fresh = known is None or known[0] is not adapted or known[1] != key or known[2].whole is not whole
        if adapted.ranks.any(fresh or moved):
            known = self._known = adapted, key, self._made(adapted, base, recipients)
        assert known is not None
        return known[2]

    def release(self) -> None:
        for stream in (self._adapted, self._whole):
            stream.release()

    def _made(self, adapted: BucketWriter, base: BucketWriter, recipients: Recipients) -> UpdatePayload:
        parts = adapted.source.parts
        if not any(part.delta is not None for part in parts.values()):
            raise PushRefused(f"the model has no active adapter, so an engine has nothing to merge; {self.instead}")
        if others := adapted.entries.keys() ^ base.entries.keys():
            raise PushRefused(
                f"an adapter changes tied tensors apart ({', '.join(sorted(others))}), and the base that an engine "
                f"holds has one for all: {self.instead}, or {TRAIN_AS_ONE}"
            )
        for name, entry in adapted.entries.items():
            if entry.meta != (bare := base.entries[name].meta):
                raise PushRefused(
                    f"{name}: {entry.meta.dtype} {list(entry.meta.shape)} with adapters, {bare.dtype} "
                    f"{list(bare.shape)} without: {self.instead}"
                )
        model = live(self._adapted.model)
        self._learning = Learning((module for _, module in model.modules()), brought(self._adapted.model))
        learning = self._learning.names(parts, adapted.ranks, buffers=self._trains)
        trained = {name for name, entry in adapted.entries.items() if not learning.isdisjoint(entry.sources)}
        whole = frozenset(trained.union(converted(adapted)))
        self._whole.left_out = frozenset(adapted.entries) - whole | self._adapted.left_out
        whole_writer = self._whole.bucket_writer() if whole else None
        straight = {
            name: entry for name, entry in adapted.entries.items() if name not in whole and _by_factors(entry, parts)
        }
        _check(straight, parts, self.instead)
        contents = contents_of(base.table)
        return UpdatePayload(adapted, whole_writer, contents, straight, self._adapted.bucket_bytes, recipients)
