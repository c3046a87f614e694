"""PEFT's models, or models with no adapters, plain, under FSDP or ZeRO-3, as `Live` models."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from ...errors import UnsupportedAdapter
from ...kernels.checks import overlapping
from ...kernels.packed import memory
from ...kernels.segments import FLOATS
from ...names import NamedTensor, named_tensors, unsaved_buffers, walk
from ...shards import Address, address, here, quantised
from ...shards.bitsandbytes import dtypeless
from ...shards.layout import Known, Layout
from ..claims import to_the_end
from ..computed import check_stored
from ..conversion import Conversion, read_conversion, saved_names, tied_keys
from ..delta import Delta, Job, LazyList, in_place, whole_job
from ..guards import Replaced, guarded, refuse, refuse_copy
from ..part import Part
from ..plain import check_plain
from ..snapshot import (
    Indices,
    Layed,
    Owners,
    Snapshot,
    again,
    indices_in,
    layouts,
    named_owners,
    note,
    owners,
    some,
    take,
)
from .idle import warn_if_idle
from .layer import PeftLayer
from .read import Adapters, read_adapters

_cut: WeakSet[nn.Module] = WeakSet()
"""Models that were sharded when they were last looked at: nothing but their layout says what to look at."""


class Peft:
    """A `Live` model with PEFT's adapters (or with none), plain, under FSDP or ZeRO-3."""

    def __init__(self, model: nn.Module, reader: Any = None) -> None:
        self.key, self.reader = model, reader
        self._seen: Snapshot | None = None
        with suppress(Exception):  # said by `snapshot`, when the ranks can agree on it
            of = {"adapters": reader is None}
            self._seen = again(model, sharded=True, **of) if model in _cut else take(model, None, **of)
        seen = self._seen
        known = seen and Known(seen.modules, seen.kinds, seen.parameters, seen.cut)
        self._layout = Layout(model, known)
        (_cut.discard if self._layout.plain else _cut.add)(model)
        self.ranks = self.merging = self._layout.ranks()
        self.device, self.sharded = self._layout.device(), self._layout.sharded
        self._adapters: Adapters | None = None
        self._snapshots: dict[bool, Snapshot] = {}
        self._layers: list[tuple[Sequence[str], Sequence[PeftLayer]]] = []
        self._indices: Indices | None = None
        self._off = Replaced()
        self._resharded = False
        self._written: Sequence[Tensor] = ()

    def reshard(self) -> None:
        self._layout.reshard()
        self._layout.release(self._written)

    def _open(self) -> Layout:
        """Return the layout, of units that are on their shards. May fail on one rank alone."""
        if not self._resharded:
            self._layout.check_idle()
            self._layout.reshard()
            self._resharded = True
        return self._layout

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        return walk(self.key)

    def snapshot(self, *, adapters: bool = True) -> Snapshot:
        adapters = adapters and self.reader is None
        if adapters not in self._snapshots:
            layout = self._open()
            seen, self._seen = self._seen, None
            try:
                if adapters != (self.reader is None) or seen is None or (seen.cut is None and not layout.plain):
                    seen = take(self.key, layout, adapters=adapters)
                self._snapshots[adapters] = seen
            except Exception:
                check_plain(self.modules(), named_tensors(self.key, layout.parameters))  # says of which tensor
                if adapters:
                    self._read()  # or of which layer
                raise
            if adapters and (known := indices_in(self._snapshots[adapters], self.key)) is not None:
                self._indices = known
                self._snapshots[adapters] = self._snapshots[adapters]._replace(facts=known.facts)
        return self._snapshots[adapters]

    def _read(self) -> Adapters:
        if self._adapters is None:
            self._adapters = read_adapters(self.key, self._open())
            warn_if_idle(self.key, self._adapters.layers)
        return self._adapters

    def adapters(self) -> tuple[list[object], Sequence[Delta]]:
        snapshot, indices = self.snapshot(), self._indices
        if indices is None:
            deltas: Sequence[Delta] = self._once()
            self._layers = [(active, [layer]) for layer, active in self._read().layers]
        else:
            deltas = LazyList(self._once)
            self._layers = [(active, some(snapshot.modules, numbers)) for active, numbers in indices.layers]
        return list(chain.from_iterable(layers for _, layers in self._layers)), deltas

    def _once(self) -> list[Delta]:
        """Return what adapters do to each parameter in place: one delta of a tied one to all of whose users they do the
        same."""
        seen: set[Hashable] = set()
        found = []
        for delta in self._read().deltas:
            where = self._read().place(delta)
            if where not in seen or not self._read().alike(where):
                found.append(delta)
            seen.add(where)
        return found

    def parts(self, *, adapters: bool, keep_tied: bool) -> dict[str, Part]:
        found = self._read().deltas if adapters and self.reader is None else []
        # By place, not by name: a module that has several names has its adapter under each of them.
        deltas = {(id(d.owner), d.attribute): d for d in found}
        tensors = list(named_tensors(self.key, self._open().parameters))
        check_plain(self.modules(), tensors)
        check_stored(self.key, tensors)
        named = [(t, deltas.get((id(t.owner), t.attribute))) for t in tensors]
        tied = self._tied(named)
        dtype = _plain_dtype(tensors)
        return {
            t.name: self._part(t, d, tied.get(t.name, ""), dtype) for t, d in named if keep_tied or t.name not in tied
        }

    def _part(self, t: NamedTensor, delta: Delta | None, tied: str = "", plain: torch.dtype | None = None) -> Part:
        """Make the part of one name; `plain`: the dtype of the model's weights that are not quantised."""
        dtype = plain if t.attribute == "weight" and dtypeless(t.owner) else None
        if delta is not None:
            return Part(t.name, delta.weight, delta, True, tied, dtype)
        trained = isinstance(t.tensor, nn.Parameter) or t.attribute not in t.owner._buffers
        shard = self._layout.of(t.name, t.owner, t.attribute) if trained else None
        return Part(t.name, shard or self._layout.shard(t.name, t.tensor), None, trained, tied, dtype)

    def _tied(self, tensors: Sequence[tuple[NamedTensor, Delta | None]]) -> dict[str, str]:
        """Return the names that transformers ties when it loads a checkpoint, and whose adapters do not differ -> the
        name of the same weight in checkpoints."""
        groups: dict[Hashable, list[tuple[NamedTensor, Delta | None]]] = {}
        for t, delta in tensors:
            groups.setdefault(self._view(t), []).append((t, delta))
        alike = [
            [t.name for t, _ in group]
            for group in groups.values()
            if len(group) > 1 and len({None if d is None else d.update() for _, d in group}) == 1
        ]
        patterns = tied_keys(self.key) if alike else []
        kept = [(saved_names(names, patterns), names) for names in alike]
        return {name: saved[0] for saved, names in kept for name in names if name not in saved}

    def _view(self, t: NamedTensor) -> Hashable:
        """Return a value that is equal for two places that hold one parameter and see the same of it (tied weights)."""
        where = self._layout.identity(t.owner, t.attribute, t.tensor)
        # Tensors without elements have no address of their own.
        empty = t.name if isinstance(where, tuple) and t.tensor.numel() == 0 else None
        return where, t.tensor.shape, t.tensor.stride(), t.tensor.dtype, empty

    def united(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        return dict(parts)

    def everyones(self, deltas: Sequence[Delta]) -> list[Delta]:
        return list(deltas)

    def conversion(self) -> Conversion:
        return read_conversion(self.key)

    # ---- in place ----------------------------------------------------------------------------------------------------

    def weights(self, deltas: Sequence[Delta]) -> dict[Address, Tensor]:
        """Return parameters (whose data may be moved inside the block), or what is here of them where they are
        sharded."""
        for delta in deltas if self._indices is None else ():
            how = "" if delta.owner is None else quantised.how(delta.owner, delta.attribute)
            if how:
                raise UnsupportedAdapter(
                    f"{delta.name}: the base is quantised ({how}): merged in place it would be quantised again, to "
                    "another policy than the one that trains. MergedWeights streams the merged weights, VllmSync "
                    "pushes them; or train beside a plain base (one of bitsandbytes' transformers dequantises: "
                    "model.dequantize())"
                )
        if self._layout.flat:
            return {address(piece.tensor): piece.tensor for delta in deltas for piece in delta.weight.pieces}
        parameters, indices = self._adapted(deltas), self._indices
        tensors = map(here, parameters) if self.sharded else parameters
        addresses = map(address, parameters) if indices is None else indices.addresses
        return dict(zip(addresses, tensors, strict=True))

    def _adapted(self, deltas: Sequence[Delta]) -> Sequence[Tensor]:
        """Return the parameters that deltas, all that `adapters` gave, change, and of which something is here."""
        if self._indices is not None:
            return some(self.snapshot().parameters, self._indices.weights)
        return [parameter for parameter in map(_parameter, deltas) if here(parameter).numel()]

    def _name(self, parameter: Tensor) -> str:
        return next(delta.name for delta in self._read().deltas if _parameter(delta) is parameter)

    def layouts(self, weights: Mapping[Address, Tensor]) -> Sequence[Layed]:
        return layouts(weights.values()) if self._indices is None else self._indices.layouts

    def owners(self, weights: Mapping[Address, Tensor]) -> Owners:
        if not self.sharded:
            return owners(self.snapshot(), weights.values(), self._indices)
        if self._layout.flat:
            return named_owners(self.snapshot(), [(d.owner, d.name) for d in self._once() if d.owner is not None])
        places = owners(self.snapshot(), self._written, self._indices)
        return places._replace(held=list(map(here, places.held)), stay=False)

    def _note_indices(self) -> None:
        """Keep where things are; not of what FSDP1 manages, which modules need not hold."""
        if not self._layout.flat:
            read = self._read()
            parameters = self._adapted(read.deltas)
            note(self.key, self.snapshot(), read.layers, {address(parameter): parameter for parameter in parameters})

    @contextmanager
    def jobs(self, deltas: Sequence[Delta], copy: Callable[[Address], Tensor]) -> Iterator[Sequence[Job]]:
        """Merge the first adapted user of a tied weight in place. Its other users see that where adapters do the same
        to all; else each gets a parameter of its own, which is the copy, or a merged tensor if it has an adapter
        too."""
        if not self._layout.flat:
            self._written = self._adapted(deltas)
            self._layout.check_free(self._written, self._name)
        if self._indices is not None:
            yield LazyList(lambda: [job for delta in deltas for job in in_place(delta)])
            return
        self._check_apart(deltas)
        if self.sharded:
            jobs = self._sharded_jobs(deltas)
            self._note_indices()
            yield jobs
            return
        jobs = []
        users = {where: list(self._read().users[where]) for where in self.weights(deltas)}
        swaps = []
        begun = set()
        for delta in deltas:
            assert delta.owner is not None
            source = destination = delta.weight.pieces[0].tensor
            if not source.numel():  # has no address, and nothing to be merged
                continue
            where = address(source)
            if where in begun:
                with torch.inference_mode(False):
                    source, destination = copy(where), torch.empty_like(source)
                swaps.append((delta.owner, delta.attribute, destination))
            begun.add(where)
            if self._read().alike(where):
                users[where] = []
            else:
                users[where].remove((delta.owner, delta.attribute))
            jobs.append(whole_job(delta, source, destination))
        swaps += [(owner, attribute, copy(where)) for where in users for owner, attribute in users[where]]
        if not swaps:
            self._note_indices()
        before = [owner._parameters[attribute] for owner, attribute, _ in swaps]
        try:
            for (owner, attribute, tensor), tied in zip(swaps, before, strict=True):
                with torch.inference_mode(False):
                    owner._parameters[attribute] = nn.Parameter(tensor, tied is not None and tied.requires_grad)
            yield jobs
        finally:

            def tie() -> None:
                for (owner, attribute, _), tied in zip(swaps, before, strict=True):
                    owner._parameters[attribute] = tied

            try:
                to_the_end(tie)
            except BaseException:
                to_the_end(tie)  # an interrupt may come before the first line of a function
                raise

    def _check_apart(self, deltas: Sequence[Delta]) -> None:
        """Refuse anything that would be merged along, in the memory of an adapted weight: all but that weight itself
        under the names that it is tied to."""
        facts = self.snapshot().facts
        if _apart.get(self.key) == facts:
            return
        adapted = {(id(delta.owner), delta.attribute) for delta in deltas}
        held: dict[Hashable, tuple[NamedTensor, bool]] = {}
        for t in (*named_tensors(self.key, self._open().parameters), *unsaved_buffers(self.key)):
            key = t.name if t.attribute in t.owner._buffers else self._view(t)
            first, merged = held.get(key, (t, False))
            held[key] = first, merged or (id(t.owner), t.attribute) in adapted
        pieces = [
            (t, tensor, merged)
            for t, merged in held.values()
            for piece in self._part(t, None).shard.pieces
            for tensor in memory(piece.tensor)
        ]
        for device in {tensor.device for _, tensor, merged in pieces if merged}:
            here = [(t, tensor, merged) for t, tensor, merged in pieces if tensor.device == device]
            clash = overlapping([tensor for _, tensor, _ in here], [merged for _, _, merged in here])
            if clash is not None:
                (weight, changed, _), (other, seen, _) = (here[number] for number in clash)
                raise UnsupportedAdapter(
                    f"{other.name}, {_told(seen)}, lies in the memory of {weight.name}, {_told(changed)}, which an "
                    "adapter changes: it would be merged too; give it memory of its own"
                )
        _apart[self.key] = facts

    def _sharded_jobs(self, deltas: Sequence[Delta]) -> list[Job]:
        """Require that adapters do the same to all users of a tied weight: what is sharded cannot be separated."""
        for delta in deltas:
            where = self._read().place(delta)
            users = self._read().users[where]
            if len(users) > 1 and not self._read().alike(where):
                names = ", ".join(f"{type(owner).__name__}.{key}" for owner, key in users)
                raise UnsupportedAdapter(
                    f"{delta.name}: an adapter on a tied weight ({names}) that is sharded, and that the adapter does "
                    "not change alike for all its users: they would need weights of their own. (Sharding gives the "
                    "factors that ensure_weight_tying=True ties memory of their own: they train apart.) Untie the "
                    "weights, or sync with MergedWeights, which streams them apart"
                )
        return [job for delta in deltas for job in in_place(delta)]

    def off(self) -> None:
        """Make PEFT's forward take its merged path, and keep PEFT from merging and unmerging, and everything in the
        model from saving: there are merged weights under the base's names."""
        merged = {"merge": refuse, "unmerge": refuse, "__getstate__": refuse_copy}
        layers = [(which, {"merged_adapters": list(active), **merged}) for active, which in self._layers if active]
        modules, indices = self.snapshot().modules, self._indices
        saving = guarded(modules) if indices is None else [(some(modules, at), new) for at, new in indices.savers]
        self._off.put([*saving, *layers])

    def on(self) -> None:
        self._off.back()


_apart: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
"""The facts of the snapshot for which a model's adapted weights were last found to have their memory to themselves."""


def _plain_dtype(tensors: Sequence[NamedTensor]) -> torch.dtype:
    """Return the dtype of a model's first weight that is not quantised, its embeddings mostly; float16 is what LLM.int8
    is for."""
    plain = (t.tensor.dtype for t in tensors if not quantised.how(t.owner) and t.tensor.dtype in FLOATS)
    return next(plain, torch.float16)


def _told(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"


def _parameter(delta: Delta) -> Tensor:
    assert delta.owner is not None
    parameter = delta.owner._parameters[delta.attribute]
    assert parameter is not None
    return parameter
