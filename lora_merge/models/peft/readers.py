"""How layers of PEFT's are read, class by class, and what every delta is checked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod

import torch

from ...errors import InvalidInput, UnsupportedAdapter
from ...kernels.segments import FLOATS
from ...shards import Shard, quantised, whole
from ..delta import Delta, Factors
from ..plain import remedy
from .layer import CODED, EMBEDDING, GEOMETRY, LAYERS, LINEAR, PARAMETER, SWAPPED, LayerReader, part_of
from .tokens import TOKENS, read_tokens


def _read_linear(reading: LayerReader) -> list[Delta]:
    """Read an nn.Linear, or a Conv1D with `fan_in_fan_out`."""
    transposed = bool(reading.layer.fan_in_fan_out)
    return [reading.delta("weight", reading.factors(), None, transposed), *_read_bias(reading)]


def _read_conv(reading: LayerReader) -> list[Delta]:
    """Read a convolution. lora_A strides over the input as the base does and lora_B is 1x1, so that the composed kernel
    is the product of the flattened factors."""
    name, base = reading.name, reading.base
    if base.groups > 1:
        raise UnsupportedAdapter(f"{name}: a convolution with {base.groups} groups cannot be merged (nor does PEFT)")
    weight = reading.delta("weight", reading.factors())
    for adapter, factor in zip(reading.active, weight.factors, strict=True):
        lora_A = part_of(reading.layer, "lora_A", adapter)
        for what in GEOMETRY:
            if getattr(base, what) != getattr(lora_A, what):
                raise UnsupportedAdapter(
                    f"{name}: the base convolves with {what} {getattr(base, what)}, lora_A of '{adapter}' with "
                    f"{getattr(lora_A, what)}: their sum is no convolution with one weight"
                )
        for shard in (weight.weight, factor.lora_A, factor.lora_B):
            if shard.whole and not shard.pieces[0].tensor.is_contiguous():
                raise UnsupportedAdapter(f"{name}: weights of convolutions must be contiguous, not channels_last")
    return [weight, *_read_bias(reading)]


def _read_bias(reading: LayerReader) -> list[Delta]:
    """Read `lora_bias`, which adds `scaling * lora_B.bias` to the base's bias: rank 1, with a one as lora_A."""
    layer, base = reading.layer, reading.base
    factors = []
    for adapter in reading.active:
        lora_B = part_of(layer, "lora_B", adapter)
        bias = reading.layout.of(reading.name, lora_B, "bias")
        if bias is None and getattr(lora_B, "bias", None) is not None:
            raise UnsupportedAdapter(
                f"{reading.name}: the bias of lora_B of '{adapter}' is no parameter (pruned or parametrised): "
                "make it one before (torch.nn.utils.prune.remove, remove_parametrizations)"
            )
        if bias is not None:
            factors.append(Factors(whole(_one(bias.dtype, bias.device)), bias, reading.scaling(adapter), adapter))
    if not factors:
        return []
    if reading.layout.of(reading.name, base, "bias") is None:
        raise UnsupportedAdapter(f"{reading.name}: an adapter has lora_bias, but the base has no bias to merge it into")
    return [reading.delta("bias", tuple(factors))]


