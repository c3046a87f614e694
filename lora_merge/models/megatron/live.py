"""The chunks of a megatron-core model as a `Live` model: who holds it together, and what the ranks tell each other.

Every rank reads its own chunks (`read.py`). Layers lie on pipeline stages and experts on expert-parallel
ranks, so no rank knows all names: the ranks tell each other, once, what each holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import InvalidInput, LoraMergeError
from ...names import innermost, trail, walk
from ...shards import Address, Shard, address
from ...shards.ranks import Ranks
from ..conversion import Conversion
from ..delta import Delta, Factors, Job, LazyList, in_place
from ..guards import Replaced, guarded, refuse_copy
from ..part import Part
from ..snapshot import Indices, Layed, Owners, Snapshot, Taking, indices_in, layouts, note, owners, some
from .adapters import layers_off
from .conversion import MegatronConversion
from .groups import Groups, ProcessGroups, groups_of, replica
from .layers import text_of
from .read import Chunks, MegatronModel, facts_of, is_megatron, read

__all__ = ["Megatron", "is_megatron"]
_replicas: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The world's process group -> the one that was made in it for this rank's replica; a new world needs a new one."""


class Megatron:
    """A `Live` Megatron model.

    Args:
        model: the list of chunks that Megatron's `get_model` returned, one chunk, or `Chunks`.

    Raises:
        InvalidInput: torch.distributed or the parallel groups of Megatron are not initialised.
    """

    def __init__(self, model: Any) -> None:
        chunks = [model] if isinstance(model, nn.Module) else model
        self._chunks = chunks if isinstance(chunks, Chunks) else Chunks(chunks)
        self.key = innermost(self._chunks.list[0])
        groups, pg = groups_of(text_of(self.key))
        self.ranks = Ranks(_replica(groups, pg))
        merging = _larger(pg.tp, pg.expert_tp)
        self.merging = self.ranks if merging is None else Ranks(merging)
        self.device: torch.device | None = None
        self.sharded, self.reader = True, None
        self._found: MegatronModel | None = None
        self._snapshots: dict[bool, Snapshot] = {}
        self._layers: list[nn.Module] = []
        self._indices: Indices | None = None
        self._off = ExitStack()

    def reshard(self) -> None:
        """Do nothing: Megatron's parameters stay where they are."""

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        for chunk in self._chunks.list:
            yield from walk(chunk)

    def snapshot(self, *, adapters: bool = True) -> Snapshot:
        if adapters not in self._snapshots:
            c = self._chunks
            # The function that names parameters is kept, not its `id`: another one may stand for other names.
            taking = Taking()
            taking.taken.facts.extend((c.vocab_size, c.names))
            for chunk in c.list:
                for seen in trail(chunk):
                    taking.add(seen)
            found = taking.done()
            try:
                others, halves = facts_of(c.list, found.modules, adapters=adapters)
            except LoraMergeError:
                self._read()  # says where
                raise
            found.facts.extend(others)
            if adapters and (known := indices_in(found, self.key)) is not None:
                self._indices = known
                found = found._replace(facts=known.facts)
            self._snapshots[adapters] = found._replace(tensors=[*found.tensors, *halves])
        return self._snapshots[adapters]

    def _read(self) -> MegatronModel:
        c = self._chunks
        self._found = self._found or read(c.list, vocab_size=c.vocab_size, names=c.names)
        return self._found

    def adapters(self) -> tuple[list[object], Sequence[Delta]]:
        snapshot, indices = self.snapshot(), self._indices
        if indices is not None:
            self._layers = [layer for _, numbers in indices.layers for layer in some(snapshot.modules, numbers)]
            return list(self._layers), LazyList(self._deltas)
        self._layers = list(self._read().adapters)
        return list(self._layers), self._deltas()

    def _deltas(self) -> list[Delta]:
        parts = self.parts(adapters=True, keep_tied=False).values()
        return [part.delta for part in parts if part.delta is not None]

    def parts(self, *, adapters: bool, keep_tied: bool) -> dict[str, Part]:
        found = self._read()
        parts = {}
        for name, shard in found.tensors:
            factors = found.deltas.get(name, ()) if adapters else ()
            parts[name] = Part(name, shard, Delta(name, shard, factors) if factors else None, True)
        if keep_tied and found.tied is not None and found.tied[0] in parts:
            embedding, head = found.tied
            alike = parts[embedding].delta is None
            parts[head] = Part(head, parts[embedding].shard, None, True, embedding if alike else "")
        return parts

    def united(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        numbers: dict[int, int] = {}
        by_rank = self.ranks.gather((self._read().layers, [_told(part, numbers) for part in parts.values()]))
        here = {layer for layers, _ in by_rank for layer in layers}
        lacking = sorted(set(range(self._read().layer_count)) - here)
        if lacking:
            raise InvalidInput(
                f"layers {', '.join(map(str, lacking))} of {self._read().layer_count} are on none of the ranks "
                f"{', '.join(str(self.ranks.global_rank(r)) for r in range(self.ranks.size))}; pass the chunks of "
                "every stage on every rank"
            )
        first: dict[str, tuple[int, _Told]] = {}
        united: dict[str, Part] = {}
        device = next((part.shard.device for part in parts.values()), torch.device("cpu"))
        for rank, (_, things) in enumerate(by_rank):
            factors: dict[int, Shard] = {}
            for thing in things:
                there, other = first.setdefault(thing.name, (rank, thing))
                if there == rank:
                    united[thing.name] = parts.get(thing.name) or _elsewhere(thing, factors, device)
                elif str(other) != str(thing):
                    raise InvalidInput(
                        f"{thing.name}: rank {self.ranks.global_rank(there)} has {other}, rank "
                        f"{self.ranks.global_rank(rank)} has {thing}"
                    )
        return united

    def everyones(self, deltas: Sequence[Delta]) -> list[Delta]:
        with self.ranks.vote("merged"):
            here = self.parts(adapters=True, keep_tied=False)
        parts = self.united(here)
        return [part.delta for part in parts.values() if part.delta is not None]

    def conversion(self) -> Conversion:
        return MegatronConversion()

    def weights(self, deltas: Sequence[Delta]) -> dict[Address, Tensor]:
        """Return whole parameters (whose data may be moved inside the block), also where not all of their rows are
        adapted."""
        if self._indices is not None:
            found = some(self.snapshot().parameters, self._indices.weights)
            return dict(zip(self._indices.addresses, found, strict=True))
        parameters = [self._read().parameters[delta.name] for delta in deltas if delta.weight.pieces]
        return {address(parameter): parameter for parameter in parameters}

    def layouts(self, weights: Mapping[Address, Tensor]) -> Sequence[Layed]:
        return layouts(weights.values()) if self._indices is None else self._indices.layouts

    def owners(self, weights: Mapping[Address, Tensor]) -> Owners:
        return owners(self.snapshot(), weights.values(), self._indices)

    @contextmanager
    def jobs(self, deltas: Sequence[Delta], copy: Callable[[Address], Tensor]) -> Iterator[Sequence[Job]]:
        if self._indices is not None:
            yield LazyList(lambda: [job for delta in deltas for job in in_place(delta)])
            return
        jobs = [job for delta in deltas for job in in_place(delta)]
        note(self.key, self.snapshot(), ((layer, []) for layer in self._layers), self.weights(deltas))
        yield jobs

    def off(self) -> None:
        savers = Replaced()
        self._off.callback(savers.back)
        savers.put([*guarded(self.snapshot().modules), (self._layers, {"__getstate__": refuse_copy})])
        self._off.enter_context(layers_off(("", layer) for layer in self._layers))

    def on(self) -> None:
        self._off.close()


def _larger(a: Any, b: Any) -> Any | None:
    """Return the one of two process groups that contains the other, if it does."""
    ranks = {group: set(dist.get_process_group_ranks(group)) for group in (a, b)}
    return next((one for one, other in ((a, b), (b, a)) if ranks[one] >= ranks[other]), None)


def _replica(groups: Groups, pg: ProcessGroups) -> Any:
    """Return the process group of the smallest set of ranks around this one that holds a whole model.

    Of groups of 2 and of 3 ranks some contain one another and some do not, so no rank can tell by itself whether all
    do: where no size divides the other, the first time is collective over the world.
    """
    larger, sizes = _larger(pg.model, pg.experts), sorted(map(dist.get_world_size, (pg.model, pg.experts)))
    if larger is not None and sizes[1] % sizes[0] == 0:
        return larger
    world = dist.group.WORLD
    if world not in _replicas:
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, (groups.model, groups.experts))
        for ranks in sorted({replica(by_rank, rank) for rank in range(len(by_rank))}):
            group = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                _replicas[world] = group
    return _replicas[world]


