"""Layout: where the tensors of a live model are, whatever sharded it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..names import own_parameters
from ..ranks import Ranks
from . import Shard, address, fsdp1, fsdp2, whole


class Layout:
    """Answers for one model: what does this rank hold of a parameter, and who holds the rest.

    Reading it is no collective; the ranks come out the same everywhere for models that are sharded alike.

    Args:
        model: plain, FSDP2 or FSDP1.

    Raises:
        InvalidInput: FSDP1 units that cannot be mapped; shards over groups that do not fit together.
    """

    def __init__(self, model: nn.Module) -> None:
        self._flat: dict[tuple[int, str], Shard] = {}
        self._meshes: dict[tuple[Any, tuple[int, ...]], None] = {}
        self._fsdp1: Any = None
        self._taken: dict[int, list[str]] = {}
        if not dist.is_available() or not dist.is_initialized():
            return
        modules = _modules(model)
        parameters: list[Any] = list(chain.from_iterable([module._parameters.values() for module in modules]))
        kinds = {kind for kind in set(map(type, parameters)) if fsdp2.is_dtensor_kind(kind)}
        dtensors = [parameter for parameter in parameters if type(parameter) in kinds] if kinds else []
        self._meshes = dict.fromkeys(map(fsdp2.sharded_over, dtensors))
        units = _units(modules, fsdp1.is_unit)
        self._flat = fsdp1.shards(units)
        self._fsdp1 = fsdp1.group(units) if self._flat else None
        owners = {id(module): module for module in modules} if self._flat else {}
        for owner, key in self._flat:
            if key not in owners[owner]._parameters:
                self._taken.setdefault(owner, []).append(key)

    def of(self, name: str, owner: nn.Module, attribute: str) -> Shard | None:
        """What this rank holds of `owner.attribute`; None where there is no such parameter."""
        if self._flat and (found := self._flat.get((id(owner), attribute))) is not None:
            return found
        tensor = owner._parameters.get(attribute)
        if tensor is None:
            return None
        return self.shard(name, tensor) if self._meshes else whole(tensor)

    def shard(self, name: str, tensor: Tensor) -> Shard:
        """What this rank holds of a tensor that FSDP1 does not manage."""
        return fsdp2.shard_of(name, tensor) if self._meshes and fsdp2.is_dtensor(tensor) else whole(tensor)

    def parameters(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The parameters of a module, those that FSDP1 (`use_orig_params=False`) has taken out of it too."""
        for key, parameter in own_parameters(module):
            if not (self._flat and fsdp1.is_flat(parameter)):
                yield key, parameter
        for key in self._taken.get(id(module), ()):
            yield key, getattr(module, key)

    def identity(self, owner: nn.Module, attribute: str, tensor: Tensor) -> Hashable:
        """Equal for two places that hold one parameter (tied weights)."""
        flat = self._flat.get((id(owner), attribute)) if self._flat else None
        if flat is not None:
            return id(flat)
        return id(tensor) if self._meshes and fsdp2.is_dtensor(tensor) else address(tensor)

    def local(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[Any]]:
        """What is here of tensors, and what else their shards depend on: which DTensors they are, and how they are
        cut; what FSDP1 holds of the parameters that it manages."""
        facts: list[Any] = [(key, shard.key()) for key, shard in self._flat.items()]
        if not self._meshes:
            return tensors, facts
        local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
        cut: list[Any] = [whole for whole, part in zip(tensors, local, strict=True) if whole is not part]
        return local, [*facts, *map(id, cut), *(dtensor._spec for dtensor in cut)]

    @property
    def flat(self) -> bool:
        """Whether FSDP1 manages parameters."""
        return bool(self._flat)

    @property
    def sharded(self) -> bool:
        return bool(self._flat) or any(dims for _, dims in self._meshes)

    def ranks(self) -> Ranks:
        """The ranks that hold the model together."""
        if not self.sharded:
            return Ranks()
        if self._fsdp1 is not None:
            return Ranks(self._fsdp1)
        cut = {(mesh, dims) for mesh, dims in self._meshes if dims}
        meshes = {mesh for mesh, _ in cut}
        if len(meshes) == 1:
            return Ranks(fsdp2.group_over(meshes.pop(), tuple(sorted({d for _, dims in cut for d in dims}))))
        # Several meshes (experts on one of their own): only the whole world is sure to hold everything.
        return Ranks(dist.group.WORLD)

    def device(self) -> torch.device | None:
        """Where a sharded model computes, if its weights may lie elsewhere (CPU offloading)."""
        return next((fsdp2.device_of(mesh) for mesh, _ in self._meshes), None)


def reshard(model: nn.Module) -> None:
    """Bring every FSDP unit of a model back to its shards."""
    if dist.is_available() and dist.is_initialized():
        modules = _modules(model)
        fsdp1.reshard(_units(modules, fsdp1.is_unit))
        fsdp2.reshard(_units(modules, fsdp2.is_unit))


def _units(modules: Sequence[nn.Module], is_unit: Callable[[type], bool]) -> list[nn.Module]:
    """The modules whose class `is_unit`; thousands of modules have a few classes."""
    kinds = {kind for kind in set(map(type, modules)) if is_unit(kind)}
    return [module for module in modules if type(module) in kinds] if kinds else []


def _modules(model: nn.Module) -> list[nn.Module]:
    """Every module once, adapters' own ones too; `nn.Module.modules` would take several times as long."""
    level = found = {id(model): model}
    while level:
        level = {
            id(child): child
            for module in level.values()
            for child in module._modules.values()
            if child is not None and id(child) not in found
        }
        found = found | level
    return list(found.values())
