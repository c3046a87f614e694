"""Reading adapters out of a live PEFT model (peft 0.18 to 0.21).

Everything here goes by exact type: a layer class or a LoRA variant that is not in the lists below is refused, never
passed over. PEFT is not imported; a model that holds its layers has done so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from ...errors import AlreadyMerged, InvalidInput, LoraMergeError, UnsupportedAdapter
from ...kernels.segments import FLOATS
from ...names import check_module, innermost, lineage, path_of, walk
from ...shards import Shard, quantised, whole
from ...shards.bitsandbytes import turned
from ...shards.layout import Layout
from ..delta import Delta, Factors
from ..plain import remedy
from .forwards import strange_factor, strange_forward, strange_layer
from .tokens import TOKENS, read_tokens
from .uncalled import read_itself

PeftLayer: TypeAlias = Any
"""A layer of PEFT's, whose attributes differ from class to class."""

_TUNER_LAYER = "peft.tuners.tuners_utils.BaseTunerLayer"
_XLORA = "peft.tuners.xlora."
_PEFT_MODEL = "peft.peft_model.PeftModel"
_KINDS = ("LORA", "TRAINABLE_TOKENS")
"""Types of adapters that are read."""
_LAYERS = "peft.tuners.lora.layer."
_VARIANTS = "peft.tuners.lora.variants."

_SAME_AS_LORA = {_VARIANTS + name for name in ("MiCALinearVariant", "MiCAEmbeddingVariant", "VeloraLinearVariant")}
"""Variants whose forward is `scaling * lora_B @ lora_A`: they change initialisation or backward only."""
_DORA = {_VARIANTS + f"Dora{kind}Variant" for kind in ("Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d")}
_REASONS = {
    _VARIANTS + "ALoraLinearVariant": "aLoRA adapts only tokens after its invocation, which no weight can express",
    _VARIANTS + "ArrowLinearVariant": "Arrow picks adapters token by token, which no weight can express",
    _VARIANTS + "QALoraLinearVariant": "QALoRA pools the inputs of a quantised weight",
    _VARIANTS + "BdLoraLinearVariant": "its factors are block-diagonal",
    _VARIANTS + "KasaLinearVariant": "KaSA puts a trained diagonal between the factors and truncates the base",
    _VARIANTS + "MontecloraLinearVariant": "its adapter is sampled anew in every training step",
}

_CODED = tuple(
    f"peft.tuners.lora.{name}"
    for name in ("bnb.Linear4bit", "bnb.Linear8bitLt", "hqq.HqqLoraLinear", "torchao.TorchaoLoraLinear")
)
_LINEAR, _EMBEDDING, _PARAMETER = _LAYERS + "Linear", _LAYERS + "Embedding", _LAYERS + "ParamWrapper"
_BACKEND = "quantization_backend"
_QUANTISED_KINDS = ("aqlm", "awq", "bnb", "eetq", "gptq", "hqq", "inc", "torchao")
_PEFTS = "peft.tuners.lora."
_QUANTISED = tuple(f"{_PEFTS}{kind}." for kind in _QUANTISED_KINDS)
"""Where PEFT keeps its layers for quantised bases."""
_MESH = "_hf_device_mesh"
_SWAPPED = "_did_swap_in_out_features"
_GEOMETRY = ("kernel_size", "stride", "padding", "dilation", "padding_mode")