# ---- what ranks tell each other --------------------------------------------------------------------------------------


_Half: TypeAlias = tuple[int, tuple[int, ...], torch.dtype]


class _Told(NamedTuple):
    """A part in words: of the weight `(shape, dtype)`; of each factor also a number, the same for the same tensor."""

    name: str
    weight: tuple[tuple[int, ...], torch.dtype]
    factors: tuple[tuple[_Half, _Half, float], ...] | None
    tied: str

    def __str__(self) -> str:
        shape, dtype = self.weight
        if self.factors is None:
            return f"{list(shape)} {dtype} without an adapter"
        pairs = [
            f"lora_A {list(a[1])} {a[2]}, lora_B {list(b[1])} {b[2]} x {scaling}" for a, b, scaling in self.factors
        ]
        return f"{list(shape)} {dtype} with {' and '.join(pairs)}"


def _told(part: Part, numbers: dict[int, int]) -> _Told:
    def half(shard: Shard) -> _Half:
        return numbers.setdefault(id(shard), len(numbers)), shard.shape, shard.dtype

    delta = part.delta
    factors = None if delta is None else tuple((half(f.lora_A), half(f.lora_B), f.scaling) for f in delta.factors)
    return _Told(part.name, (part.shard.shape, part.shard.dtype), factors, part.tied)


def _elsewhere(thing: _Told, factors: dict[int, Shard], device: torch.device) -> Part:
    """Return a part of which nothing is here."""

    def half(described: _Half) -> Shard:
        number, shape, dtype = described
        return factors.setdefault(number, Shard(shape, dtype, device, ()))

    shape, dtype = thing.weight
    weight = Shard(shape, dtype, device, ())
    if thing.factors is None:
        return Part(thing.name, weight, None, True, thing.tied)
    pairs = tuple(Factors(half(a), half(b), scaling) for a, b, scaling in thing.factors)
    return Part(thing.name, weight, Delta(thing.name, weight, pairs), True, thing.tied)
