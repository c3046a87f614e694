"""Reading adapters out of a live PEFT model (peft 0.18 to 0.21).

Everything here goes by exact type: a layer class or a LoRA variant that is not in the lists below is refused, never
passed over. PEFT is not imported; a model that holds its layers has done so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .delta import Delta, Factors
from .errors import AlreadyMerged, InvalidInput, UnsupportedAdapter
from .names import lineage, walk
from .segments import FLOATS

PeftLayer: TypeAlias = Any
"""A layer of PEFT's, whose attributes differ from class to class."""

_TUNER_LAYER = "peft.tuners.tuners_utils.BaseTunerLayer"
_PEFT_MODEL = "peft.peft_model.PeftModel"
_LAYERS = "peft.tuners.lora.layer."
_VARIANTS = "peft.tuners.lora.variants."

_SAME_AS_LORA = {"MiCALinearVariant", "MiCAEmbeddingVariant", "VeloraLinearVariant"}
"""Variants whose forward is `scaling * lora_B @ lora_A`: they change initialisation or backward only."""
_DORA = {
    "DoraLinearVariant",
    "DoraEmbeddingVariant",
    "DoraConv1dVariant",
    "DoraConv2dVariant",
    "DoraConv3dVariant",
}
_REASONS = {
    "ALoraLinearVariant": "aLoRA adapts only the tokens after its invocation, which no single weight can express",
    "ArrowLinearVariant": "Arrow picks adapters token by token, which no single weight can express",
    "QALoraLinearVariant": "QALoRA pools the inputs of a quantised weight",
    "BdLoraLinearVariant": "its factors are block-diagonal",
    "KasaLinearVariant": "KaSA puts a trained diagonal between the factors and truncates the base",
    "MontecloraLinearVariant": "its adapter is sampled anew at each training step",
}


@dataclass(frozen=True, slots=True, eq=False)
class Adapters:
    """What a model's forward adds to its base weights, and where.

    Args:
        layers: every adapter layer of the model, with the names of its adapters that act in the forward.
        deltas: one for each parameter that active adapters change.
        users: address of each parameter -> the places (module, attribute) that hold it; several where it is tied.
    """

    layers: list[tuple[PeftLayer, list[str]]]
    deltas: list[Delta]
    users: dict[int, list[tuple[nn.Module, str]]]


def read_deltas(model: nn.Module) -> list[Delta]:
    """What the active adapters of a live model add to its parameters, in the order of the modules.

    Works on a `PeftModel`, on what `inject_adapter_in_model` returned, and on any module around or inside one.
    Scalings are the live ones. Disabled and inactive adapters contribute nothing.

    Raises:
        UnsupportedAdapter: an active adapter that has no exact merge here; names the module and the reason.
        AlreadyMerged: the base weights hold an adapter already.
        InvalidInput: a scaling that is not finite.
    """
    return read_adapters(model).deltas


def read_adapters(model: nn.Module) -> Adapters:
    """As `read_deltas`, with the layers and the places of parameters."""
    found = Adapters([], [], {})
    seen: set[int] = set()
    adapted: set[tuple[int, str]] = set()
    for name, module in walk(model):
        if id(module) in seen:
            continue
        seen.add(id(module))
        ancestors = lineage(type(module))
        if _TUNER_LAYER in ancestors:
            _check_merged(name, module)
            active = _active(module)
            found.layers.append((module, active))
            for delta in _layer_deltas(name, module, active) if active else ():
                place = (id(delta.owner), delta.attribute)
                if place in adapted:
                    raise UnsupportedAdapter(f"{delta.name}: two adapter layers change this parameter; target it once")
                adapted.add(place)
                found.deltas.append(delta)
        elif _PEFT_MODEL in ancestors:
            _check_peft_type(module)
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                found.users.setdefault(parameter.data_ptr(), []).append((module, attribute))
    return found


def _check_peft_type(model: PeftLayer) -> None:
    active = model.active_adapters
    for adapter in [active] if isinstance(active, str) else active:
        kind = model.peft_config[adapter].peft_type
        if getattr(kind, "value", kind) != "LORA":
            raise UnsupportedAdapter(f"adapter '{adapter}' is of type {kind}; only LoRA adapters can be merged here")


def _check_merged(name: str, layer: PeftLayer) -> None:
    if layer.merged:
        raise AlreadyMerged(
            f"{name}: the base weight already holds the adapters {', '.join(layer.merged_adapters)}. Inside "
            "lora_merge.merged(), leave it first. After PEFT's merge_adapter(), call unmerge_adapter(); that subtracts "
            "and does not bring back the exact weights, so reload the base model where they matter"
        )


