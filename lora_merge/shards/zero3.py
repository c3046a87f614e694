"""DeepSpeed's ZeRO-3: each rank holds an even flat range of every parameter, which is itself empty between uses."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import chain, compress, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InvalidInput
from ..kernels.segments import raw
from . import Shard, flat_pieces

_DEPTH = "_ds_z3_gathered_param_context_depth"
"""What `GatheredParameters` counts on a parameter how often it holds it."""


def is_managed(tensor: Tensor) -> bool:
    """Return True if ZeRO-3 gathers a parameter before each use of its module, and frees it after."""
    return hasattr(tensor, "ds_id")


def managed(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the parameters of some modules that ZeRO-3 has partitioned, tied ones once."""
    if "deepspeed" not in sys.modules:
        return []
    parameters = list(chain.from_iterable([module._parameters.values() for module in modules]))
    return list(dict.fromkeys(compress(parameters, map(hasattr, parameters, repeat("ds_id")))))


def shard_of(name: str, parameter: Any) -> Shard:
    """Return what this rank holds of a parameter: its partition, whether or not the parameter is gathered at the
    moment.

    Raises:
        InvalidInput: the partition is on a disk, holds or is gathered as quantised numbers, or is cut in another way;
            or the parameter was written to while it was gathered, which the partition has not seen.
    """
    partition, shape = parameter.ds_tensor, tuple(parameter.ds_shape)
    if partition is None:
        raise InvalidInput(
            f"{name}: DeepSpeed ZeRO-3 has not partitioned this parameter yet; call deepspeed.initialize"
        )
    if hasattr(partition, "ds_quant_scale"):
        raise InvalidInput(
            f"{name}: DeepSpeed (ZeRO++) keeps this parameter in {partition.dtype}, which are no weights: turn "
            "zero_quantized_nontrainable_weights off"
        )
    if getattr(_init_of(parameter), "quantized_weights", False):
        raise InvalidInput(
            f"{name}: DeepSpeed (ZeRO++) quantises this parameter whenever it gathers it, so that the model computes "
            "with other weights than it holds: turn zero_quantized_weights off"
        )
    if hasattr(parameter, "comm"):
        raise InvalidInput(
            f"{name}: DeepSpeed MiCS has partitioned this parameter, which is not read here: turn mics_shard_size off"
        )
    if partition.status.name != "AVAILABLE" or getattr(partition.final_location, "value", "") == "nvme":
        raise InvalidInput(
            f"{name}: DeepSpeed keeps this parameter's partition on a disk (offload_param, device nvme): choose device "
            "cpu, or none"
        )
    rank, size = dist.get_rank(parameter.ds_process_group), dist.get_world_size(parameter.ds_process_group)
    begin, count = rank * partition.ds_numel, parameter.ds_numel
    if partition.numel() != partition.ds_numel or not count <= size * partition.ds_numel < count + size:
        raise InvalidInput(
            f"{name}: expected partitions of {-(-count // size)} elements of {count} on each of {size} ranks, got "
            f"{partition.numel()}; this release of DeepSpeed cuts parameters in another way"
        )
    mine = partition.detach()[: max(min(partition.ds_numel, count - begin), 0)]
    if _differs(parameter, begin, mine):
        raise InvalidInput(
            f"{name} was written to while DeepSpeed ZeRO-3 had it gathered, and its partitions, which are trained and "
            "merged, do not have that write: write inside deepspeed.zero.GatheredParameters with modifier_rank=0, and "
            "leave that block"
        )
    pieces = tuple(flat_pieces(shape, begin, mine))
    return Shard(shape, partition.dtype, partition.device, pieces, sum(p.tensor.numel() for p in pieces) == count)


def _init_of(parameter: Any) -> Any:
    """Return DeepSpeed's `zero.Init` that has partitioned a parameter; only the functions that it gave it know it."""
    cells = getattr(parameter.partition, "__closure__", None) or ()
    return next((cell.cell_contents for cell in cells if hasattr(cell.cell_contents, "quantized_weights")), None)


