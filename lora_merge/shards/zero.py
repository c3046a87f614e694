"""DeepSpeed's ZeRO-3: it keeps its parts of a parameter to itself, and the parameter empty between uses."""

from __future__ import annotations

from torch import Tensor

from ..errors import InvalidInput


def is_managed(tensor: Tensor) -> bool:
    """Whether ZeRO-3 gathers a parameter before each use of its module, and frees it after."""
    return hasattr(tensor, "ds_id")


def check_gathered(name: str, tensor: Tensor) -> None:
    """Raise `InvalidInput` for a parameter of ZeRO-3 that is not gathered at the moment."""
    status = getattr(tensor, "ds_status", None)
    if status is not None and status.name != "AVAILABLE":
        shape = tuple(getattr(tensor, "ds_shape", ()))
        raise InvalidInput(
            f"{name}: DeepSpeed ZeRO-3 has partitioned this parameter of shape {shape}; what is here has shape "
            f"{tuple(tensor.shape)}. Stream it (MergedWeights, VllmSync) inside "
            "deepspeed.zero.GatheredParameters(list(model.parameters())), on every rank"
        )


def check_unmanaged(name: str, tensor: Tensor) -> None:
    """Raise `InvalidInput` for a parameter of ZeRO-3, gathered or not: a forward would free what is merged into it."""
    if is_managed(tensor):
        raise InvalidInput(
            f"{name}: DeepSpeed ZeRO-3 gathers this parameter anew for every forward, from parts that merged() does "
            "not write: nothing can be merged in place. Stream it (MergedWeights, VllmSync) inside "
            "deepspeed.zero.GatheredParameters(list(model.parameters()))"
        )
