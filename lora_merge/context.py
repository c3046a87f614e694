"""`merged(model)`: the adapters in the base weights for the time of a `with` block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from . import kernels
from .delta import Address, Delta, MergePlan, address
from .errors import AlreadyMerged, InvalidInput, UnsupportedAdapter
from .lora import Adapters, read_adapters

Model = TypeVar("Model", bound=nn.Module)

_lock = threading.Lock()
_inside: set[object] = set()
"""Adapter layers (by id) and weights (by address) of the models that are inside `merged` now."""
_plans: WeakKeyDictionary[nn.Module, tuple[Any, list[MergePlan]]] = WeakKeyDictionary()
"""Model -> what its plans were built for, and the plans: one a device."""


@contextmanager
def merged(model: Model, *, restore: str = "exact", strategy: str | None = None) -> Iterator[Model]:
    """Inside the block, the base weights hold the merged values and the adapters add nothing on top.

        with lora_merge.merged(model):
            model.generate(...)

    The active adapters are merged as they stand: scaling, several of them (rounded once), DoRA, `lora_bias`, fused
    experts. Weights are merged where they lie, so addresses stay what they are (CUDA graphs, compiled modules). After
    the block, also when it raises, every parameter and buffer is bit for bit what it was; `requires_grad`, gradients,
    optimizer state and PEFT's flags are not touched. Train outside of the block: a backward pass that crosses its
    border is refused by autograd, as for any weight changed in place.

    Memory: one copy of the adapted weights on their device while inside; nothing of that size is kept after.
    A tied weight with an adapter on only one of its users is held apart inside: the others see the copy.

    Work on the merged weights by other streams must be waited for before leaving, as before freeing a tensor.

    Args:
        model: a `PeftModel`, or any module that holds PEFT's LoRA layers.
        restore: "exact", the only way.
        strategy: None, the only one so far: weights whole on their device.

    Yields:
        `model`.

    Raises:
        InvalidInput: an unknown option; no LoRA layers in the model; a weight that does not fit.
        UnsupportedAdapter: an adapter without an exact merge; names the module and the reason.
        AlreadyMerged: the weights hold adapters already, or the model is inside `merged` now.

        All of them before anything is written.
    """
    if restore != "exact":
        raise InvalidInput(f"restore must be 'exact', got {restore!r}")
    if strategy is not None:
        raise InvalidInput(f"strategy must be None (weights whole on their device), got {strategy!r}")
    with ExitStack() as undo:
        adapters = read_adapters(model)
        if not adapters.layers:
            raise InvalidInput("the model has no LoRA layers; pass the PeftModel, not its bare base")
        _check_whole(adapters)
        weights = {address(delta.parameter): delta.parameter for delta in adapters.deltas}
        undo.enter_context(_claimed({*weights, *(id(layer) for layer, _ in adapters.layers)}))
        saved = undo.enter_context(_Restore(weights))
        jobs = undo.enter_context(_untied(adapters, saved))
        plans = _plans_for(model, jobs)
        with torch.inference_mode():
            for plan in plans:
                plan.run()
        undo.enter_context(_adapters_off(adapters))
        yield model


def _check_whole(adapters: Adapters) -> None:
    """Raise `InvalidInput` unless every adapted weight lies whole on a device."""
    for delta in adapters.deltas:
        parameter = delta.parameter
        if parameter.device.type == "meta":
            raise InvalidInput(f"{delta.name}: the weight is a meta tensor and holds no values; load it first")
        if type(parameter.data) is not Tensor:
            raise InvalidInput(f"{delta.name}: the weight is a {type(parameter.data).__name__}, sharded over ranks")


@contextmanager
def _claimed(claim: set[object]) -> Iterator[None]:
    """One `merged` at a time on any layer and any weight, in all threads."""
    with _lock:
        if not _inside.isdisjoint(claim):
            raise AlreadyMerged(
                "merged() is already entered on this model, or on one that shares weights with it; leave it before "
                "entering again"
            )
        _inside.update(claim)
    try:
        yield
    finally:
        with _lock:
            _inside.difference_update(claim)


class _Restore:
    """Keeps the bits of weights while inside, and puts them back.

    Version counters move on inside and go back with the bits: autograd then refuses a backward pass inside for a
    forward pass outside (and the reverse), and allows one that starts and ends outside.
    """

    def __init__(self, weights: dict[Address, Tensor]) -> None:
        self.weights = weights
        self.counted = tuple(weight for weight in weights.values() if not weight.is_inference())

    def __enter__(self) -> dict[Address, Tensor]:
        with torch.inference_mode(False):
            self.copies = [torch.empty_like(weight.data) for weight in self.weights.values()]
        _copy(self.copies, [weight.data for weight in self.weights.values()])
        self.versions = tuple(weight._version for weight in self.counted)
        torch.autograd.graph.increment_version(self.counted)
        return dict(zip(self.weights, self.copies, strict=True))

    def __exit__(self, *exception: object) -> None:
        _copy([weight.data for weight in self.weights.values()], self.copies)
        torch._C._autograd._unsafe_set_version_counter(self.counted, self.versions)


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    if to:
        with torch.inference_mode():
            torch._foreach_copy_(to, source)


@contextmanager
def _untied(adapters: Adapters, saved: dict[Address, Tensor]) -> Iterator[list[tuple[Delta, Tensor, Tensor]]]:
    """Holds tied weights apart, and yields what is to be merged: (delta, source, destination).

    The first adapted user of a weight merges in place; its other users get a parameter of their own, which is the
    saved copy, or a merged tensor if they have an adapter too.
    """
    jobs: list[tuple[Delta, Tensor, Tensor]] = []
    users = {where: list(adapters.users[where]) for where in saved}
    swaps = []
    in_place = set()
    for delta in adapters.deltas:
        where = address(delta.parameter)
        source = destination = delta.parameter
        if where in in_place:
            with torch.inference_mode(False):
                source, destination = saved[where], torch.empty_like(saved[where])
            swaps.append((delta.owner, delta.attribute, destination))
        in_place.add(where)
        users[where].remove((delta.owner, delta.attribute))
        jobs.append((delta, source, destination))
    swaps += [(owner, attribute, saved[where]) for where in users for owner, attribute in users[where]]
    before = [owner._parameters[attribute] for owner, attribute, _ in swaps]
    for (owner, attribute, tensor), tied in zip(swaps, before, strict=True):
        if tied is not None and (tied.shape, tied.dtype) != (tensor.shape, tensor.dtype):
            raise UnsupportedAdapter(
                f"{attribute} of {type(owner).__name__}, {tied.dtype} {tuple(tied.shape)}, lies in the memory of an "
                f"adapted weight, {tensor.dtype} {tuple(tensor.shape)}; give it memory of its own"
            )
    try:
        for (owner, attribute, tensor), tied in zip(swaps, before, strict=True):
            with torch.inference_mode(False):
                owner._parameters[attribute] = nn.Parameter(tensor, tied is not None and tied.requires_grad)
        yield jobs
    finally:
        for (owner, attribute, _), tied in zip(swaps, before, strict=True):
            owner._parameters[attribute] = tied


def _plans_for(model: nn.Module, jobs: list[tuple[Delta, Tensor, Tensor]]) -> list[MergePlan]:
    """The plans of an earlier entry if nothing that they depend on has changed, or new ones."""
    devices = {source.device for _, source, _ in jobs}
    key = (
        [delta.key() for delta, _, _ in jobs],
        [(address(source), address(destination)) for _, source, destination in jobs],
        {device: kernels.pick(device) for device in devices},
    )
    known = _plans.get(model)
    if known is not None and known[0] == key:
        return known[1]
    plans = [MergePlan([job for job in jobs if job[1].device == device]) for device in devices]
    if all(source is destination for _, source, destination in jobs):  # no tensors of this entry only
        for plan in plans:
            plan.release()  # what the model lets go of between entries (offloading, a sleep) is freed
        _plans[model] = key, plans
    return plans


@contextmanager
def _adapters_off(adapters: Adapters) -> Iterator[None]:
    """Makes PEFT's forward take its merged path, and keeps PEFT from merging or unmerging meanwhile."""
    layers = [(layer, active) for layer, active in adapters.layers if active]
    before = [layer.merged_adapters for layer, _ in layers]
    try:
        for layer, active in layers:
            layer.__dict__.update(merged_adapters=list(active), merge=_refuse, unmerge=_refuse)
        yield
    finally:
        for (layer, _), names in zip(layers, before, strict=True):
            layer.__dict__["merged_adapters"] = names
            layer.__dict__.pop("merge", None)
            layer.__dict__.pop("unmerge", None)


def _refuse(*args: object, **kwargs: object) -> None:
    raise AlreadyMerged(
        "inside lora_merge.merged() the adapters are merged and the base is not at hand: leave the block before "
        "PEFT's merge_adapter, unmerge_adapter, set_adapter or disable_adapter"
    )
