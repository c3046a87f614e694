"""Layout: where the tensors of a live model are, whatever sharded it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InvalidInput
from ..kernels.packed import memory
from . import Shard, address, fsdp1, fsdp2, here, quantised, whole, zero3
from .ranks import Ranks

_CHILDREN, _PARAMETERS, _VALUES = attrgetter("_modules"), attrgetter("_parameters"), methodcaller("values")


class Cut(NamedTuple):
    """How FSDP2 shards a model.

    Args:
        units: its units.
        meshes: as of `fsdp2.meshes`.
    """

    units: list[nn.Module]
    meshes: dict[tuple[Any, tuple[int, ...]], None]


class Known(NamedTuple):
    """Modules of a model that somebody has looked at already.

    Args:
        modules: that hold parameters themselves.
        kinds: classes of these and of all that they are in.
        parameters: their parameters, perhaps with buffers.
        cut: how the model is sharded, where it is known to be as it was.
    """

    modules: list[nn.Module]
    kinds: set[type]
    parameters: Sequence[Any]
    cut: Cut | None = None


class Layout:
    """Answers for one model: what does this rank hold of a parameter, and who holds the rest.

    Making it is no collective, and what may go wrong on one rank alone waits until shards are asked for: so the ranks
    can agree on an error. They come out the same everywhere for models that are sharded alike.

    Args:
        model: plain, FSDP2, FSDP1 or ZeRO-3.
        known: what all that will be asked for lies in. If nothing of it is sharded, the model is not looked through.

    Raises:
        InvalidInput: FSDP units or ZeRO-3 without torch.distributed; parameters that ZeRO-3 partitions over several
            groups; from the methods: units that are in use or were written to while gathered, or that cannot be mapped;
            shards over groups that do not fit together.
    """

    def __init__(self, model: nn.Module, known: Known | None = None) -> None:
        there = dist.is_available() and dist.is_initialized()
        self._one: list[Any] = []
        self._two: list[Any] = []
        self._zero3: list[Any] = []
        self._meshes: dict[tuple[Any, tuple[int, ...]], None] = {}
        self._taken: dict[int, list[str]] = {}
        self._flat_group: Any = None
        if known is not None and known.cut is not None and there:
            self._modules, (self._two, self._meshes) = known.modules, known.cut
            return
        plain = known is not None and not _any_unit(known.kinds) and not _any_cut(known, there)
        if known is None or not plain:
            modules = _modules(model)
            parameters = list(chain.from_iterable(map(_VALUES, map(_PARAMETERS, modules))))
            known = Known(modules, set(map(type, modules)), parameters)
        self._modules = known.modules
        self._zero3 = zero3.managed(known.modules)
        for module in self._modules if _any_unit(known.kinds) else ():
            kind: type = type(module)
            if version := _version_of(kind):
                (self._one if version == 1 else self._two).append(module)
        if self._zero3:
            self._flat_group = zero3.group(self._zero3)
        if not there:
            if self._one or self._two:
                raise InvalidInput(
                    "the model is under FSDP, but torch.distributed is not initialised (any more): merge before "
                    "destroy_process_group()"
                )
            return
        self._meshes = {} if plain else fsdp2.meshes(self._two, known.parameters)
        self._flat_group = self._flat_group or fsdp1.group(self._one)

    @cached_property
    def _flat(self) -> dict[tuple[int, str], Shard]:
        """What FSDP1 manages."""
        flat = fsdp1.shards(self._one)
        owners = {id(module): module for module in self._modules} if flat else {}
        for owner, key in flat:
            if key not in owners[owner]._parameters:
                self._taken.setdefault(owner, []).append(key)
        return flat

    def check_idle(self) -> None:
        """Raise `InvalidInput` where a unit is in use, or was written to while it was gathered."""
        fsdp1.check_idle(self._one)
        fsdp2.check_idle(self._two)

    def give_up_forward(self) -> None:
        """Bring FSDP units back to their shards that a forward which raised has left gathered."""
        fsdp2.give_up_forward(self._two)
        fsdp1.give_up_forward(self._one)

    def reshard(self) -> None:
        """Bring every FSDP unit back to its shards, whatever it is in; ask `check_idle` first where that matters."""
        fsdp2.reshard(self._two)
        fsdp1.reshard(self._one)

    def check_free(self, parameters: Iterable[Tensor], name: Callable[[Tensor], str]) -> None:
        """Raise `InvalidInput`, with its name, where something uses what ZeRO-3 has gathered of a parameter."""
        for parameter in parameters if self._zero3 else ():
            why = zero3.busy(parameter, self._modules) if zero3.is_managed(parameter) else None
            if why is not None:
                raise InvalidInput(f"{name(parameter)}: {why}")

    def release(self, parameters: Iterable[Tensor]) -> None:
        """Let ZeRO-3 gather parameters anew when it next uses them; on every rank, or on none."""
        if self._zero3:
            zero3.release(filter(zero3.is_managed, parameters), self._modules)

    def of(self, name: str, owner: nn.Module, attribute: str) -> Shard | None:
        """Return what this rank holds of `owner.attribute`; None where there is no such parameter."""
        if self._flat and (found := self._flat.get((id(owner), quantised.held_as(owner, attribute)))) is not None:
            if attribute == "weight":
                quantised.check_flat(name, owner)
            return found
        found = quantised.shard_of(name, owner, attribute)
        if found is not None:
            for piece in found.pieces:
                for part in memory(piece.tensor):
                    _check_held(name, part)
            return found
        tensor = owner._parameters.get(attribute)
        return None if tensor is None else self.shard(name, tensor)

    def shard(self, name: str, tensor: Tensor) -> Shard:
        """Return what this rank holds of a tensor that FSDP1 does not manage.

        Raises:
            InvalidInput: ZeRO-3 keeps it in a way that is not read, or its memory was freed.
        """
        if self._zero3 and zero3.is_managed(tensor):
            return zero3.shard_of(name, tensor)
        _check_held(name, getattr(tensor, "_local_tensor", tensor))
        return fsdp2.shard_of(name, tensor) if hasattr(tensor, "_local_tensor") else whole(tensor)

    def parameters(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of a module, those that FSDP1 (`use_orig_params=False`) has taken out of it too."""
        for key, parameter in quantised.parameters(module):
            if not (self._flat and fsdp1.is_flat(parameter)):
                yield key, parameter
        for key in self._taken.get(id(module), ()):
            yield key, getattr(module, key)

    def identity(self, owner: nn.Module, attribute: str, tensor: Tensor) -> Hashable:
        """Return a value that is equal for two places that hold one parameter (tied weights)."""
        flat = self._flat.get((id(owner), attribute)) if self._flat else None
        if flat is not None:
            return id(flat)
        return id(tensor) if not self.plain and here(tensor) is not tensor else address(tensor)

    def local(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[Any]]:
        """Return what is here of tensors, and what else their shards depend on: which DTensors and parameters of ZeRO-3
        they are, and how they are cut; what FSDP1 holds of the parameters that it manages."""
        facts: list[Any] = [(key, shard.key()) for key, shard in self._flat.items()]
        if not self._meshes and not self._zero3:
            return tensors, facts
        local = list(map(here, tensors))
        cut: list[Any] = [whole for whole, part in zip(tensors, local, strict=True) if whole is not part]
        if self._zero3:
            return local, [*facts, *map(zero3.facts, cut)]
        return local, [*facts, *map(id, cut), *(dtensor._spec for dtensor in cut)]

    @property
    def cut(self) -> Cut | None:
        """How the model is sharded, where nothing but FSDP2 does it."""
        return None if self._one or self._zero3 or not self._meshes else Cut(self._two, self._meshes)

    @property
    def units(self) -> list[Any]:
        """FSDP2's."""
        return self._two

    @property
    def plain(self) -> bool:
        """Whether every tensor is here as it is."""
        return not (self._one or self._two or self._meshes or self._zero3)

    @property
    def flat(self) -> bool:
        """Whether FSDP1 manages parameters."""
        return bool(self._flat)

    @property
    def sharded(self) -> bool:
        """Whether what lies here is other tensors than the parameters: of DTensors that every rank holds whole too."""
        return fsdp1.manages(self._one) or bool(self._meshes) or bool(self._zero3)

    def ranks(self) -> Ranks:
        """Return the ranks that hold the model together."""
        if self._flat_group is not None:
            return Ranks(self._flat_group)
        cut = {(mesh, dims) for mesh, dims in self._meshes if dims}
        if not cut:
            return Ranks()
        meshes = {mesh for mesh, _ in cut}
        if len(meshes) == 1:
            return Ranks(fsdp2.group_over(meshes.pop(), tuple(sorted({d for _, dims in cut for d in dims}))))
        # Several meshes (experts on one of their own): only the whole world is sure to hold everything.
        return Ranks(dist.group.WORLD)

    def device(self) -> torch.device | None:
        """Return where a sharded model computes, if its weights may lie elsewhere (CPU offloading)."""
        if self._zero3:
            return self._zero3[0].device
        return next((fsdp2.device_of(mesh) for mesh, _ in self._meshes), None)


