"""`merged(model)`: the adapters in the base weights for the time of a `with` block."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from . import kernels
from .buckets import BUCKET_BYTES, batched
from .delta import Delta, Job, whole_job
from .errors import AlreadyMerged, InvalidInput
from .exchange import Exchange, check_strategy
from .live import Live, live
from .operands import MergePlan, Operands
from .ranks import Ranks
from .segments import raw
from .shards import Address, cut

Model = TypeVar("Model")

_lock = threading.Lock()
_inside: set[object] = set()
"""Adapter layers (by id) and weights (by address) of the models that are inside `merged` now."""
_merges: WeakKeyDictionary[nn.Module, tuple[Any, list[_Merge]]] = WeakKeyDictionary()
"""Model -> what its merges were built for, and the merges: one a device."""


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

    FSDP2 and FSDP1: collective over the ranks that hold the model. Each rank merges what it holds; only the halves of
    adapters that do not line up with it are gathered. Units that are gathered at the moment (the root after a forward,
    `reshard_after_forward=False`) are brought back to their shards first, at both ends.

    Memory: one copy of the adapted weights that are here, on their device, while inside; nothing of that size is kept
    after. A tied weight with an adapter on only one of its users is held apart inside: the others see the copy.

    Work on the merged weights by other streams must be waited for before leaving, as before freeing a tensor.

    Args:
        model: a `PeftModel`, or any module that holds PEFT's LoRA layers. Or the chunks of a megatron-core model, as
            they are or in `lora_merge.shards.megatron.Chunks`.
        restore: "exact", the only way.
        strategy: None: weights are merged where they lie. "unshard": sharded weights are gathered, merged whole and
            cut again, bucket by bucket; it gives the same bits and costs their bytes over the network.

    Yields:
        `model`.

    Raises:
        InvalidInput: an unknown option; no LoRA layers in the model; a weight that does not fit; ranks that disagree.
        UnsupportedAdapter: an adapter without an exact merge; names the module and the reason.
        AlreadyMerged: the weights hold adapters already, or the model is inside `merged` now.

        All of them on every rank, and before anything is written.
    """
    if restore != "exact":
        raise InvalidInput(f"restore must be 'exact', got {restore!r}")
    check_strategy(strategy)
    found = live(model)
    with ExitStack() as undo:
        with found.ranks.vote("merged"):
            layers, deltas = found.adapters()
            _check(deltas)
            weights = found.weights(deltas)
            undo.enter_context(_claimed({*weights, *map(id, layers)}))
            undo.callback(found.settle)
            saved = undo.enter_context(_Restore(weights))
            jobs = undo.enter_context(found.jobs(deltas, saved))
        merges = _merges_for(found, bool(layers), deltas, jobs, strategy)
        with torch.inference_mode():
            for merge in merges:
                merge.run()
        undo.enter_context(found.off())
        yield model


def _check(deltas: Sequence[Delta]) -> None:
    for delta in deltas:
        if delta.weight.device.type == "meta":
            raise InvalidInput(f"{delta.name}: the weight is a meta tensor and holds no values; load it first")


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
            torch._foreach_copy_([raw(t) for t in to], [raw(t) for t in source])


def _merges_for(
    model: Live, adapted: bool, deltas: Sequence[Delta], jobs: Sequence[Job], strategy: str | None
) -> list[_Merge]:
    """The merges of an earlier entry if nothing that they depend on has changed on any rank, or new ones."""
    key = (
        [delta.key() for delta in deltas],
        [(job.source.data_ptr(), job.destination.data_ptr()) for job in jobs],
        {device: kernels.pick(device) for device in {delta.weight.device for delta in deltas}},
        strategy,
    )
    known, ranks = _merges.get(model.key), model.ranks
    if not ranks.any(known is None or known[0] != key):
        assert known is not None
        return known[1]
    if not ranks.any(adapted):
        raise InvalidInput("the model has no LoRA layers; pass the PeftModel, not its bare base")
    deltas = model.everyones(deltas)
    ranks.same([delta.describe() for delta in deltas], lambda: [delta.describe() for delta in deltas])
    devices = sorted({delta.weight.device for delta in deltas}, key=str)
    make = _Unshard if strategy == "unshard" and not ranks.alone else _Merge
    merges = [
        make(
            [delta for delta in deltas if delta.weight.device == device],
            [job for job in jobs if job.source.device == device],
            model.merging if make is _Merge else ranks,
            device,
        )
        for device in devices
    ]
    if make is _Merge and all(job.source is job.destination for job in jobs):  # no tensors of this entry only
        for merge in merges:
            merge.release()  # what the model lets go of between entries (offloading, a sleep) is freed
        _merges[model.key] = key, merges
    return merges


class _Merge:
    """The deltas of one device, merged where they lie; collective over the ranks."""

    def __init__(self, deltas: Sequence[Delta], jobs: Sequence[Job], ranks: Ranks, device: torch.device) -> None:
        self._operands = Operands(deltas, ranks, device, jobs)
        self._plan = MergePlan(jobs, self._operands)

    def release(self) -> None:
        """As `Plan.release`."""
        self._operands.release()
        self._plan.release()

    def run(self) -> None:
        self._operands.refresh()
        self._plan.run()


class _Unshard(_Merge):
    """Whole weights, a bucket of them at a time: gathered, merged, and each rank keeps what is its own."""

    def __init__(self, deltas: Sequence[Delta], jobs: Sequence[Job], ranks: Ranks, device: torch.device) -> None:
        self._operands = Operands(deltas, ranks, device, everything={delta.name for delta in deltas})
        self._deltas, self._jobs, self._ranks, self._device = deltas, jobs, ranks, device

    def run(self) -> None:
        self._operands.refresh()
        for batch in batched(self._deltas, [delta.weight.nbytes for delta in self._deltas], BUCKET_BYTES):
            names = [delta.name for delta in batch]
            exchange = Exchange(names, [delta.weight for delta in batch], self._ranks, self._device)
            exchange.run()
            wholes = dict(zip(names, exchange.wholes, strict=True))
            MergePlan(
                [whole_job(delta, wholes[delta.name], wholes[delta.name]) for delta in batch], self._operands
            ).run()
            for job in (job for job in self._jobs if job.delta.name in wholes):
                job.destination.copy_(cut(wholes[job.delta.name], (job.start, tuple(job.destination.shape))))