@dataclass(frozen=True, eq=False)
class Adapters:
    """What a model's forward adds to its base weights, and where.

    Args:
        layers: every adapter layer of the model, with the names of its adapters that act in the forward.
        deltas: one for each parameter that active adapters change.
        users: `Layout.identity` of each parameter -> the places (module, attribute) that hold it; several where it is
            tied.
        layout: where the model's tensors are.
    """

    layers: list[tuple[PeftLayer, list[str]]]
    deltas: list[Delta]
    users: dict[Hashable, list[tuple[nn.Module, str]]]
    layout: Layout

    @cached_property
    def _places(self) -> dict[tuple[int, str], Hashable]:
        return {(id(owner), key): where for where, users in self.users.items() for owner, key in users}

    @cached_property
    def _updates(self) -> dict[tuple[int, str], Hashable]:
        return {(id(delta.owner), delta.attribute): delta.update() for delta in self.deltas}

    def place(self, delta: Delta) -> Hashable:
        """Under which the places of its parameter are among `users`."""
        return self._places[id(delta.owner), delta.attribute]

    def alike(self, where: Hashable) -> bool:
        """Whether adapters do the same to a parameter at all its places."""
        return len({self._updates.get((id(owner), key)) for owner, key in self.users[where]}) == 1


def read_deltas(model: nn.Module) -> list[Delta]:
    """List what the active adapters of a live model add to its parameters, one `Delta` a parameter, in module order.

        for delta in lora_merge.read_deltas(model):
            print(delta.name, delta.shape, [factors.adapter for factors in delta.factors])

    Works on a `PeftModel`, on what `inject_adapter_in_model` returned, and on any module around or inside one. Scalings
    are the live ones. Disabled and inactive adapters contribute nothing. Reads only; nothing is computed.

    Args:
        model: a module with PEFT's LoRA layers.

    Returns:
        one entry for each adapted parameter; it refers to the live tensors, which are not copied.

    Raises:
        UnsupportedAdapter: an active adapter that has no exact merge; names the module and the reason.
        AlreadyMerged: the base weights hold an adapter already.
        InvalidInput: a scaling that is not finite.
    """
    return read_adapters(model).deltas


def read_adapters(model: nn.Module, layout: Layout | None = None) -> Adapters:
    """As `read_deltas`, with the layers and the places of parameters."""
    check_module(model)
    layout = layout or Layout(model)
    found = Adapters([], [], {}, layout)
    layer_name, seen, bare, adapted = "", set(), {}, set()
    classes: dict[str, type] = {}
    for name, module in walk(model):
        classes[name] = type(module)
        kind = _kind(type(module))
        if kind == _TUNER_LAYER:
            layer_name = name
        elif name != layer_name:
            bare[id(module)] = name
        if id(module) in seen:
            continue
        seen.add(id(module))
        if kind == _TUNER_LAYER:
            with _readable(name, module):
                active = _active(name, module)
                _check_called(name, classes)
                deltas = _layer_deltas(name, module, active, layout) if active else []
            found.layers.append((module, active))
            for delta in deltas:
                place = (id(delta.owner), delta.attribute)
                if place in adapted:
                    raise UnsupportedAdapter(f"{delta.name}: two adapter layers change this parameter; target it once")
                adapted.add(place)
                found.deltas.append(delta)
        elif kind == _PEFT_MODEL:
            with _readable(name, module):
                _check_peft_type(module)
        for attribute, parameter in layout.parameters(module):
            if parameter.layout is not torch.strided:
                raise InvalidInput(f"{name}.{attribute}: expected a dense tensor, got layout {parameter.layout}")
            found.users.setdefault(layout.identity(module, attribute, parameter), []).append((module, attribute))
    for delta in found.deltas:
        if id(delta.owner) in bare:
            raise UnsupportedAdapter(
                f"{delta.name}: its module is also used as {bare[id(delta.owner)]}, without the adapter; give that "
                "place a module of its own (it may share the parameter)"
            )
    return found


def _check_called(name: str, classes: Mapping[str, type]) -> None:
    """Raise `UnsupportedAdapter` if the module around an adapted one does not call it.

    Args:
        classes: of the modules by name.
    """
    around, _, child = name.rpartition(".")
    if around in classes and (reader := read_itself(classes[around], child)):
        raise UnsupportedAdapter(
            f"{name}: {reader} computes with this module's weight itself, and does not call the module, so that its "
            f"adapter does nothing, and merged it would: leave {child} out of target_modules, or train the weight "
            "through target_parameters"
        )


