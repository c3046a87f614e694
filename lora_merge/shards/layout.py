"""Layout: where the tensors of a live model are, whatever sharded it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InvalidInput
from ..ranks import Ranks
from . import Shard, fsdp1, fsdp2, whole


class Layout:
    """Answers for one model: what does this rank hold of a parameter, and who holds the rest.

    Reading it is no collective; the ranks come out the same everywhere for models that are sharded alike.

    Args:
        model: plain, FSDP2 or FSDP1.

    Raises:
        InvalidInput: FSDP1 units that cannot be mapped; shards over groups that do not fit together.
    """

    def __init__(self, model: nn.Module) -> None:
        self._flat = fsdp1.shards(model)
        self._meshes: dict[tuple[Any, tuple[int, ...]], None] = {}
        self._fsdp1 = fsdp1.group(model) if self._flat else None
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is not None and fsdp2.is_dtensor(parameter):
                    self._meshes[fsdp2.sharded_over(parameter)] = None

    def shard(self, name: str, owner: nn.Module, attribute: str, tensor: Tensor) -> Shard:
        """What this rank holds of `owner.attribute`."""
        flat = self._flat.get((id(owner), attribute))
        if flat is not None:
            return flat
        if fsdp2.is_dtensor(tensor):
            return fsdp2.shard_of(name, tensor)
        return whole(tensor)

    def extra(self, module: nn.Module) -> dict[str, Tensor]:
        """Parameters of a module that FSDP1 (`use_orig_params=False`) has taken out of it."""
        names = (key[1] for key in self._flat if key[0] == id(module))
        return {name: getattr(module, name) for name in names if name not in module._parameters}

    @property
    def sharded(self) -> bool:
        return bool(self._flat) or any(dims for _, dims in self._meshes)

    def ranks(self) -> Ranks:
        """The ranks that hold the model together."""
        if not dist.is_available() or not self.sharded:
            return Ranks()
        if not dist.is_initialized():
            raise InvalidInput(
                "the model is sharded, but torch.distributed is not initialised: init_process_group first"
            )
        if self._fsdp1 is not None:
            return Ranks(self._fsdp1)
        cut = {(mesh, dims) for mesh, dims in self._meshes if dims}
        meshes = {mesh for mesh, _ in cut}
        if len(meshes) == 1:
            return Ranks(fsdp2.group_over(meshes.pop(), tuple(sorted({d for _, dims in cut for d in dims}))))
        # Several meshes (experts on one of their own): only the whole world is sure to hold everything.
        return Ranks(dist.group.WORLD)


def reshard(model: nn.Module) -> None:
    """Bring every FSDP unit of a model back to its shards."""
    fsdp1.reshard(model)
    fsdp2.reshard(model)
