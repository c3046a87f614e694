"""HQQ: layers that hold their weight as `W_q` and a dict of scales and zeros, as shards of what their `dequantize()`
gives, and what else they hold beside any parameter.

hqq is not imported: a model that holds its layers has done so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidInput
from ..kernels.packed import Called
from ..kernels.segments import FLOATS
from ..names import lineage
from . import Shard, whole, zero3

_LINEAR = "hqq.core.quantize.HQQLinear"
CODES = "W_q"
"""The parameter that holds a layer's codes."""


def is_layer(module: nn.Module) -> bool:
    """Return True if a module is one of HQQ's."""
    kind: type = type(module)
    return of_hqq(kind)


@cache
def of_hqq(cls: type) -> bool:
    """Return True if a class is of HQQ's layers."""
    return _LINEAR in lineage(cls)


def format_name(owner: Any) -> str:
    """Return the format, for messages."""
    meta = getattr(owner, "meta", None) or {}
    return f"{meta.get('nbits', '?')}-bit, HQQ"


def parameters(owner: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield what a layer holds, by the names that a linear layer has for it; its bias is no parameter."""
    if isinstance(owner.W_q, Tensor):
        yield "weight", owner.W_q
    if isinstance(owner.bias, Tensor):
        yield "bias", owner.bias


def shard_of(name: str, owner: Any) -> Shard:
    """Return what this rank holds of the weight of one of HQQ's layers.

    Raises:
        InvalidInput: it is not quantised yet, sharded, or in a way that is not read here.
    """
    W_q, meta = owner.W_q, owner.meta
    if not isinstance(W_q, Tensor) or not meta or not owner.ready:
        raise InvalidInput(f"{name}: a layer of HQQ's that is not quantised yet; call initialize() or load its state")
    if hasattr(W_q, "_local_tensor") or zero3.is_managed(W_q):
        raise InvalidInput(
            f"{name}: quantised by HQQ, and sharded: a part of it is not read; hold the model whole on each rank "
            "(DDP), or shard a base that bitsandbytes quantised to 4 bits (FSDP2)"
        )
    known = {key: value for key, value in meta.items() if not isinstance(value, Tensor)}
    tensors = {key: value for key, value in meta.items() if isinstance(value, Tensor)}
    if set(tensors) != {"scale", "zero"} or known.get("quant_scale") or known.get("quant_zero"):
        raise InvalidInput(
            f"{name}: quantised by HQQ with {', '.join(tensors) or 'no scales'} (offload_meta, or scales and zeros "
            "that are quantised too); expected scale and zero in plain floats: quantise it anew, with "
            "offload_meta=False"
        )
    away = sorted({str(value.device) for value in tensors.values() if value.device != W_q.device})
    if away:
        raise InvalidInput(f"{name}: HQQ's scales are on {', '.join(away)}, its codes on {W_q.device}; move them there")
    dtype = known.get("compute_dtype", torch.float16)
    if dtype not in FLOATS or {value.dtype for value in tensors.values()} != {dtype}:
        raise InvalidInput(
            f"{name}: HQQ decodes it to {dtype} with scales of {', '.join(str(t.dtype) for t in tensors.values())}; "
            "expected all of one, bfloat16, float16 or float32: quantise it with compute_dtype of that"
        )
    dequantize = _quantizer(owner).dequantize
    call = _call(dequantize, tuple(tensors), known)
    parts = [W_q.detach(), *(value.detach() for value in tensors.values())]
    return whole(Called(name, parts, tuple(known["shape"]), dtype, call, True).tensor())


def facts(modules: Iterable[Any]) -> tuple[list[Any], list[Tensor]]:
    """Return all that reading HQQ's layers among modules depends on beside their parameters: values to be compared, and
    tensors."""
    values: list[Any] = []
    tensors: list[Tensor] = []
    for module in modules:
        if not is_layer(module):
            continue
        meta = module.meta or {}
        held = [*meta.values(), module.bias, module.W_q]
        tensors += [t for t in held if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)]
        values.append(repr([(key, None if isinstance(value, Tensor) else value) for key, value in meta.items()]))
        values += [module.ready, module.bias is None, module.W_q is None]
    return values, tensors


def _quantizer(owner: Any) -> Any:
    """Return hqq's quantizer, from where the layer's class is."""
    cls = next(base for base in type(owner).__mro__ if lineage(base)[0] == _LINEAR)
    return vars(__import__(cls.__module__, fromlist=["Quantizer"]))["Quantizer"]


def _call(
    dequantize: Callable[[Tensor, Mapping[str, Any]], Tensor], names: Sequence[str], known: Mapping[str, Any]
) -> Callable[[Sequence[Tensor], int, int], Tensor]:
    def values(tensors: Sequence[Tensor], begin: int, end: int) -> Tensor:
        W_q, *rest = tensors
        with torch.no_grad():
            return dequantize(W_q, {**known, **dict(zip(names, rest, strict=True))})[begin:end]

    return values