@contextmanager
def _readable(name: str, module: PeftLayer) -> Iterator[None]:
    """What is missing in a module, or of another type than PEFT makes it, is an error that names the module."""
    try:
        yield
    except LoraMergeError:
        raise
    except Exception as error:
        raise InvalidInput(
            f"{name or 'the model'}: this {lineage(type(module))[0]} cannot be read ({type(error).__name__}: {error}); "
            "it is not as PEFT 0.18 to 0.21 makes it: load the adapter again, or call add_adapter"
        ) from error


def _kind(cls: type) -> str | None:
    """Which of PEFT's base classes a class descends from."""
    if cls not in _kinds:
        _kinds[cls] = next((path for path in lineage(cls) if path in (_TUNER_LAYER, _PEFT_MODEL)), None)
    return _kinds[cls]


_kinds: dict[type, str | None] = {}


def _peft_types(model: PeftLayer) -> list[tuple[str, str]]:
    """The active adapters of a `PeftModel` and their types; X-LoRA is none of those that it mixes, and acts as well."""
    active = model.active_adapters
    adapters = [active] if isinstance(active, str) else active
    kinds = {a: str(getattr(config.peft_type, "value", "unknown")) for a, config in model.peft_config.items()}
    return [(a, kinds[a]) for a in (*adapters, *(a for a in kinds if kinds[a] == "XLORA"))]


def _check_peft_type(model: PeftLayer) -> None:
    for adapter, kind in _peft_types(model):
        if kind not in _KINDS:
            raise UnsupportedAdapter(
                f"adapter '{adapter}' is of type {kind}; only LoRA adapters and trainable tokens can be merged here"
            )


def _active(name: str, layer: PeftLayer) -> list[str]:
    """The adapters that act in the layer's forward, by name: their sum has no order, and ranks may have them in others
    (`set_adapter` of a set)."""
    if layer.merged_adapters:
        raise AlreadyMerged(
            f"{name or 'the model'}: the base weight already holds the adapters {', '.join(layer.merged_adapters)}. "
            "Inside lora_merge.merged(), leave it first. After PEFT's merge_adapter(), call unmerge_adapter(); that "
            "subtracts and does not bring back the exact weights, so reload the base model where they matter"
        )
    if layer.disable_adapters:
        return []
    there = layer.scaling if path_of(type(layer)) in _SCALED else layer._get_available_adapters()
    return sorted(adapter for adapter in layer.active_adapters if adapter in there)


def _layer_deltas(name: str, layer: PeftLayer, active: list[str], layout: Layout) -> list[Delta]:
    """The deltas of one layer, each checked."""
    path = path_of(type(layer))
    read = _READERS.get(path)
    if read is None:
        reason = _LAYER_REASONS.get(path, "")
        if path.startswith(_QUANTISED):
            reason = f": the base is quantised; {remedy(path.removeprefix(_PEFTS).split('.')[0])}"
        raise UnsupportedAdapter(f"{name}: a {path} cannot be merged here{reason}")
    backend = getattr(layer, _BACKEND, None)
    if backend is not None:
        method = getattr(backend, "backend_name", type(backend).__name__)
        raise UnsupportedAdapter(f"{name}: the base is quantised ({method}); {remedy(method)}")
    base = innermost(layer)
    if base.__dict__.get(_MESH) is not None:
        raise UnsupportedAdapter(
            f"{name}: the base is sharded by transformers' tensor parallelism (tp_plan); load it without, and "
            "shard it with FSDP2"
        )
    if (forward := strange_layer(layer)) is not None:
        if forward.startswith(_XLORA):
            raise UnsupportedAdapter(
                f"{name}: X-LoRA ({forward}) scales the adapter for each token, which no weight can"
            )
        warnings.warn(
            f"lora_merge: a {path} computes by {forward}, not by PEFT's own forward. Merged is what PEFT's adds, "
            "scaling * lora_B @ lora_A: make sure that this one does the same",
            stacklevel=2,
        )
    dora = [adapter for adapter in active if path != TOKENS and _is_dora(name, layer, adapter)]
    if dora and len(active) > 1:
        raise UnsupportedAdapter(
            f"{name}: DoRA adapter '{dora[0]}' beside others ({', '.join(active)}): their result depends on the "
            "order; activate it alone"
        )
    forward = None if path == _PARAMETER else strange_forward(base)
    if forward is not None:
        raise UnsupportedAdapter(
            f"{name}: the base, a {lineage(type(base))[0]}, computes by {forward}; expected a forward that is known to "
            "be linear in the weight (torch's and those in lora_merge/models/peft/forwards.py): with another one, "
            "merging is not what the adapter does. Serve the adapter as it is, or train the weight through "
            "target_parameters, where PEFT adds to the weight itself"
        )
    reading = _Reading(name, layer, base, active, layout)
    deltas = read(reading)
    if dora:
        magnitude = reading.shard(_part(layer, "lora_magnitude_vector", dora[0]), "weight")
        deltas[0] = replace(deltas[0], magnitude=magnitude)
    for delta in deltas:
        _check(delta)
    return deltas


