"""The merges of a model in place, kept from one entry of `merged` to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .choices import Rounding, Strategy
from .errors import InvalidInput
from .kernels import backend as kernels
from .merge_in_place import InPlaceMerge, UnshardedMerge
from .models.delta import Delta, Job
from .models.live import Live

_kept: WeakKeyDictionary[nn.Module, KeptMerges] = WeakKeyDictionary()


@dataclass
class KeptMerges:
    """The merges of a model, one a device, and what they were made for.

    Args:
        facts: of its snapshot.
        strategy: see `merged`.
        rounding: as of `Plan.run`.
        backends: of the devices.
        merges: those that an entry uses.
        kept: whether they serve later entries, too: they hold no tensors of this one only.
        others: the same once more, to come in the place of these (`MergedBlock.remerge`), once that was asked for.
    """

    facts: list[Any]
    strategy: Strategy | None
    rounding: Rounding
    backends: dict[torch.device, kernels.Backend]
    merges: list[InPlaceMerge]
    kept: bool
    others: list[InPlaceMerge] | None = None

    def stand(self, facts: list[Any], strategy: Strategy | None, rounding: Rounding) -> bool:
        same = all(kernels.pick(device) is backend for device, backend in self.backends.items())
        same = same and (self.strategy, self.rounding) == (strategy, rounding)
        return same and (self.facts is facts or self.facts == facts)

    def keep(self, model: nn.Module) -> None:
        """Keep these for later entries, where they serve them. Those that round stochastically hold the memory of the
        weights, which a model may let go of between entries."""
        if self.kept and self.rounding == "nearest":
            _kept[model] = self


def forget(model: nn.Module) -> None:
    """Drop the merges that are kept of a model whose base could not be brought back."""
    _kept.pop(model, None)


def merges_for(
    model: Live,
    adapted: bool,
    deltas: Sequence[Delta],
    jobs: Sequence[Job],
    strategy: Strategy | None,
    rounding: Rounding,
) -> KeptMerges:
    """Return the merges of an earlier entry if nothing that they depend on has changed on any rank, or new ones."""
    known, ranks, facts = _kept.get(model.key), model.ranks, model.snapshot().facts
    if not ranks.any(known is None or not known.stand(facts, strategy, rounding)):
        assert known is not None
        return known
    if not ranks.any(adapted):
        raise InvalidInput("the model has no LoRA layers; pass the PeftModel, not its bare base")
    known = make_merges(model, deltas, jobs, strategy, rounding)
    known.keep(model.key)
    return known


def make_merges(
    model: Live, deltas: Sequence[Delta], jobs: Sequence[Job], strategy: Strategy | None, rounding: Rounding
) -> KeptMerges:
    """Return merges for a model as it is. Collective over its ranks."""
    ranks, facts = model.ranks, model.snapshot().facts
    deltas = model.everyones(deltas)
    lines = [f"strategy={strategy!r}", *(delta.describe() for delta in deltas)]
    ranks.same(lines, lambda: lines)
    make = UnshardedMerge if strategy == "unshard" and not ranks.alone else InPlaceMerge
    with ranks.vote("merged"):
        merges = {
            device: make(
                [delta for delta in deltas if delta.weight.device == device],
                [job for job in jobs if job.source.device == device],
                model.merging if make is InPlaceMerge else ranks,
                device,
                rounding,
            )
            for device in sorted({delta.weight.device for delta in deltas}, key=str)
        }
    kept = make is InPlaceMerge and all(job.source is job.destination for job in jobs)
    for merge in merges.values() if kept else ():
        merge.release()  # what the model lets go of between entries (offloading, a sleep) is freed
    backends = {device: kernels.pick(device) for device in merges}
    return KeptMerges(facts, strategy, rounding, backends, list(merges.values()), kept)
