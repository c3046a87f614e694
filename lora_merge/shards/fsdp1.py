"""FSDP1 (`FullyShardedDataParallel`): each rank holds a range of every unit's flat parameter, cut anywhere; or all of
it, under `NO_SHARD`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidInput, NotRestored
from ..names import lineage
from . import Piece, Shard, flat_pieces, whole

_UNIT = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"


def is_unit(kind: type) -> bool:
    """Return True if a module of this type is an FSDP1 wrapper."""
    return _UNIT in lineage(kind)


def is_flat(parameter: Tensor) -> bool:
    """Return True if a parameter is the flat one that stands for those of a unit."""
    return hasattr(parameter, "_param_infos")


def _handles(units: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the units that manage parameters, with the handle of their flat parameter."""
    for unit in units:
        if getattr(unit, "_handle", None) is not None:
            yield unit, unit._handle


def manages(units: Iterable[Any]) -> bool:
    """Return True if a unit has parameters."""
    return any(True for _ in _handles(units))


def shards(units: Sequence[nn.Module]) -> dict[tuple[int, str], Shard]:
    """Return `(id(module), attribute)` -> what this rank holds, of every parameter that FSDP1 manages; tied ones under
    each of their places.

    Raises:
        InvalidInput: a unit whose flat parameter cannot be mapped, or which is gathered at the moment; a parameter that
            was not contiguous, or a DTensor, when it was flattened.
    """
    found: dict[tuple[int, str], Shard] = {}
    for unit, handle in _handles(units):
        flat, sharded = handle.flat_param, handle.uses_sharded_strategy
        if sharded and not handle.is_sharded(flat):
            raise InvalidInput("an FSDP1 unit is gathered (summon_full_params or a forward under way); leave it first")
        if sharded and not hasattr(flat, "_shard_param_infos"):
            raise InvalidInput(f"the flat parameter of the FSDP1 unit {type(unit).__name__} has no map of its parts")
        local = getattr(flat, "_local_shard", flat.data).detach()
        _check_order(type(unit).__name__, flat)
        if sharded:
            here = [_shard(local, flat.dtype, *of) for of in zip(flat._shapes, flat._shard_param_infos, strict=True)]
        else:  # NO_SHARD, which torch chooses on a single rank: all of it is here
            here = list(map(whole, handle._get_unflat_views(local)))
        for info, shard in zip(flat._param_infos, here, strict=True):
            found[id(info.module), info.param_name] = shard
        for shared in flat._shared_param_infos:
            found[id(shared.module), shared.param_name] = found[id(shared.prim_module), shared.prim_param_name]
    return found


def _shard(local: Tensor, dtype: torch.dtype, shape: torch.Size, part: Any) -> Shard:
    """Return what a rank's part of a flat parameter holds of one of its parameters."""
    pieces: list[Piece] = []
    if part.in_shard:
        view = local[part.offset_in_shard : part.offset_in_shard + part.numel_in_shard]
        pieces += flat_pieces(shape, part.intra_param_start_idx, view)
    full = sum(piece.tensor.numel() for piece in pieces) == prod(shape)
    return Shard(tuple(shape), dtype, local.device, tuple(pieces), full)


def _check_order(kind: str, flat: Any) -> None:
    """Refuse parameters of which the flat one does not hold the elements of the whole, row by row."""
    count = len(flat._shapes)
    rows = getattr(flat, "_contiguities", None) or [True] * count
    parts = getattr(flat, "_param_extensions", None) or [None] * count
    for name, by_rows, part in zip(flat._fqns, rows, parts, strict=True):
        if not by_rows:
            raise InvalidInput(
                f"{name} of an FSDP1 unit ({kind}) was not contiguous when FSDP1 flattened it, which keeps the order "
                "of its memory: make it contiguous before wrapping it, or use FSDP2"
            )
        if part is not None:
            raise InvalidInput(
                f"{name} of an FSDP1 unit ({kind}) is a DTensor (tensor parallelism), and FSDP1 knows only the local "
                "part of it: use FSDP2"
            )


def group(units: Sequence[nn.Module]) -> Any | None:
    """Return the process group over which the model is sharded; None where no unit is sharded by FSDP1."""
    return next((unit.process_group for unit, handle in _handles(units) if handle.uses_sharded_strategy), None)


def check_idle(units: Sequence[nn.Module]) -> None:
    """Raise `InvalidInput` where a unit is gathered for something that has not ended."""
    for unit, handle in _handles(units):
        state = str(getattr(handle, "_training_state", ""))
        if _gathered(handle) and state and not state.endswith("IDLE"):
            raise InvalidInput(
                f"the FSDP1 unit {type(unit).__name__} is in {state}: leave summon_full_params, the forward or the "
                "backward pass first; after a forward that raised, run one that does not"
            )


def give_up_forward(units: Sequence[nn.Module]) -> None:
    """Bring units back to their shards that a forward which raised has left gathered. No forward may be under way; a
    backward pass may."""
    reshard([unit for unit, handle in _handles(units) if str(handle._training_state).endswith(".FORWARD")])


def reshard(units: Sequence[nn.Module]) -> None:
    """Bring every unit back to its shards, whatever it is in: what a forward left gathered (the root, or one that
    raised) would go on holding old values.

    Raises:
        NotRestored: a unit is under summon_full_params, which may yet write the old values to its shards.
    """
    summoned = []
    for unit, handle in _handles(units):
        if not _gathered(handle):
            continue
        if str(getattr(handle, "_training_state", "")).endswith("SUMMON_FULL_PARAMS"):
            summoned.append(type(unit).__name__)
            continue
        with torch.no_grad():
            handle.reshard(True)
            handle.post_reshard()
        handle._prefetched = False  # else the next forward would not gather it
    if summoned:
        raise NotRestored(
            f"summon_full_params was entered inside of merged() on the FSDP1 units {', '.join(summoned)}, and not "
            "left before it: they hold merged weights, which its end writes to the shards if it has writeback=True. "
            "Leave it inside; load the base again if it has written"
        )


def _gathered(handle: Any) -> bool:
    """Return True if the next forward would compute with what is gathered now."""
    flat = handle.flat_param
    if not handle.uses_sharded_strategy:
        return False
    # A root that has been through a forward is back on its shards, but would not gather them again.
    return not handle.is_sharded(flat) or (hasattr(flat, "_full_param_padded") and not handle.needs_unshard())
