"""FSDP2 (`fully_shard`), and any other DTensor: each rank holds a box of the tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InvalidInput
from ..kernels.segments import raw
from ..names import lineage
from . import Piece, Shard, cut

_MODULE = {"torch.distributed.fsdp.FSDPModule", "torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule"}
_DTENSOR = {"torch.distributed.tensor.DTensor", "torch.distributed.tensor._api.DTensor"}
"""By name, so that nothing is imported to look; as torch 2.13 calls them, and as older ones do."""


def is_unit(kind: type) -> bool:
    """Return True if a module of this type has been through `fully_shard`."""
    return not _MODULE.isdisjoint(lineage(kind))


def is_dtensor_kind(kind: type) -> bool:
    """Return True if a class is DTensor's."""
    return not _DTENSOR.isdisjoint(lineage(kind))


def shard_of(name: str, tensor: Any) -> Shard:
    """Return what this rank holds of a DTensor: one box, or one of each group where a packed weight is cut group by
    group.

    Raises:
        InvalidInput: this rank is outside of the tensor's mesh, there is no process group any more, or a placement that
            is neither sharded nor replicated.
    """
    if not dist.is_initialized():
        raise InvalidInput(
            f"{name} is a DTensor, but torch.distributed is not initialised (any more): merge before "
            "destroy_process_group()"
        )
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise InvalidInput(
            f"{name}: rank {dist.get_rank()} is not in the tensor's mesh {mesh}: the mesh must cover every rank that "
            "takes part"
        )
    if any(p.is_partial() for p in placements):
        raise InvalidInput(f"{name}: a tensor of partial sums ({placements}) has no values yet; reduce it first")
    if any(not p.is_replicate() and not hasattr(p, "dim") for p in placements):
        raise InvalidInput(f"{name}: placements must be Shard or Replicate, got {placements}; redistribute it")
    runs = runs_here(tensor.shape, placements, mesh.shape, coordinate)
    shape, local = tuple(sum(map(len, along)) for along in runs), tensor._local_tensor.detach()
    if tuple(local.shape) != shape:
        raise InvalidInput(f"{name}: placements {placements} leave {shape} here, but {tuple(local.shape)} is here")
    pieces = tuple(_pieces(local, runs))
    whole = shape == tuple(tensor.shape) and len(pieces) == 1
    return Shard(tuple(tensor.shape), tensor.dtype, local.device, pieces, whole)


def runs_here(
    shape: Sequence[int], placements: Sequence[Any], sizes: Sequence[int], coordinate: Sequence[int]
) -> list[list[range]]:
    """Return for each dimension of a DTensor the indices that a rank holds, in the order in which they lie there.

    Args:
        sizes: of the mesh.
        coordinate: the rank's.
    """
    cuts: dict[int, list[tuple[int, int, int]]] = {}  # by dimension, in turn: how many groups, how many parts, our part
    for placement, parts, mine in reversed(list(zip(placements, sizes, coordinate, strict=True))):
        if placement.is_replicate():
            continue
        later = cuts.setdefault(placement.dim, [])
        groups = getattr(placement, "split_factor", 1)
        if groups > 1 and groups == prod(n for _, n, _ in later):
            later.append((1, parts, mine))  # fully_shard: it cuts what tensor parallelism, to the right, has left
        else:
            later.insert(0, (groups, parts, mine))
    return [_runs(size, cuts.get(dim, [])) for dim, size in enumerate(shape)]


def _runs(size: int, cuts: Sequence[tuple[int, int, int]]) -> list[range]:
    runs = [range(size)]
    for groups, parts, mine in cuts:
        positions = range(sum(map(len, runs)))
        wanted = [_part(_part(positions, groups, group), parts, mine) for group in range(groups)]
        runs = _joined(run for positions in wanted for run in _at(runs, positions))
    return runs


