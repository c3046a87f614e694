"""All that reading PEFT's layers depends on, beside which modules they are and their parameters: part of a snapshot.

What `read.py` and `readers.py` look at has its place here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import compress, repeat
from operator import attrgetter, contains, is_, itemgetter, methodcaller
from typing import Any, NamedTuple

from torch import nn

from ...names import Trail, any_wrapper, column, innermost, path_of
from ..watch import Look, Question
from .forwards import OWN
from .layer import (
    BACKEND,
    CODED,
    EMBEDDING,
    GEOMETRY,
    LINEAR,
    MESH,
    PARAMETER,
    PEFT_MODEL,
    SWAPPED,
    PeftLayer,
    peft_class,
)
from .read import adapter_types
from .readers import READERS
from .tokens import TOKENS, TRAINED

_FORWARD, _OLD_FORWARD = methodcaller("get", "forward"), methodcaller("get", "_old_forward")
_CONV_FORWARD = methodcaller("get", "_conv_forward")
_OWN = tuple(sorted(OWN))
_LOOK = attrgetter("merged_adapters", "disable_adapters", "active_adapters", "scaling", "lora_variant")


class AdapterFacts(NamedTuple):
    """All that `read_adapters` looks at in the modules of a model, beside which they are and their parameters.

    Args:
        facts: values to be compared.
        parts: the modules of the active adapters, whose parameters are looked at.
        kinds: classes of the modules around these.
        looks, asked: where these came from, in order, for a `Watch`.
    """

    facts: list[Any]
    parts: list[nn.Module]
    kinds: set[type]
    looks: list[Look]
    asked: list[tuple[Question, list[Any]]]


def adapter_facts(seen: Trail) -> AdapterFacts:
    """Return the facts of the modules of a model."""
    found = AdapterFacts([], [], set(), [], [])
    modules, classes, insides, _ = seen
    for cls in dict.fromkeys(classes):
        kind = peft_class(cls)
        if kind is None:
            continue
        chosen = list(map(is_, classes, repeat(cls)))
        some: list[PeftLayer] = list(compress(modules, chosen))
        if kind == PEFT_MODEL:
            found.facts.extend(map(adapter_types, some))
            found.asked.append((adapter_types, some))
            continue
        alike = _alike(cls, some, list(compress(insides, chosen)))
        if alike is None:
            alike = AdapterFacts([], [], set(), [], [(_answer, some)])
            alike.facts.extend([_layer_facts(layer, alike.parts) for layer in some])
            around = [child for layer in some for child in layer._modules.values() if child is not None]
            alike.kinds.update(map(type, around))
            alike.looks.append(Look(around, ("_modules",), "n"))
        found.facts.extend(alike.facts)
        found.parts.extend(alike.parts)
        found.kinds.update(alike.kinds)
        found.looks.extend(alike.looks)
        found.asked.extend(alike.asked)
    if any(map(contains, insides, repeat(MESH))):
        found.facts.extend((id(m), inside[MESH]) for m, inside in zip(modules, insides, strict=True) if MESH in inside)
    parts = [innermost(part) for part in found.parts] if any_wrapper(found.parts) else found.parts
    within = list(map(vars, parts))
    found.looks.append(Look(parts, _OWN, "t" * len(_OWN), within))
    if not all(map(OWN.isdisjoint, within)):
        found.facts.extend(id(inside.get(name)) for inside in within for name in _OWN)
    return found._replace(parts=parts)


def _alike(cls: type, layers: Sequence[PeftLayer], insides: Sequence[dict[str, Any]]) -> AdapterFacts | None:
    """Return the facts of linear layers in all of which the same adapters act, attribute by attribute: of thousands of
    experts, `_layer_facts` would take longer than merging them. None where they are not like that, or not as PEFT makes
    them."""
    if path_of(cls) != LINEAR or not _keeps_fields(cls):
        return None
    try:
        merged, disabled, active, scalings, variants, transposed, children = (
            list(map(itemgetter(name), insides)) for name in (*_FIELDS, "fan_in_fan_out", "_modules")
        )
        if any(disabled) or active.count(active[0]) != len(active) or merged.count(merged[0]) != len(merged):
            return None
        if any(map(contains, insides, repeat(BACKEND))):
            return None
        names = [active[0]] if isinstance(active[0], str) else list(active[0])
        found = AdapterFacts([cls, len(layers), *names, None, *merged[0]], [], set(), [], [])
        inner: list[nn.Module] = list(map(itemgetter("base_layer"), children))
        bases = list(map(vars, inner))
        found.looks.append(Look(layers, (*_FIELDS, "fan_in_fan_out", BACKEND), "vvvvtvt", insides))
        for modules, within in ((inner, bases), (layers, insides)):
            found.looks.append(Look(modules, ("forward", "_old_forward"), "tt", within))
            forwards = [*map(_FORWARD, within), *map(_OLD_FORWARD, within)]
            found.facts.extend(map(id, forwards) if any(forwards) else ())
        found.facts.extend(transposed)
        varied = variants.count({}) != len(variants)
        halves = ("lora_A", "lora_B", "lora_magnitude_vector") if varied else ("lora_A", "lora_B")
        for name in names:
            found.facts.extend(map(float, map(itemgetter(name), scalings)))
            found.facts.extend(map(type, map(dict.get, variants, repeat(name))) if varied else ())
            for half in halves:
                holders: list[nn.Module] = list(map(itemgetter(half), children))
                within = list(map(vars, holders))
                found.kinds.update(map(type, holders))
                found.parts.extend(map(itemgetter(name), column("_modules", within, holders)))
                found.looks.append(Look(holders, ("_modules",), "n", within))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return found


_FIELDS = ("merged_adapters", "_disable_adapters", "_active_adapter", "scaling", "lora_variant")
_PROPERTIES = {
    "disable_adapters": {"_disable_adapters"},
    "active_adapter": {"_active_adapter"},
    "active_adapters": {"active_adapter", "isinstance", "str"},
}
"""PEFT's properties of a layer, and what their code names."""