def _active(layer: PeftLayer) -> list[str]:
    if layer.disable_adapters:
        return []
    there = layer._get_available_adapters()
    return [adapter for adapter in layer.active_adapters if adapter in there]


def _layer_deltas(name: str, layer: PeftLayer, active: list[str]) -> Iterator[Delta]:
    """The deltas of one layer, each checked."""
    path = f"{type(layer).__module__}.{type(layer).__qualname__}"
    read = _READERS.get(path)
    if read is None:
        raise UnsupportedAdapter(f"{name}: a {path} cannot be merged here{_LAYER_REASONS.get(path, '')}")
    if getattr(layer, "quantization_backend", None) is not None:
        raise UnsupportedAdapter(f"{name}: the base is quantised ({layer.quantization_backend}); merge a float one")
    if getattr(layer.get_base_layer(), "_hf_device_mesh", None) is not None:
        raise UnsupportedAdapter(f"{name}: the base is sharded by transformers' tensor parallelism")
    dora = [adapter for adapter in active if _variant_is_dora(name, layer, adapter)]
    if dora and len(active) > 1:
        raise UnsupportedAdapter(
            f"{name}: DoRA adapter '{dora[0]}' beside others ({', '.join(active)}): their result depends on the "
            "order; activate it alone"
        )
    for delta in read(name, layer, active):
        _check(delta)
        yield delta


def _variant_is_dora(name: str, layer: PeftLayer, adapter: str) -> bool:
    variant = layer.lora_variant.get(adapter)
    if variant is None:
        return False
    kind = type(variant).__qualname__
    if type(variant).__module__ + "." == _VARIANTS and kind in _DORA:
        return True
    if type(variant).__module__ + "." == _VARIANTS and kind in _SAME_AS_LORA:
        return False
    reason = _REASONS.get(kind, "an unknown variant")
    raise UnsupportedAdapter(f"{name}: adapter '{adapter}' is a {kind}, which cannot be merged here: {reason}")


def _read_linear(name: str, layer: PeftLayer, active: list[str]) -> Iterator[Delta]:
    """nn.Linear, and Conv1D with `fan_in_fan_out`."""
    factors = tuple(Factors(layer.lora_A[a].weight, layer.lora_B[a].weight, layer.scaling[a]) for a in active)
    owner = layer.get_base_layer()
    magnitude = _magnitude(layer, active)
    yield Delta(f"{name}.weight", owner, "weight", factors, None, bool(layer.fan_in_fan_out), magnitude)
    yield from _read_bias(name, layer, active)


def _read_conv(name: str, layer: PeftLayer, active: list[str]) -> Iterator[Delta]:
    """A convolution whose first factor strides over the input as the base does: lora_B is 1x1, so the product of
    the flattened factors is the composed kernel."""
    base = layer.get_base_layer()
    if base.groups > 1:
        raise UnsupportedAdapter(f"{name}: a convolution with {base.groups} groups cannot be merged (nor does PEFT)")
    for adapter in active:
        for what in ("kernel_size", "stride", "padding", "dilation", "padding_mode"):
            ours, theirs = getattr(base, what), getattr(layer.lora_A[adapter], what)
            if ours != theirs:
                raise UnsupportedAdapter(
                    f"{name}: the base convolves with {what} {ours}, lora_A of '{adapter}' with {theirs}: PEFT's "
                    "forward is not a convolution with one merged weight"
                )
    factors = tuple(Factors(layer.lora_A[a].weight, layer.lora_B[a].weight, layer.scaling[a]) for a in active)
    if not all(t.is_contiguous() for f in factors for t in (base.weight, f.lora_A, f.lora_B)):
        raise UnsupportedAdapter(f"{name}: convolutions must be contiguous, not channels_last")
    yield Delta(f"{name}.weight", base, "weight", factors, magnitude=_magnitude(layer, active))
    yield from _read_bias(name, layer, active)


def _read_embedding(name: str, layer: PeftLayer, active: list[str]) -> Iterator[Delta]:
    """Stored `[vocabulary, dim]`; lora_A is `[r, vocabulary]` and lora_B `[dim, r]`, so out = dim, in = vocabulary."""
    owner = layer.get_base_layer()
    if owner.max_norm is not None:
        raise UnsupportedAdapter(f"{name}: an Embedding with max_norm rescales its weight in the forward")
    factors = tuple(Factors(layer.lora_embedding_A[a], layer.lora_embedding_B[a], layer.scaling[a]) for a in active)
    magnitude = _magnitude(layer, active)
    yield Delta(f"{name}.weight", owner, "weight", factors, None, True, magnitude)