@cache
def _one(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.ones(1, 1, dtype=dtype, device=device)


def _read_embedding(reading: LayerReader) -> list[Delta]:
    """Read an Embedding, stored `[vocabulary, dim]`; lora_A is `[r, vocabulary]` and lora_B `[dim, r]`, so out = dim,
    in = vocabulary."""
    layer = reading.layer
    if reading.base.max_norm is not None:
        raise UnsupportedAdapter(
            f"{reading.name}: an Embedding with max_norm rescales its weight in the forward; set max_norm=None"
        )
    factors = tuple(
        Factors(
            reading.shard(layer.lora_embedding_A, adapter),
            reading.shard(layer.lora_embedding_B, adapter),
            reading.scaling(adapter),
            adapter,
        )
        for adapter in reading.active
    )
    return [reading.delta("weight", factors, None, True)]


def _read_parameter(reading: LayerReader) -> list[Delta]:
    """Read a parameter of its own (`target_parameters`), mostly the fused experts of a layer.

    PEFT before 0.19 takes every 3-D parameter as `[E, in, out]`; later it asks the module (`is_transposed`) and notes
    in `_did_swap_in_out_features` that it is `[E, out, in]`. With one expert it adds `lora_B @ lora_A` as it is.
    """
    layer, attribute = reading.layer, reading.layer.parameter_name
    dims = len(reading.shard(reading.base, attribute).shape)
    transposed = layer.num_experts > 1 and not getattr(layer, SWAPPED, False)
    return [reading.delta(attribute, reading.factors(), layer.num_experts if dims == 3 else None, transposed)]


def check_delta(delta: Delta) -> None:
    """Raise unless the parameter is a plain float one and the factors fit it."""
    weight = delta.weight
    assert delta.owner is not None
    parameter = delta.owner._parameters.get(delta.attribute)
    kind = "Tensor" if parameter is None else type(parameter.data).__name__
    coded = quantised.how(delta.owner, delta.attribute)
    if weight.dtype not in FLOATS or (not coded and kind not in ("Tensor", "DTensor")):
        raise UnsupportedAdapter(
            f"{delta.name}: the base is a {kind} of {weight.dtype}; only plain bfloat16, float16 and float32 weights "
            f"can be merged here. If it is quantised, {remedy()}"
        )
    if weight.whole and len(weight.shape) != (2 if delta.experts is None else 3):
        tensor = weight.pieces[0].tensor
        if not tensor.is_contiguous():
            raise UnsupportedAdapter(f"{delta.name}: the base must be contiguous, got strides {tensor.stride()}")
    for rows in delta.rows:
        _check_values(delta, "trainable_tokens_delta", rows.values)
    if len(weight.shape) < (1 if delta.experts is None else 2):
        raise UnsupportedAdapter(f"{delta.name}: the base has shape {weight.shape}, which is no matrix")
    (out, cols), experts = delta.shape, delta.experts or 1
    for f in delta.factors:
        _check_values(delta, "lora_A", f.lora_A)
        _check_values(delta, "lora_B", f.lora_B)
        fits = bool(f.lora_A.shape and f.lora_B.shape) and f.lora_B.shape[0] == out
        rank = f.lora_A.shape[0] // experts if fits else 0
        if not fits or prod(f.lora_A.shape) != experts * rank * cols or prod(f.lora_B.shape) != out * rank * experts:
            raise UnsupportedAdapter(
                f"{delta.name}: lora_A {f.lora_A.shape} and lora_B {f.lora_B.shape} do not fit a weight of shape "
                f"{weight.shape} ({experts} x [{out}, {cols}]); is it sharded or offloaded?"
            )
        if not abs(f.scaling) <= torch.finfo(torch.float32).max:
            raise InvalidInput(f"{delta.name}: scaling must be finite in float32, got {f.scaling}")
    if delta.magnitude is not None:
        _check_values(delta, "the magnitude", delta.magnitude)
        if prod(delta.magnitude.shape) != out:
            raise UnsupportedAdapter(
                f"{delta.name}: DoRA's magnitude has shape {tuple(delta.magnitude.shape)}, expected {out} elements"
            )


def _check_values(delta: Delta, label: str, factor: Shard) -> None:
    """Raise unless a factor of an adapter has values that can be read, where the weight has."""
    for tensor in (piece.tensor for piece in factor.pieces):
        if tensor.is_meta and delta.weight.device.type != "meta":
            raise InvalidInput(f"{delta.name}: {label} is a meta tensor and holds no values; load the adapter first")
        if tensor.layout is not torch.strided:
            raise InvalidInput(f"{delta.name}: {label} must be a dense tensor, got layout {tensor.layout}")
        if tensor.dtype not in FLOATS:
            raise InvalidInput(f"{delta.name}: {label} must be bfloat16, float16 or float32, got {tensor.dtype}")


READERS: dict[str, Callable[[LayerReader], list[Delta]]] = {
    LINEAR: _read_linear,
    EMBEDDING: _read_embedding,
    LAYERS + "Conv1d": _read_conv,
    LAYERS + "Conv2d": _read_conv,
    LAYERS + "Conv3d": _read_conv,
    PARAMETER: _read_parameter,
    **dict.fromkeys(CODED, _read_linear),
}
SCALED = frozenset(READERS)
"""Layers whose adapters have a scaling each."""
READERS[TOKENS] = read_tokens
