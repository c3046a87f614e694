"""torchao: weights that are tensors of its classes, as shards of what their `dequantize()` gives.

Its call is made for some rows at a time, or for the whole weight where a scale is for several rows. torchao is not
imported: a model that holds its tensors has done so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidInput
from ..kernels.packed import Called
from ..kernels.segments import FLOATS
from ..names import lineage
from . import Shard, whole, zero3

_BASE = "torchao.utils.TorchAOBaseTensor"
_READ = tuple(f"torchao.quantization.{kind}" for kind in ("Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor"))
"""Those whose `dequantize()` was read: what their forwards multiply with, but for the rounding (docs/quantised.md)."""
_INSTEAD = (
    "quantise the base with Int8WeightOnlyConfig, Float8WeightOnlyConfig or (4 bits and fewer) IntxWeightOnlyConfig, "
    "or load it in bfloat16, float16 or float32, from a checkpoint that is not quantised"
)


_coded: dict[type, bool] = {}


def is_coded(tensor: Any) -> bool:
    """Return True if a tensor, or what is here of it, is one of torchao's."""
    return of_torchao(type(tensor)) or of_torchao(type(getattr(tensor, "_local_tensor", None)))


def of_torchao(cls: type) -> bool:
    """Return True if a class is one of torchao's tensors."""
    if cls not in _coded:
        _coded[cls] = _BASE in lineage(cls)
    return _coded[cls]


def format_name(tensor: Any) -> str:
    """Return the format, for messages."""
    return f"a {lineage(type(getattr(tensor, '_local_tensor', tensor)))[0]}"


def shard_of(name: str, tensor: Any) -> Shard:
    """Return what this rank holds of a weight of torchao's.

    Raises:
        InvalidInput: it is sharded, or of a class that is not read here.
    """
    if hasattr(tensor, "_local_tensor") or zero3.is_managed(tensor):
        raise InvalidInput(
            f"{name}: quantised by torchao ({format_name(tensor)}), and sharded: a part of it is not read; train on "
            "one rank, or shard a base that bitsandbytes quantised to 4 bits (FSDP2)"
        )
    if lineage(type(tensor))[0] not in _READ:
        raise InvalidInput(
            f"{name}: the base is quantised ({format_name(tensor)}), which is not known to be dequantised exactly; "
            f"{_INSTEAD}"
        )
    if getattr(tensor, "act_pre_scale", None) is not None:
        raise InvalidInput(
            f"{name}: quantised by torchao with act_pre_scale (SmoothQuant, AWQ): its forward scales the inputs, too, "
            f"so that the policy multiplies with other weights than dequantize() gives; {_INSTEAD}"
        )
    if tensor.dtype not in FLOATS or not tensor.is_contiguous():
        raise InvalidInput(
            f"{name}: quantised by torchao, of {tensor.dtype} with strides {tensor.stride()}; expected a contiguous "
            "one of bfloat16, float16 or float32"
        )
    names, parts = parts_of(tensor)
    by_rows = tensor.block_size[0] == 1 or tensor.scale.numel() == 1
    call = _call(type(tensor), names, tensor.__tensor_flatten__()[1], tensor.shape, tensor.stride())
    return whole(Called(name, parts, tuple(tensor.shape), tensor.dtype, call, not by_rows).tensor())


def parts_of(tensor: Any) -> tuple[list[str], list[Tensor]]:
    """Return the plain tensors in one of torchao's, with their names; the codes come first."""
    names, _ = tensor.__tensor_flatten__()
    return names, [getattr(tensor, part).detach() for part in names]


def facts(tensors: Sequence[Any]) -> list[Any]:
    """Return all that reading torchao's tensors depends on beside `parts_of` them, to be compared."""
    return [repr(tensor.__tensor_flatten__()) for tensor in tensors]


def _call(
    cls: Any, names: Sequence[str], said: Any, shape: torch.Size, stride: tuple[int, ...]
) -> Callable[[Sequence[Tensor], int, int], Tensor]:
    def values(tensors: Sequence[Tensor], begin: int, end: int) -> Tensor:
        with torch.no_grad():
            made = cls.__tensor_unflatten__(dict(zip(names, tensors, strict=True)), said, shape, stride)
            found: Tensor = (made if end - begin == shape[0] else made[begin:end]).dequantize()
        return found

    return values
