"""Snapshot: all that reading a live model depends on, taken in a small part of the time that reading takes.

Whoever keeps something that was made from a reading keeps the snapshot's facts beside it, and reads again when new ones
are not equal. No snapshot is made out of an earlier one, and no hook is set on the model or on PEFT: each looks at
everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ..names import trail
from ..shards.layout import Layout
from .peft.read import adapter_facts

_PARAMETERS, _BUFFERS = attrgetter("_parameters"), attrgetter("_buffers")
_SHAPE, _KIND = attrgetter("shape"), attrgetter("dtype", "device")


class Snapshot(NamedTuple):
    """A model as it is at this moment.

    Args:
        facts: compared with `==`. They hold no tensor and no module, so that keeping them keeps no memory:
            - of every module that `walk` visits, and of those of its active adapters: which one it is (`id`), its
              class, the names of its children and of its parameters, and which of them are None; of wrappers, which
              module inside is used;
            - of every parameter and persistent buffer: its class, address, shape, strides, dtype and device; of a
              DTensor those of the local part, and which DTensor it is and its spec (mesh, placements, shape); what
              FSDP1 holds of each parameter;
            - of the adapters: `adapter_facts`.
            An `id` may come back for another object after the first one is gone. It then stands for an object of the
            same class at the same place with the same parameters, of which a reading would tell the same.
        modules: live, in an order that is the same for equal facts. So are the following:
        parameters: parameters and persistent buffers.
        tensors: what is here of each of them.
    """

    facts: list[Any]
    modules: list[nn.Module]
    parameters: list[Tensor]
    tensors: list[Tensor]


class Indices(NamedTuple):
    """Where merging in place finds things in the snapshots of a model, so that it need not read it again.

    Args:
        facts: of the snapshots for which this holds.
        layers: numbers among their modules of the adapter layers, with the names of the adapters that act there, where
            those have names.
        weights: numbers among their parameters of those that active adapters change. None is tied to another.
        owners: for each of these the number among their modules of the one that holds it, and under which name.
    """

    facts: list[Any]
    layers: list[tuple[int, list[str]]]
    weights: list[int]
    owners: list[tuple[int, str]]


_indices: WeakKeyDictionary[nn.Module, Indices] = WeakKeyDictionary()


def indices_in(snapshot: Snapshot, model: nn.Module) -> Indices | None:
    """What `note` was told of a snapshot of the model that was equal to this one, if it was the last."""
    known = _indices.get(model)
    return known if known is not None and known.facts == snapshot.facts else None


def note(
    model: nn.Module, snapshot: Snapshot, layers: Iterable[tuple[nn.Module, list[str]]], weights: Iterable[Tensor]
) -> None:
    """Keep where these are in the snapshot; see `Indices`."""
    modules = {id(module): at for at, module in enumerate(snapshot.modules)}
    parameters = {id(parameter): at for at, parameter in enumerate(snapshot.parameters)}
    weights = list(weights)
    _indices[model] = Indices(
        snapshot.facts,
        [(modules[id(layer)], active) for layer, active in layers],
        [parameters[id(weight)] for weight in weights],
        [(modules[id(owner)], key) for owner, key, _ in owners(snapshot, weights)],
    )


def owners(
    snapshot: Snapshot, weights: Iterable[Tensor], indices: Indices | None = None
) -> list[tuple[nn.Module, str, Tensor | None]]:
    """The modules of the snapshot that hold some of these parameters, under which names, and which of them.

    Args:
        indices: in the snapshot, where the weights are theirs: nothing has to be looked for then.
    """
    if indices is not None:
        found = ((snapshot.modules[at], key) for at, key in indices.owners)
        return [(module, key, module._parameters[key]) for module, key in found]
    ids = set(map(id, weights))
    held = ((module, key, tensor) for module in snapshot.modules for key, tensor in module._parameters.items())
    return [(module, key, tensor) for module, key, tensor in held if id(tensor) in ids]


def take(model: nn.Module, layout: Layout, *, adapters: bool = True) -> Snapshot:
    """The snapshot of a model with PEFT's adapters, or with none.

    Args:
        adapters: False: of the base, which stays what it is whatever adapts it.
    """
    modules, facts = trail(model)
    if adapters:
        of_adapters, parts = adapter_facts(modules)
        facts += of_adapters
        modules += parts
    return taken(modules, facts, layout.local)


def taken(
    modules: list[nn.Module], facts: list[Any], local: Callable[[list[Tensor]], tuple[list[Tensor], list[Any]]]
) -> Snapshot:
    """The snapshot of these modules, with what else is known of them.

    Args:
        local: what is here of tensors, and what else that depends on.
    """
    facts += map(id, modules)
    parameters = list(map(_PARAMETERS, modules))
    facts += map(len, parameters)
    facts += chain.from_iterable(parameters)
    tensors: list[Any] = list(chain.from_iterable(map(dict.values, parameters)))
    for module, buffers in zip(modules, map(_BUFFERS, modules), strict=True):
        if buffers:
            for key, buffer in buffers.items():
                if key not in module._non_persistent_buffers_set:
                    facts += (id(module), key)
                    tensors.append(buffer)
    facts += map(type, tensors)
    tensors = [tensor for tensor in tensors if tensor is not None]
    here, shards = local(tensors)
    facts += shards
    facts += map(Tensor.data_ptr, here)
    facts += map(_SHAPE, here)
    facts += map(Tensor.stride, here)
    facts += map(_KIND, here)
    return Snapshot(facts, modules, tensors, here)