def _read_parameter(name: str, layer: PeftLayer, active: list[str]) -> Iterator[Delta]:
    """A parameter of its own (`target_parameters`), mostly the fused experts of a layer.

    PEFT before 0.19 takes every 3-D parameter as `[E, in, out]`; later it asks the module (`is_transposed`) and notes
    in `_did_swap_in_out_features` that it is `[E, out, in]`. With one expert it adds `lora_B @ lora_A` as it is.
    """
    owner = layer.get_base_layer()
    factors = tuple(Factors(layer.lora_A[a].weight, layer.lora_B[a].weight, layer.scaling[a]) for a in active)
    experts = layer.num_experts if layer.get_param().dim() == 3 else None
    transposed = layer.num_experts > 1 and not getattr(layer, "_did_swap_in_out_features", False)
    yield Delta(f"{name}.{layer.parameter_name}", owner, layer.parameter_name, factors, experts, transposed)


def _read_bias(name: str, layer: PeftLayer, active: list[str]) -> Iterator[Delta]:
    """`lora_bias` adds `scaling * lora_B.bias` to the base's bias: rank 1, with ones as lora_A."""
    biased = [adapter for adapter in active if layer.lora_B[adapter].bias is not None]
    if not biased:
        return
    owner = layer.get_base_layer()
    if owner.bias is None:
        raise UnsupportedAdapter(
            f"{name}: adapter '{biased[0]}' has lora_bias, but the base has no bias to merge it into"
        )
    biases = [(layer.lora_B[adapter].bias.detach(), layer.scaling[adapter]) for adapter in biased]
    factors = tuple(Factors(_one(bias.dtype, bias.device), bias.unsqueeze(1), scaling) for bias, scaling in biases)
    yield Delta(f"{name}.bias", owner, "bias", factors)


@cache
def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(1, 1, dtype=dtype, device=device)


def _magnitude(layer: PeftLayer, active: list[str]) -> Tensor | None:
    """DoRA's magnitude vector of the only active adapter."""
    if layer.lora_variant.get(active[0]) is None or active[0] not in layer.lora_magnitude_vector:
        return None
    return layer.lora_magnitude_vector[active[0]].weight


def _check(delta: Delta) -> None:
    """Raise unless the parameter is a plain float one and the factors fit it."""
    parameter = delta.owner._parameters.get(delta.attribute)
    if parameter is None:
        raise UnsupportedAdapter(
            f"{delta.name}: {type(delta.owner).__name__} has no plain parameter '{delta.attribute}' (a quantised, "
            "parametrised or offloaded one cannot be merged here)"
        )
    kind = type(parameter.data)
    if parameter.dtype not in FLOATS or kind.__name__ not in ("Tensor", "DTensor"):
        raise UnsupportedAdapter(
            f"{delta.name}: the base is a {kind.__name__} of {parameter.dtype}; only plain bfloat16, float16 and "
            "float32 weights can be merged here, not quantised ones"
        )
    if parameter.dim() != (2 if delta.experts is None else 3) and not parameter.is_contiguous():
        raise UnsupportedAdapter(f"{delta.name}: the base must be contiguous, got strides {parameter.stride()}")
    (out, cols), experts = delta.shape, delta.experts or 1
    for f in delta.factors:
        rank = f.lora_A.shape[0] // experts
        if f.lora_A.numel() != experts * rank * cols or f.lora_B.numel() != out * rank * experts:
            raise UnsupportedAdapter(
                f"{delta.name}: lora_A {tuple(f.lora_A.shape)} and lora_B {tuple(f.lora_B.shape)} do not fit a weight "
                f"of shape {tuple(parameter.shape)} ({experts} x [{out}, {cols}]); is it sharded or offloaded?"
            )
        if not math.isfinite(f.scaling):
            raise InvalidInput(f"{delta.name}: scaling must be finite, got {f.scaling}")


_READERS: dict[str, Callable[[str, PeftLayer, list[str]], Iterator[Delta]]] = {
    _LAYERS + "Linear": _read_linear,
    _LAYERS + "Embedding": _read_embedding,
    _LAYERS + "Conv1d": _read_conv,
    _LAYERS + "Conv2d": _read_conv,
    _LAYERS + "Conv3d": _read_conv,
    _LAYERS + "ParamWrapper": _read_parameter,
}
_LAYER_REASONS = {
    _LAYERS + "MultiheadAttention": ": its forward replaces the base's parameters by new ones at every call",
    "peft.tuners.trainable_tokens.layer.TrainableTokensLayer": ": trainable tokens replace rows, not add to them",
}