def _any_unit(kinds: set[type]) -> bool:
    """Return True if some of these classes are of FSDP's units."""
    return any(map(_version_of, kinds))


@cache
def _version_of(kind: type) -> int:
    """Return the version of FSDP whose wrapper a class of modules is; 0 for others."""
    return 1 if fsdp1.is_unit(kind) else 2 if fsdp2.is_unit(kind) else 0


def _any_cut(known: Known, there: bool) -> bool:
    """Return True if some parameter says of itself that it is sharded.

    Args:
        there: whether torch.distributed is initialised.
    """
    return bool((there and fsdp2.meshes([], known.parameters)) or zero3.managed(known.modules))


def _check_held(name: str, tensor: Tensor) -> None:
    """Raise `InvalidInput` for a plain tensor whose memory was given back under it."""
    plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and tensor.layout is torch.strided
    if plain and tensor.numel() and not tensor.is_meta and not tensor.untyped_storage().nbytes():
        raise InvalidInput(f"{name}: its memory was freed; load it first, or wake up what put it to sleep")


def _modules(model: nn.Module) -> list[nn.Module]:
    """Return every module once, level by level, adapters' own ones too, which are most of them: little Python for
    each."""
    found: dict[int, nn.Module] = {}
    level = [model]
    while level:
        found.update(zip(map(id, level), level, strict=True))
        children = chain.from_iterable(map(_VALUES, filter(None, map(_CHILDREN, level))))
        level = [child for child in children if child is not None and id(child) not in found]
    return list(found.values())