class _Reading(NamedTuple):
    """One layer that is being read.

    Args:
        name: of the layer.
        base: the module inside it.
        active: its adapters that act in the forward.
    """

    name: str
    layer: PeftLayer
    base: PeftLayer
    active: list[str]
    layout: Layout

    def shard(self, owner: nn.Module, attribute: str) -> Shard:
        found = self.layout.of(self.name, owner, attribute)
        if found is None:
            which = "" if owner is self.base else " of its adapter"
            raise UnsupportedAdapter(
                f"{self.name}.{attribute}: {type(owner).__name__}{which} has no plain parameter '{attribute}' (a "
                "quantised, parametrised or offloaded one cannot be merged here; torch.nn.utils.prune.remove, "
                "remove_weight_norm and parametrize.remove_parametrizations make plain what was pruned or parametrised)"
            )
        return found

    def delta(
        self, attribute: str, factors: tuple[Factors, ...], experts: int | None = None, transposed: bool = False
    ) -> Delta:
        weight = self.shard(self.base, attribute)
        name = f"{self.name}.{attribute}"
        transposed ^= attribute == "weight" and turned(self.base)
        return Delta(name, weight, factors, experts, transposed, None, self.base, attribute)

    def factors(self) -> tuple[Factors, ...]:
        found = []
        for adapter in self.active:
            lora_A, lora_B = (_part(self.layer, kind, adapter) for kind in ("lora_A", "lora_B"))
            for half, part in (("lora_A", lora_A), ("lora_B", lora_B)):
                if (forward := strange_factor(part)) is not None:
                    raise UnsupportedAdapter(
                        f"{self.name}: {half} of '{adapter}', a {path_of(type(part))}, computes by {forward}; expected "
                        "the forward of torch's own layer: merging is not what another one does"
                    )
            if getattr(lora_A, "bias", None) is not None:
                raise UnsupportedAdapter(f"{self.name}: lora_A of '{adapter}' has a bias, which no weight can express")
            halves = self.shard(lora_A, "weight"), self.shard(lora_B, "weight")
            found.append(Factors(*halves, self.scaling(adapter), adapter))
        return tuple(found)

    def scaling(self, adapter: str) -> float:
        scaling = self.layer.scaling[adapter]
        try:
            return float(scaling)
        except (TypeError, ValueError):
            told = f"the scaling of '{adapter}' must be a number, got {scaling!r}"
            raise InvalidInput(f"{self.name}: {told}; call set_scale('{adapter}', 1.0)") from None


def _is_dora(name: str, layer: PeftLayer, adapter: str) -> bool:
    variant = layer.lora_variant.get(adapter)
    if variant is None:
        return False
    path = lineage(type(variant))[0]
    if path not in _DORA and path not in _SAME_AS_LORA:
        reason = _REASONS.get(path, "an unknown variant")
        raise UnsupportedAdapter(f"{name}: adapter '{adapter}' cannot be merged here: {reason} ({path})")
    return path in _DORA