def _differs(parameter: Any, begin: int, mine: Tensor) -> bool:
    """Return True if what is gathered of a parameter is not what this rank's partition, from number `begin` on,
    holds."""
    gathered = parameter.data
    if parameter.ds_status.name != "AVAILABLE" or gathered.shape != parameter.ds_shape:
        return False
    if hasattr(parameter, "comm_dtype"):  # torch_autocast: gathered in fewer bits
        return False
    there = gathered.reshape(-1)[begin : begin + mine.numel()]
    return there.dtype == mine.dtype and not torch.equal(raw(there), raw(mine.to(there.device)))


def facts(parameter: Any) -> tuple[Any, ...]:
    """Return what a shard depends on beside the partition's address, shape and dtype."""
    partition, version = parameter.ds_tensor, None if parameter.is_inference() else parameter._version
    cut = parameter.ds_shape, partition.ds_numel, partition.status.name, id(parameter.ds_process_group)
    return id(parameter), version, *cut


def group(parameters: Sequence[Any]) -> Any:
    """Return the process group over which parameters are partitioned.

    Raises:
        InvalidInput: there are several, or none any more.
    """
    if not dist.is_initialized():
        raise InvalidInput(
            "DeepSpeed ZeRO-3 partitions the model, but torch.distributed is not initialised (any more): merge before "
            "destroy_process_group()"
        )
    first, *others = {id(p.ds_process_group): p.ds_process_group for p in parameters}.values()
    if others:
        raise InvalidInput(
            f"DeepSpeed ZeRO-3 partitions some parameters over {dist.get_world_size(first)} ranks and others over "
            f"{dist.get_world_size(others[0])} (expert parallelism), which is not read here: train with experts on "
            "every rank"
        )
    return first


# ---- merging in place ------------------------------------------------------------------------------------------------


def busy(parameter: Any, modules: Sequence[nn.Module]) -> str | None:
    """Return why what is gathered of a parameter cannot be given back now; None where it can be.

    Args:
        modules: of its model.
    """
    if getattr(parameter, _DEPTH, 0):
        return "it is inside deepspeed.zero.GatheredParameters, whose end would forget what is merged: leave that first"
    if parameter.ds_active_sub_modules:
        return (
            "DeepSpeed is using it in a forward or backward pass: call this between steps; after a forward that "
            "raised, run one that does not"
        )
    if parameter.ds_status.name == "INFLIGHT" and not _under_way(parameter, modules):
        return (
            "DeepSpeed is gathering it ahead of its use, which only the whole model can wait for: pass the "
            "DeepSpeedEngine, or the model that it was made of"
        )
    return None


def release(parameters: Iterable[Any], modules: Sequence[nn.Module]) -> None:
    """Give back what is gathered of parameters, whatever uses it, so that each is gathered anew from the partitions
    when it is next used: on every rank, or on none, since gathering is collective.

    Args:
        modules: of their model.

    Raises:
        InvalidInput: at the end, where `GatheredParameters` held some of them.
    """
    held = 0
    for parameter in parameters:
        if parameter.ds_status.name == "INFLIGHT":
            for registry in _under_way(parameter, modules):
                registry.pop(parameter).wait()
        if parameter.ds_status.name == "AVAILABLE":
            held += bool(getattr(parameter, _DEPTH, 0))
            parameter.ds_active_sub_modules.clear()
            parameter.partition()
        if getattr(parameter, "ds_secondary_tensor", None) is not None:
            parameter.ds_secondary_tensor = None  # hpZ gathers from this, and makes it anew where there is none
    if held:
        raise InvalidInput(
            "deepspeed.zero.GatheredParameters was entered inside of merged() and not left before it: the "
            f"{held} merged weights that it held were given back; leave it inside"
        )


def _under_way(parameter: Any, modules: Sequence[nn.Module]) -> list[Any]:
    """Return where DeepSpeed keeps the all-gather of a parameter that it has begun."""
    registries = (vars(module).get("ds_inflight_param_registry") for module in modules)
    return [registry for registry in registries if registry is not None and parameter in registry]
