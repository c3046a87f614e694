"""The plans that fill buckets: one a bucket, and one more for a bucket that is written directly."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..kernels.checks import same_view
from ..kernels.packed import in_reach
from ..kernels.plan import Plan
from ..kernels.scaled.weights import Scaled
from ..kernels.segments import Segment, copies
from ..models.delta import Job
from ..models.operands import Operands, merge_plan
from ..models.staging import Copies, Staging, Storages
from ..shards import Box
from .source import Entry, Source


class BucketPlans:
    """The plans of a stream's buckets on this rank, each made at its first use.

    Args:
        entries: the stream, by name.
        operands: what merging takes of the adapters.
        staged: bytes that the weights of one bucket need which are brought to be read.
    """

    def __init__(self, entries: Mapping[str, Entry], operands: Operands, device: torch.device, staged: int) -> None:
        self._entries, self._operands, self._device = entries, operands, device
        self._plans: dict[tuple[int, bool], tuple[tuple[Hashable, int], BucketPlan]] = {}
        self.staging = Staging(device, staged)

    def release(self) -> None:
        """Release all plans, like `Plan.release`."""
        for _, plan in self._plans.values():
            plan.release()
        self.staging.release()

    def of(
        self,
        source: Source,
        key: tuple[int, bool],
        at: Hashable,
        targets: Iterable[tuple[str, Box, Tensor, int]],
        scaled: Mapping[str, Sequence[Scaled]] = MappingProxyType({}),
    ) -> BucketPlan:
        """Return the plan of a bucket, made anew when what it writes to has moved.

        Args:
            key: the bucket; whether it is written directly.
            at: where the targets are.
            targets: boxes of tensors of the stream, where they go, and the bucket that each is in.
            scaled: as of `DirectTargets`.
        """
        known, plan = self._plans.get(key, (None, None))
        there = known == (at, self.staging.address)
        if plan is None or not there or not plan.hold(self.staging.memory, lambda: source.storages):
            plan = self._make(source, key[0], targets, scaled)
            self._plans[key] = (at, self.staging.address), plan
        return plan

    def forget(self, at: Hashable) -> None:
        """Drop plans that write to these places, since they keep the places' memory alive."""
        self._plans = {key: known for key, known in self._plans.items() if known[0][0] != at}

    def _make(
        self,
        source: Source,
        index: int,
        targets: Iterable[tuple[str, Box, Tensor, int]],
        scaled: Mapping[str, Sequence[Scaled]],
    ) -> BucketPlan:
        boxes = list(source.rectangles(self._entries, targets))
        away = [view for _, _, _, view, _, _ in boxes if not in_reach(view, self._device)]
        staged = self.staging.lay_out(away)
        arrived, jobs, segments = iter(staged), list[Job](), list[Segment]()
        for name, delta, start, view, out, turn in boxes:
            if delta is None and same_view(view, out):
                continue  # an engine of this process holds it once, with the trainer
            weight = view if in_reach(view, self._device) else next(arrived)
            if delta is None:
                window, meta = self._entries[name].window, self._entries[name].meta
                assert window is not None
                begin, _ = window.inner((start, tuple(view.shape)))
                segments += copies(name, window.fold(weight), window.fold(out), begin, meta.shape)
            elif turn == index:
                jobs.append(Job(delta, start, weight, out))
            else:
                segments += self._operands.segments(Job(delta, start, weight, out), turn)
        copied = Copies(list(zip(staged, away, strict=True)))
        weights = {id(s): s for name, _, _, _, _, _ in boxes for s in scaled.get(name, ())}
        plan = merge_plan(jobs, self._operands, segments, index, list(weights.values()))
        return BucketPlan(plan, copied, self.staging)


class BucketPlan:
    """What fills this rank's part of one bucket: a launch, and before it the copies of weights that are brought."""

    def __init__(self, plan: Plan, copied: Copies, staging: Staging) -> None:
        self._plan, self._copied, self._staging = plan, copied, staging

    def hold(self, memory: Tensor | None, storages: Storages) -> bool:
        """See `Copies.hold`."""
        return self._copied.hold(memory, storages)

    def release(self) -> None:
        self._plan.release()
        self._copied.release()

    def run(self, run: Mapping[str, Any]) -> bool | None:
        """See `Plan.run`."""
        self._staging.bring(self._copied)
        return self._plan.run(**run)
