"""Snapshot: all that reading a live model depends on, taken in a small part of the time that reading takes.

Whoever keeps something that was made from a reading keeps the snapshot's facts beside it, and reads again when new ones
are not equal. No snapshot is made out of an earlier one, and no hook is set on the model or on PEFT: each looks at
everything.

A trainer waits for this before every merge, and a model may have thousands of layers. So everything is looked at in
columns: one attribute of all modules at a time, by C code of Python's own, and nothing is made for each module that the
garbage collector has to follow; for each tensor a shape and strides are.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter, is_, itemgetter, methodcaller
from types import NoneType
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..names import Trail, choices, column, trail, wrapped, wrappers
from ..shards import Address, fsdp2, here, quantised
from ..shards.layout import Cut, Layout
from .guards import savers
from .peft.facts import AdapterFacts, adapter_facts
from .watch import Look, Watch

_T = TypeVar("_T")
_LOOKED_AT = (Tensor.data_ptr, attrgetter("shape"), Tensor.stride, attrgetter("dtype"), attrgetter("device"))
_VALUES = methodcaller("values")


class Snapshot(NamedTuple):
    """Everything that reading a live model depends on, as it is at this moment.

    Args:
        facts: compared with `==`. They hold no tensor and no module, so that keeping them keeps no memory:
            - of every module that `walk` visits, and of those of its active adapters: which one it is (`id`), its
              class, the names of its children and of its parameters, and which of them are None; of wrappers, which
              module inside is used;
            - of every parameter and persistent buffer: its class, address, shape, strides, dtype and device; of a
              DTensor those of the local part, and which DTensor it is and its spec (mesh, placements, shape); of a
              parameter of ZeRO-3 those of the partition, and `zero3.facts`; what FSDP1 holds of each parameter;
            - of the adapters: `adapter_facts`.
            An `id` may come back for another object after the first one is gone. It then stands for an object of the
            same class at the same place with the same parameters, of which a reading would tell the same.
        modules: live, in an order that is the same for equal facts. So are the following:
        parameters: parameters and persistent buffers.
        tensors: what is here of each of them; and what scales quantised ones.
        kinds: classes of the modules, and of those that these are in.
        cut: how FSDP2 shards the model, where nothing else does and nothing had to be read anew.
    """

    facts: list[Any]
    modules: list[nn.Module]
    parameters: list[Tensor]
    tensors: list[Tensor]
    kinds: set[type]
    cut: Cut | None = None


Layed: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype]


class Indices(NamedTuple):
    """Where merging in place finds things in the snapshots of a model, so that it need not read it again.

    Args:
        facts: of the snapshots for which this holds.
        layers: names of adapters that act, and numbers among the modules of the adapter layers in which just these do.
        weights: numbers among their parameters of those that active adapters change. None is tied to another.
        addresses: of these.
        layouts: of these, see `layouts`.
        owners: for each place that holds one of them the number among their modules of its module, ...
        keys: ... under which name, ...
        held: ... and the number of the parameter.
        above: numbers of the modules that these modules are in, at any depth, ...
        children: ... under which name, ...
        below: ... and the number of the module there.
        savers: as `guards.savers` of its modules.
    """

    facts: list[Any]
    layers: list[tuple[tuple[str, ...], list[int]]]
    weights: list[int]
    addresses: list[Address]
    layouts: Sequence[Layed]
    owners: list[int]
    keys: list[str]
    held: list[int]
    above: list[int]
    children: list[str]
    below: list[int]
    savers: list[tuple[list[int], dict[str, Any]]]


class Owners(NamedTuple):
    """Places of a model that hold some of its parameters: modules, names of their parameters, and these.

    Args:
        modules, keys, held: one of each for every place; of what FSDP1 manages, of which a rank may hold nothing, the
            name in the place of the parameter.
        above, children, below: the way from the model to these modules: a module, the name of a child, and the child.
        stay: whether modules hold these parameters until somebody replaces them. Sharded ones give way to what
            was gathered.
    """

    modules: Sequence[nn.Module]
    keys: Sequence[str]
    held: Sequence[Tensor | str]
    above: Sequence[nn.Module] = ()
    children: Sequence[str] = ()
    below: Sequence[nn.Module] = ()
    stay: bool = True

    def lost(self) -> list[Tensor | str]:
        """Return those that are in their places no more."""
        if not self.stay:
            return []
        parameters = column("_parameters", list(map(vars, self.modules)), self.modules)
        now = list(map(dict.get, parameters, self.keys))
        if all(map(is_, now, self.held)):
            return []
        return [held for held, there in zip(self.held, now, strict=True) if held is not there]

    def cut_off(self) -> list[Tensor | str]:
        """Return those that are in their modules where another module has taken the place of one that leads there; not
        where it was wrapped."""
        children = column("_modules", list(map(vars, self.above)), self.above)
        now = list(map(dict.get, children, self.children))
        if all(map(is_, now, self.below)):
            return []
        pairs = [(b, n) for b, n in zip(self.below, now, strict=True) if n is not None and n is not b]
        gone = [before for before, there in pairs if all(module is not before for module in there.modules())]
        lost = {id(module) for before in gone for module in before.modules()}
        return [held for held, module in zip(self.held, self.modules, strict=True) if id(module) in lost]


_indices: WeakKeyDictionary[nn.Module, Indices] = WeakKeyDictionary()


def indices_in(snapshot: Snapshot, model: nn.Module) -> Indices | None:
    """Return what `note` got for a snapshot of the model that was equal to this one, if it was the last."""
    known = _indices.get(model)
    return known if known is not None and known.facts == snapshot.facts else None


def note(
    model: nn.Module,
    snapshot: Snapshot,
    layers: Iterable[tuple[nn.Module, Sequence[str]]],
    weights: Mapping[Address, Tensor],
) -> None:
    """Keep where these are in the snapshot; see `Indices`."""
    modules = {id(module): at for at, module in enumerate(snapshot.modules)}
    parameters = {id(parameter): at for at, parameter in enumerate(snapshot.parameters)}
    acting: dict[tuple[str, ...], list[int]] = {}
    for layer, active in layers:
        acting.setdefault(tuple(active), []).append(modules[id(layer)])
    places = owners(snapshot, weights.values())
    _indices[model] = Indices(
        snapshot.facts,
        list(acting.items()),
        [parameters[id(weight)] for weight in weights.values()],
        list(weights),
        layouts(weights.values()),
        [modules[id(module)] for module in places.modules],
        list(places.keys),
        [parameters[id(weight)] for weight in places.held],
        [modules[id(module)] for module in places.above],
        list(places.children),
        [modules[id(module)] for module in places.below],
        savers(snapshot.modules),
    )


def layouts(weights: Iterable[Tensor]) -> list[Layed]:
    """Return shapes, strides and dtypes of what is here of some weights."""
    return [(weight.shape, weight.stride(), weight.dtype) for weight in map(here, weights)]


def owners(snapshot: Snapshot, weights: Iterable[Tensor], indices: Indices | None = None) -> Owners:
    """Return the places of the snapshot that hold some of these parameters.

    Args:
        indices: in the snapshot, where the weights are theirs: nothing has to be looked for then.
    """
    if indices is not None:
        modules, held = snapshot.modules, some(snapshot.parameters, indices.held)
        way = some(modules, indices.above), indices.children, some(modules, indices.below)
        return Owners(some(modules, indices.owners), indices.keys, held, *way)
    ids = set(map(id, weights))
    places = ((module, key, tensor) for module in snapshot.modules for key, tensor in module._parameters.items())
    found = {(id(module), key): (module, key, tensor) for module, key, tensor in places if id(tensor) in ids}
    if not found:
        return Owners([], [], [])
    modules, keys, held = (list(column) for column in zip(*found.values(), strict=True))
    return Owners(modules, keys, held, *_way_to(modules, snapshot.modules))


def named_owners(snapshot: Snapshot, names: Iterable[tuple[nn.Module, str]]) -> Owners:
    """Return the places of parameters that are known by their names: the modules that own them, and the names."""
    modules, held = (list(column) for column in zip(*names, strict=True))
    return Owners(modules, [], held, *_way_to(modules, snapshot.modules), stay=False)


def _way_to(
    modules: Sequence[nn.Module], everything: Sequence[nn.Module]
) -> tuple[list[nn.Module], list[str], list[nn.Module]]:
    """Return where these modules are, where the modules around them are, and so on; see `Owners`."""
    parents: dict[int, list[tuple[nn.Module, str, nn.Module]]] = {}
    for module in {id(module): module for module in everything}.values():
        for name, child in module._modules.items():
            if child is not None:
                parents.setdefault(id(child), []).append((module, name, child))
    way, seen, left = [], set(map(id, modules)), list(modules)
    while left:
        for step in parents.get(id(left.pop()), ()):
            way.append(step)
            if id(step[0]) not in seen:
                seen.add(id(step[0]))
                left.append(step[0])
    return [above for above, _, _ in way], [name for _, name, _ in way], [below for _, _, below in way]


def some(of: Sequence[_T], numbers: Sequence[int]) -> Sequence[_T]:
    return itemgetter(*numbers)(of) if len(numbers) > 1 else [of[number] for number in numbers]


def take(model: nn.Module, layout: Layout | None, *, adapters: bool = True) -> Snapshot:
    """Take the snapshot of a model with PEFT's adapters, or with none.

    Args:
        layout: None: as if nothing were sharded.
        adapters: False: of the base, which stays what it is whatever adapts it.
    """
    layout = None if layout is None or layout.plain else layout
    if (same := again(model, layout is not None, adapters=adapters)) is not None:
        return same
    known, which = _noted.setdefault(model, {}), (layout is not None, adapters)
    noted = known.get(which)
    # Made beside the second of two equal readings: not for a model that is read once, or changes each time.
    watch = Watch(model) if noted is not None and not (noted.tried and noted.watch is None) else None
    taking = Taking(layout, watch)
    through = wrappers()
    for seen in trail(model):
        taking.add(seen, adapter_facts(seen) if adapters else None)
    taken = taking.done()
    cut = None if layout is None else layout.cut
    if layout is not None and cut is None:
        return taken
    if noted is None or noted.facts != taken.facts:
        known[which] = _Noted(taken.facts, taken.kinds, through)
        return taken
    if watch is not None:
        noted.tried, noted.kinds, noted.wrappers = True, taken.kinds, through
        columns: list[Sequence[Any]] = [taken.modules, taken.parameters]
        columns += [] if cut is None else [taken.tensors, cut.units]
        noted.watch = watch if taking.watch is not None and watch.done(*columns) else None
        noted.meshes = None if cut is None else cut.meshes
    return taken._replace(facts=noted.facts)


def again(model: nn.Module, sharded: bool, *, adapters: bool = True) -> Snapshot | None:
    """Return the snapshot of a model, if nothing has changed that the last reading of it looked at.

    Args:
        sharded: by FSDP2 alone.
        adapters: see `take`.
    """
    noted = _noted.get(model, {}).get((sharded, adapters))
    return None if noted is None else noted.again(model)


class _Noted:
    """The last reading of a model, and the watch over what it looked at, from the second equal one on.

    Args:
        facts, kinds: see `Snapshot`.
        wrappers: which classes are looked through.
        watch: None where there is none yet, or nothing to be had of one.
        tried: whether one was made for these facts.
    """

    def __init__(self, facts: list[Any], kinds: set[type], wrappers: dict[str, str]) -> None:
        self.facts, self.kinds, self.wrappers = facts, kinds, wrappers
        self.watch: Watch | None = None
        self.tried = False
        self.meshes: Any = None

    def again(self, model: nn.Module) -> Snapshot | None:
        """Return the snapshot, if nothing has changed that the reading looked at."""
        if self.watch is None or self.wrappers != wrappers():
            return None
        found = self.watch.again(model)
        if found is None:
            return None
        if self.meshes is None:
            modules, parameters = found
            return Snapshot(self.facts, modules, parameters, parameters, self.kinds)
        modules, parameters, tensors, units = found
        return Snapshot(self.facts, modules, parameters, tensors, self.kinds, Cut(units, self.meshes))


_noted: WeakKeyDictionary[nn.Module, dict[tuple[bool, bool], _Noted]] = WeakKeyDictionary()
# Meshes hold process groups, whose threads must not outlive the interpreter (gloo: "terminate called").
atexit.register(_noted.clear)


def _inside(wrapper: nn.Module) -> int:
    return id(wrapped(wrapper))


class Taking:
    """A snapshot on the way.

    Args:
        layout: None where tensors are here as they are.
        watch: that is to note what is looked at; None too once something was that it cannot keep.
    """

    def __init__(self, layout: Layout | None = None, watch: Watch | None = None) -> None:
        self._layout, self.watch = layout, watch
        self._scales: list[Tensor] = []
        self.taken = Snapshot([], [], [], [], set())

    def add(self, seen: Trail, adapters: AdapterFacts | None = None) -> None:
        """Add the next modules of a trail, with what is known of their adapters."""
        facts, parts = self.taken.facts, [] if adapters is None else adapters.parts
        facts += seen.facts
        self.taken.kinds.update(seen.kinds)
        if adapters is not None:
            facts += adapters.facts
            self.taken.kinds.update(adapters.kinds, map(type, parts))
        within = list(map(vars, parts))
        if self.watch is not None:
            self._look(self.watch, seen, adapters, Look(parts, ("_parameters",), "n", within))
        modules, insides = [*seen.modules, *parts], [*seen.insides, *within]
        facts += map(id, modules)
        self.taken.modules.extend(modules)
        packed, scales = quantised.facts(seen.modules, seen.kinds)
        facts += packed
        self._scales += scales
        parameters = column("_parameters", insides, modules)
        facts += map(len, parameters)
        facts += chain.from_iterable(parameters)
        tensors: list[Any] = list(chain.from_iterable(map(_VALUES, parameters)))
        self._buffers(seen, tensors)
        kinds = list(map(type, tensors))
        facts += kinds
        if NoneType in set(kinds):
            tensors = [tensor for tensor in tensors if tensor is not None]
        self.taken.parameters.extend(tensors)
        if self._layout is None:
            self._here(self._opened(tensors, kinds))

    def done(self) -> Snapshot:
        """Return the snapshot, when all modules were added."""
        if self._layout is not None:
            here, shards = self._layout.local(self.taken.parameters)
            self.taken.facts.extend(shards)
            if self.watch is not None and self._layout.cut is not None:
                pairs = zip(self.taken.parameters, here, strict=True)
                dtensors = [whole for whole, part in pairs if whole is not part]
                self.watch.look(Look(dtensors, ("_local_tensor", "_spec"), "OT"))
                self.watch.ask(fsdp2.standing, self._layout.cut.units)
            self._here(self._opened(here, map(type, here)))
        if self._scales:
            self.watch = None
            self._here(self._scales)
        return self.taken

    def _opened(self, tensors: Sequence[Tensor], kinds: Iterable[type]) -> Sequence[Tensor]:
        """Return the plain tensors in them; note the rest."""
        plain, facts = quantised.opened(tensors, kinds)
        if facts:
            self.taken.facts.extend(facts)
            self.watch = None
        return plain

    def _look(self, watch: Watch, seen: Trail, adapters: AdapterFacts | None, parts: Look) -> None:
        """Note what `add` looks at, without the tensors, of which `_here` notes it."""
        fields, begin = ("_modules", "_parameters", "_buffers", "_hf_device_mesh"), 0
        for at in choices(seen):  # what one of these has chosen may be the next module
            wrapper, end = seen.modules[at], at + 1
            watch.look(Look(seen.modules[begin:end], fields, "nnnt", seen.insides[begin:end]))
            watch.look(Look([wrapper._modules.get("modules_to_save")], ("_modules",), "n"))
            watch.ask(_inside, [wrapper])
            begin = end
        watch.look(Look(seen.modules[begin:], fields, "nnnt", seen.insides[begin:]))
        if adapters is not None:
            watch.look(*adapters.looks)
            for question, layers in adapters.asked:
                watch.ask(question, layers)
            watch.look(parts)

    def _buffers(self, seen: Trail, tensors: list[Any]) -> None:
        """Add the buffers that are persistent."""
        buffers = column("_buffers", seen.insides, seen.modules)
        for module, there in compress(zip(seen.modules, buffers, strict=True), buffers):
            if self.watch is not None:
                self.watch.look(Look([module], ("_non_persistent_buffers_set",), "v"))
            for name, buffer in there.items():
                if name not in module._non_persistent_buffers_set:
                    self.taken.facts.extend((id(module), name))
                    tensors.append(buffer)

    def _here(self, tensors: Sequence[Tensor]) -> None:
        """Note addresses, shapes, strides, dtypes and devices."""
        self.taken.tensors.extend(tensors)
        for of in _LOOKED_AT:
            self.taken.facts.extend(map(of, tensors))
        if self.watch is not None:
            self.watch.tensors(tensors)
