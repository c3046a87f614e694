"""FSDP2 (`fully_shard`), and any other DTensor: each rank holds a box of the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InvalidInput
from ..names import lineage
from . import Piece, Shard

_MODULE = {"torch.distributed.fsdp.FSDPModule", "torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule"}
_DTENSOR = {"torch.distributed.tensor.DTensor", "torch.distributed.tensor._api.DTensor"}
"""By name, so that nothing is imported to look; as torch 2.13 calls them, and as older ones do."""


def is_unit(kind: type) -> bool:
    """Whether a module of this type has been through `fully_shard`."""
    return not _MODULE.isdisjoint(lineage(kind))


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; a parameter of one is of its class too."""
    return is_dtensor_kind(type(tensor))


def is_dtensor_kind(kind: type) -> bool:
    """Whether a class is DTensor's."""
    return not _DTENSOR.isdisjoint(lineage(kind))


def shard_of(name: str, tensor: Any) -> Shard:
    """The box of a DTensor that this rank holds.

    Raises:
        InvalidInput: this rank is outside of the tensor's mesh, or a placement that is neither sharded nor replicated.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.get_coordinate() is None:
        raise InvalidInput(
            f"{name}: rank {dist.get_rank()} is not in the tensor's mesh {mesh}: the mesh must cover every rank that "
            "takes part"
        )
    if any(p.is_partial() for p in placements):
        raise InvalidInput(f"{name}: a tensor of partial sums ({placements}) has no values yet; reduce it first")
    shape, start = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    local = tensor._local_tensor.detach()
    if tuple(local.shape) != tuple(shape):
        raise InvalidInput(
            f"{name}: placements {placements} leave {tuple(shape)} here, but {tuple(local.shape)} is here"
        )
    pieces = (Piece(tuple(start), local),) if local.numel() else ()
    whole = tuple(local.shape) == tuple(tensor.shape)
    return Shard(tuple(tensor.shape), tensor.dtype, local.device, pieces, whole)


def sharded_over(tensor: Any) -> tuple[Any, tuple[int, ...]]:
    """The mesh of a DTensor, and the mesh dimensions over which it is sharded."""
    return tensor.device_mesh, tuple(i for i, p in enumerate(tensor.placements) if not p.is_replicate())


def reshard(units: Sequence[Any]) -> None:
    """Bring every unit back to its shards: what a forward left gathered would go on holding the old values."""
    for unit in units:
        _check_idle(unit)
        unit.reshard()


def _check_idle(module: Any) -> None:
    """Refuse a unit that is gathered for a forward or a backward that has not ended."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is not None and str(group._training_state).endswith((".FORWARD", ".PRE_BACKWARD")):
        raise InvalidInput(
            f"an FSDP2 unit ({type(module).__name__}) is inside a forward or backward pass; call this between steps"
        )


def group_over(mesh: Any, dims: tuple[int, ...]) -> Any:
    """The process group over some dimensions of a mesh."""
    if mesh.ndim == 1:
        return mesh.get_group()
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    if len(dims) == mesh.ndim and mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    names = mesh.mesh_dim_names
    if names is None:
        raise InvalidInput(f"the mesh {mesh} is sharded over several dimensions and has no names for them; name them")
    return mesh[tuple(names[i] for i in dims)]._flatten().get_group()


def device_of(mesh: Any) -> torch.device:
    """Where a mesh computes: buckets lie there even if shards are offloaded."""
    kind = mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