def _part(layer: PeftLayer, kind: str, adapter: str) -> nn.Module:
    """`layer.kind[adapter]`, straight from the dicts: with thousands of them, `__getattr__` would take longest."""
    return innermost(layer._modules[kind]._modules[adapter])


def _read_linear(reading: _Reading) -> list[Delta]:
    """nn.Linear, and Conv1D with `fan_in_fan_out`."""
    transposed = bool(reading.layer.fan_in_fan_out)
    return [reading.delta("weight", reading.factors(), None, transposed), *_read_bias(reading)]


def _read_conv(reading: _Reading) -> list[Delta]:
    """A convolution. lora_A strides over the input as the base does and lora_B is 1x1, so that the composed kernel is
    the product of the flattened factors."""
    name, base = reading.name, reading.base
    if base.groups > 1:
        raise UnsupportedAdapter(f"{name}: a convolution with {base.groups} groups cannot be merged (nor does PEFT)")
    weight = reading.delta("weight", reading.factors())
    for adapter, factor in zip(reading.active, weight.factors, strict=True):
        lora_A = _part(reading.layer, "lora_A", adapter)
        for what in _GEOMETRY:
            if getattr(base, what) != getattr(lora_A, what):
                raise UnsupportedAdapter(
                    f"{name}: the base convolves with {what} {getattr(base, what)}, lora_A of '{adapter}' with "
                    f"{getattr(lora_A, what)}: their sum is no convolution with one weight"
                )
        for shard in (weight.weight, factor.lora_A, factor.lora_B):
            if shard.whole and not shard.pieces[0].tensor.is_contiguous():
                raise UnsupportedAdapter(f"{name}: weights of convolutions must be contiguous, not channels_last")
    return [weight, *_read_bias(reading)]


def _read_bias(reading: _Reading) -> list[Delta]:
    """`lora_bias` adds `scaling * lora_B.bias` to the base's bias: rank 1, with a one as lora_A."""
    layer, base = reading.layer, reading.base
    factors = []
    for adapter in reading.active:
        lora_B = _part(layer, "lora_B", adapter)
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


def _read_embedding(reading: _Reading) -> list[Delta]:
    """Stored `[vocabulary, dim]`; lora_A is `[r, vocabulary]` and lora_B `[dim, r]`, so out = dim, in = vocabulary."""
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


def _read_parameter(reading: _Reading) -> list[Delta]:
    """A parameter of its own (`target_parameters`), mostly the fused experts of a layer.

    PEFT before 0.19 takes every 3-D parameter as `[E, in, out]`; later it asks the module (`is_transposed`) and notes
    in `_did_swap_in_out_features` that it is `[E, out, in]`. With one expert it adds `lora_B @ lora_A` as it is.
    """
    layer, attribute = reading.layer, reading.layer.parameter_name
    dims = len(reading.shard(reading.base, attribute).shape)
    transposed = layer.num_experts > 1 and not getattr(layer, _SWAPPED, False)
    return [reading.delta(attribute, reading.factors(), layer.num_experts if dims == 3 else None, transposed)]


def _check(delta: Delta) -> None:
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


_READERS: dict[str, Callable[[_Reading], list[Delta]]] = {
    _LINEAR: _read_linear,
    _EMBEDDING: _read_embedding,
    _LAYERS + "Conv1d": _read_conv,
    _LAYERS + "Conv2d": _read_conv,
    _LAYERS + "Conv3d": _read_conv,
    _PARAMETER: _read_parameter,
    **dict.fromkeys(_CODED, _read_linear),
}
_SCALED = frozenset(_READERS)
"""Those whose adapters have a scaling each."""
_READERS[TOKENS] = read_tokens
_LAYER_REASONS = {
    _LAYERS + "MultiheadAttention": ": its forward replaces the base's parameters by new ones at every call",
}
