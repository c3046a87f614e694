"""Reading adapters out of a live PEFT model (peft 0.18 to 0.21).

Everything here goes by exact type: a layer class or a LoRA variant that is not in the lists below is refused, never
passed over. PEFT is not imported; a model that holds its layers has done so.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from ...errors import AlreadyMerged, InvalidInput, LoraMergeError, UnsupportedAdapter
from ...names import check_module, innermost, lineage, path_of, walk
from ...shards.layout import Layout
from ..delta import Delta
from ..plain import remedy
from .forwards import strange_forward, strange_layer
from .layer import (
    BACKEND,
    LAYERS,
    MESH,
    PARAMETER,
    PEFT_MODEL,
    TUNER_LAYER,
    LayerReader,
    PeftLayer,
    part_of,
    peft_class,
)
from .readers import READERS, SCALED, check_delta
from .tokens import TOKENS
from .uncalled import read_itself

_XLORA = "peft.tuners.xlora."
ADAPTER_TYPES = ("LORA", "TRAINABLE_TOKENS")
"""Types of adapters that are read."""
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
_LAYER_REASONS = {
    LAYERS + "MultiheadAttention": ": its forward replaces the base's parameters by new ones at every call",
}

_QUANTISED_KINDS = ("aqlm", "awq", "bnb", "eetq", "gptq", "hqq", "inc", "torchao")
_PEFTS = "peft.tuners.lora."
_QUANTISED = tuple(f"{_PEFTS}{kind}." for kind in _QUANTISED_KINDS)
"""Where PEFT keeps its layers for quantised bases."""


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
        """Return the key under which the places of its parameter are among `users`."""
        return self._places[id(delta.owner), delta.attribute]

    def alike(self, where: Hashable) -> bool:
        """Return True if adapters do the same to a parameter at all its places."""
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
    """Read deltas as `read_deltas` does, with the layers and the places of parameters."""
    check_module(model)
    layout = layout or Layout(model)
    found = Adapters([], [], {}, layout)
    layer_name, seen, bare, adapted = "", set(), {}, set()
    classes: dict[str, type] = {}
    for name, module in walk(model):
        cls: type = type(module)
        classes[name], kind = cls, peft_class(cls)
        if kind == TUNER_LAYER:
            layer_name = name
        elif name != layer_name:
            bare[id(module)] = name
        if id(module) in seen:
            continue
        seen.add(id(module))
        if kind == TUNER_LAYER:
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
        elif kind == PEFT_MODEL:
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
            f"{name}: {reader} computes with this module's weight itself and does not call the module, so that its "
            f"adapter has no effect and would get one by merging: leave {child} out of target_modules, or train the "
            "weight through target_parameters"
        )


@contextmanager
def _readable(name: str, module: PeftLayer) -> Iterator[None]:
    """Raise an error that names the module for what is missing in it, or of another type than PEFT makes it."""
    try:
        yield
    except LoraMergeError:
        raise
    except Exception as error:
        raise InvalidInput(
            f"{name or 'the model'}: this {lineage(type(module))[0]} cannot be read ({type(error).__name__}: {error}); "
            "it is not as PEFT 0.18 to 0.21 makes it: load the adapter again, or call add_adapter"
        ) from error


def adapter_types(model: PeftLayer) -> list[tuple[str, str]]:
    """Return the active adapters of a `PeftModel` and their types; X-LoRA is none of those that it mixes, and acts as
    well."""
    active = model.active_adapters
    adapters = [active] if isinstance(active, str) else active
    kinds = {a: str(getattr(config.peft_type, "value", "unknown")) for a, config in model.peft_config.items()}
    return [(a, kinds[a]) for a in (*adapters, *(a for a in kinds if kinds[a] == "XLORA"))]


def _check_peft_type(model: PeftLayer) -> None:
    for adapter, kind in adapter_types(model):
        if kind not in ADAPTER_TYPES:
            raise UnsupportedAdapter(
                f"adapter '{adapter}' is of type {kind}; only LoRA adapters and trainable tokens can be merged here"
            )


def _active(name: str, layer: PeftLayer) -> list[str]:
    """Return the names of the adapters that act in the layer's forward, sorted: their sum has no order, and ranks may
    have them in others (`set_adapter` of a set)."""
    if layer.merged_adapters:
        raise AlreadyMerged(
            f"{name or 'the model'}: the base weight already holds the adapters {', '.join(layer.merged_adapters)}. "
            "Inside lora_merge.merged(), leave it first. After PEFT's merge_adapter(), call unmerge_adapter(); that "
            "subtracts and does not bring back the exact weights, so reload the base model where they matter"
        )
    if layer.disable_adapters:
        return []
    there = layer.scaling if path_of(type(layer)) in SCALED else layer._get_available_adapters()
    return sorted(adapter for adapter in layer.active_adapters if adapter in there)


def _layer_deltas(name: str, layer: PeftLayer, active: list[str], layout: Layout) -> list[Delta]:
    path = path_of(type(layer))
    read = READERS.get(path)
    if read is None:
        reason = _LAYER_REASONS.get(path, "")
        if path.startswith(_QUANTISED):
            reason = f": the base is quantised; {remedy(path.removeprefix(_PEFTS).split('.')[0])}"
        raise UnsupportedAdapter(f"{name}: a {path} cannot be merged here{reason}")
    backend = getattr(layer, BACKEND, None)
    if backend is not None:
        method = getattr(backend, "backend_name", type(backend).__name__)
        raise UnsupportedAdapter(f"{name}: the base is quantised ({method}); {remedy(method)}")
    base = innermost(layer)
    if base.__dict__.get(MESH) is not None:
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
    forward = None if path == PARAMETER else strange_forward(base)
    if forward is not None:
        raise UnsupportedAdapter(
            f"{name}: the base, a {lineage(type(base))[0]}, computes by {forward}; expected a forward that is known to "
            "be linear in the weight (torch's and those in lora_merge/models/peft/forwards.py): with another one, "
            "merging is not what the adapter does. Serve the adapter as it is, or train the weight through "
            "target_parameters, where PEFT adds to the weight itself"
        )
    reading = LayerReader(name, layer, base, active, layout)
    deltas = read(reading)
    if dora:
        magnitude = reading.shard(part_of(layer, "lora_magnitude_vector", dora[0]), "weight")
        deltas[0] = replace(deltas[0], magnitude=magnitude)
    for delta in deltas:
        check_delta(delta)
    return deltas


def _is_dora(name: str, layer: PeftLayer, adapter: str) -> bool:
    variant = layer.lora_variant.get(adapter)
    if variant is None:
        return False
    path = lineage(type(variant))[0]
    if path not in _DORA and path not in _SAME_AS_LORA:
        reason = _REASONS.get(path, "an unknown variant")
        raise UnsupportedAdapter(f"{name}: adapter '{adapter}' cannot be merged here: {reason} ({path})")
    return path in _DORA