def _part(whole: range, parts: int, index: int) -> range:
    """Return a part as torch.chunk cuts it: the first parts are of one size, the last of what is left, if anything
    is."""
    size = -(-len(whole) // parts)
    return whole[index * size : (index + 1) * size]


def _at(runs: Sequence[range], positions: range) -> Iterator[range]:
    """Yield the indices at some positions of runs, one after the other."""
    begin = 0
    for run in runs:
        yield run[max(positions.start - begin, 0) : max(positions.stop - begin, 0)]
        begin += len(run)


def _joined(runs: Iterable[range]) -> list[range]:
    """Drop empty runs, and join those that go on where another ends."""
    joined: list[range] = []
    for run in filter(None, runs):
        first = joined.pop().start if joined and joined[-1].stop == run.start else run.start
        joined.append(range(first, run.stop))
    return joined


def _pieces(local: Tensor, runs: Sequence[Sequence[range]]) -> Iterator[Piece]:
    if local.numel() == 0:
        return
    if all(len(along) == 1 for along in runs):
        yield Piece(tuple(run.start for (run,) in runs), local)
        return
    places = [zip(accumulate(map(len, along), initial=0), along, strict=False) for along in runs]
    for at in product(*places):
        box = tuple(first for first, _ in at), tuple(len(run) for _, run in at)
        yield Piece(tuple(run.start for _, run in at), cut(local, box))


def sharded_over(tensor: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the mesh of a DTensor, and the mesh dimensions over which it is sharded."""
    return tensor.device_mesh, tuple(i for i, p in enumerate(tensor.placements) if not p.is_replicate())


def meshes(units: Sequence[Any], parameters: Sequence[Any]) -> dict[tuple[Any, tuple[int, ...]], None]:
    """Return meshes and sharded dimensions (`sharded_over`) of everything that lies sharded of some parameters, or will
    when units that are gathered, whose parameters are among them, are back on their shards."""
    kinds = {kind for kind in set(map(type, parameters)) if is_dtensor_kind(kind)}
    away = [held for unit in units for held in _away(unit)]
    # Between a forward and its backward a parameter may lie over a smaller mesh.
    passing = {id(getattr(held, "_sharded_post_forward_param", None)) for held in away}
    dtensors = [p for p in parameters if type(p) in kinds and id(p) not in passing] if kinds else []
    return dict.fromkeys(map(sharded_over, [*dtensors, *(held.sharded_param for held in away)]))


def reshard(units: Sequence[Any]) -> None:
    """Bring every unit back to its shards: what a forward left gathered would go on holding the old values."""
    for unit in units:
        for group in _groups(unit):
            # Not `unit.reshard()`: after a forward that raised it does nothing, and it leaves an all-gather under way.
            group.wait_for_unshard()
            for held in group.fsdp_params:
                if str(held.sharded_state).endswith(".UNSHARDED"):  # what was set on the parameter that modules show
                    held.sharded_param.requires_grad_(held._unsharded_param.requires_grad)
            group._to_sharded()


def give_up_forward(units: Sequence[Any]) -> None:
    """Bring units back to their shards that a forward which raised has left gathered. No forward may be under way; a
    backward pass may."""
    for unit in units:
        if any(str(group._training_state).endswith(".FORWARD") for group in _groups(unit)):
            reshard([unit])


def check_idle(units: Sequence[Any]) -> None:
    """Refuse units that cannot go back to their shards.

    Raises:
        InvalidInput: a unit is gathered for a forward or a backward that has not ended; or something was written to a
            parameter while it was gathered, which its shards have not seen.
    """
    for unit in units:
        kind = type(unit).__name__
        if any(map(_busy, _groups(unit))):
            raise InvalidInput(
                f"an FSDP2 unit ({kind}) is inside a forward or backward pass; call this between steps, and after a "
                "forward that raised, run one that does not first"
            )
        for held in _away(unit):
            if str(held.sharded_state).endswith(".UNSHARDED") and held._unsharded_param._version and _differs(held):
                raise InvalidInput(
                    f"{held._module_info.param_name} of an FSDP2 unit ({kind}) was written to while the unit was "
                    "gathered: its shards have not seen that, and resharding forgets it. Write to the shards: call "
                    "reshard() first"
                )


def standing(unit: Any) -> list[Any]:
    """Return which parameters of a unit are gathered, and what for: compared with `==`."""
    return [(group.is_sharded, group._training_state) for group in _groups(unit)]


def _busy(group: Any) -> bool:
    """Return True if a unit is computing; one that is on its shards inside a forward was in a forward that raised."""
    state = str(group._training_state)
    return state.endswith(".PRE_BACKWARD") or (state.endswith(".FORWARD") and not group.is_sharded)


def _differs(held: Any) -> bool:
    """Return True if gathered values differ from what this rank's shard holds."""
    gathered, mine = (getattr(p.data, "_local_tensor", p.data) for p in (held._unsharded_param, held.sharded_param))
    mesh = held.mesh_info
    parts = gathered.chunk(getattr(mesh, "shard_mesh_size", 1), held.fsdp_placement.dim)
    if mine.numel() == 0:
        return False
    return not torch.equal(raw(parts[getattr(mesh, "shard_mesh_rank", 0)]), raw(mine.to(gathered)))


def _groups(unit: Any) -> list[Any]:
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # torch 2.12 and newer
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _away(unit: Any) -> Iterator[Any]:
    """Yield the parameters of a unit that are gathered at the moment."""
    for group in _groups(unit):
        if not group.is_sharded:
            yield from group.fsdp_params


def sharded_alone(units: Sequence[Any]) -> set[int]:
    """Return the ids of the parameters that units shard and gather, and nothing else cuts (no tensor parallelism)."""
    groups = chain.from_iterable(map(_groups, units))
    return {id(held.sharded_param) for group in groups for held in group.fsdp_params if not held.is_dtensor}


def group_over(mesh: Any, dims: tuple[int, ...]) -> Any:
    """Return the process group over some dimensions of a mesh.

    Raises:
        InvalidInput: this rank is outside of the mesh, or its dimensions have no names.
    """
    if mesh.get_coordinate() is None:
        raise InvalidInput(
            f"rank {dist.get_rank()} is not in the mesh {mesh} over which the model is sharded: the mesh must cover "
            "every rank that takes part"
        )
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
    """Return where a mesh computes: buckets lie there even if shards are offloaded."""
    kind = mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