@cache
def _keeps_fields(cls: type) -> bool:
    """Return True if a layer's properties are what its `_FIELDS` say, and nothing of its class hides one of these."""
    own = all(not hasattr(getattr(cls, name, None), "__set__") for name in (*_FIELDS, "fan_in_fan_out", "_modules"))
    gets = {name: getattr(getattr(cls, name, None), "fget", None) for name in _PROPERTIES}
    codes = {name: getattr(get, "__code__", None) for name, get in gets.items()}
    read = all(code is not None and set(code.co_names) == _PROPERTIES[name] for name, code in codes.items())
    return own and read and getattr(cls, BACKEND, None) is None


def _answer(layer: PeftLayer) -> list[Any]:
    """Return everything that reading one layer depends on."""
    parts: list[nn.Module] = []
    facts = _layer_facts(layer, parts)
    return [*facts, *map(id, parts)]


def _token_facts(layer: PeftLayer, parts: list[nn.Module]) -> list[Any]:
    inside, base = layer._modules, vars(layer._modules["base_layer"])
    parts.append(inside[TRAINED])
    facts = [*layer.merged_adapters, layer.disable_adapters, *layer.active_adapters]
    facts += [id(keeps(held)) for keeps in (_FORWARD, _OLD_FORWARD) for held in (base, vars(layer))]
    facts += [(name, tuple(layer.token_indices[name])) for name in layer.active_adapters if name in layer.token_indices]
    return [*facts, getattr(innermost(layer), "max_norm", None), hasattr(innermost(layer), "embed_scale")]


def _layer_facts(layer: PeftLayer, parts: list[nn.Module]) -> list[Any]:
    """Return the facts of one layer; add the modules of its active adapters to `parts`."""
    path = path_of(type(layer))
    if path not in READERS:
        there = frozenset() if layer.disable_adapters else frozenset(layer._get_available_adapters())
        return [*layer.merged_adapters, layer.disable_adapters, *layer.active_adapters, there]
    if path == TOKENS:
        return _token_facts(layer, parts)
    merged, disabled, active, scaling, variants = _LOOK(layer)
    inside, begin = layer._modules, len(parts)
    base = vars(inside["base_layer"])
    around = [id(keeps(held)) for keeps in (_FORWARD, _OLD_FORWARD) for held in (base, vars(layer))]
    facts = [*merged, disabled, *around, getattr(layer, BACKEND, None) is None]
    lora_A, lora_B = inside["lora_A"]._modules, inside["lora_B"]._modules
    magnitudes = inside["lora_magnitude_vector"]._modules
    for adapter in () if disabled else active:
        if adapter in scaling:
            facts += (adapter, float(scaling[adapter]), type(variants.get(adapter)))
            if adapter in lora_A:
                parts += (lora_A[adapter], lora_B[adapter])
            if adapter in magnitudes:
                parts.append(magnitudes[adapter])
    if path == LINEAR or path in CODED:
        facts.append(layer.fan_in_fan_out)
    elif path == EMBEDDING:
        parts += (inside["lora_embedding_A"], inside["lora_embedding_B"])
        facts += (innermost(layer).max_norm, hasattr(innermost(layer), "embed_scale"))
    elif path == PARAMETER:
        facts += (layer.parameter_name, layer.num_experts, getattr(layer, SWAPPED, False))
    else:
        base = innermost(layer)
        convs = [base, *(innermost(part) for part in parts[begin:])]
        facts += [
            id(_CONV_FORWARD(vars(base))),
            base.groups,
            *(getattr(conv, what, None) for conv in convs for what in GEOMETRY),
        ]
    return facts
