"""An engine that merges by itself: its worker holds the base, adds what training has changed (payload/update.py), and
takes it off again, exactly, before the next one.

Parameters that keep the layout in which they are loaded are merged where they lie, tracked (kernels/tracked): 2 bits
an element bring the base back. Updates that follow one another come to lie in two memories in turn, so that one takes
the place of the other in one pass (`TrackedPlan.remerge`). Layers that are laid out anew after loading are made again
from a copy of their base, as loading takes it, which is kept here. Where the base is the engine's own checkpoint, what
is kept is what lies in its files, and tensors that come whole are kept, too: so an update can be followed by any other
one, or by none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...kernels.plan import Plan
from ...kernels.ranges import check_in_place, run_in_range
from ...kernels.segments import copies
from ...kernels.tracked.plan import TrackedPlan
from ...models.delta import Job, in_place
from ...shards import Piece, cut
from ...stream.buckets import Meta, Table, contents_of, dtype_of, lay_out
from ..payload.spec import DeviceFactors, ReceivedUpdate, UpdateSpec
from ..state import OWN
from .loader import DryRunReport, Loader, pairs


class Merger:
    """What a worker keeps to merge updates: which base lies here, and what brings it back.

    Args:
        report: of the base's table.
        base: fingerprint of the base, or `OWN`.
        changed: names of the tensors that updates will change; for the engine's own base see `adopt`.
    """

    def __init__(self, loader: Loader, report: DryRunReport, table: Table, base: str, changed: frozenset[str]) -> None:
        self._loader, self._report = loader, report
        self.base, self.own, self._contents = base, base == OWN, contents_of(table)
        self._needed = self._layers_of(changed)
        self._kept: dict[str, Tensor] = {}
        self._plan: _Products | None = None
        self._spare: _Products | None = None  # of the update before: the next one's may come to lie there
        self._before: UpdateSpec | None = None
        self._facts: list[Any] = []

    def keep(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor of the base if layers that are laid out anew after loading are made of it."""
        if name in self._needed:
            self._kept[name] = tensor.clone()

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors of the engine's own checkpoint: those of `wanted`."""
        self._kept.update(tensors)

    def wanted(self, spec: UpdateSpec) -> frozenset[str]:
        """Return the tensors of the base that an update, and what follows it, need to be kept here and that are not."""
        layers = self._layers_of(self._touched(spec))
        return (layers | spec.whole if self.own else layers - spec.whole).difference(self._kept)

    def holds(self, contents: str) -> bool:
        """Return True if the base still lies where it was, with the same contents."""
        return contents == self._contents and self._facts == self._loader.modules.look().facts

    def nothing(self) -> ReceivedUpdate:
        """Return an update that adds nothing: merged, it restores the base."""
        return ReceivedUpdate(UpdateSpec(self._contents, (), 0, (), (), (), {}, {}), [])

    def settle(self) -> None:
        """Note where the weights lie, after a base or an update has arrived."""
        self._facts = self._loader.modules.look().facts

    def lacks(self, spec: UpdateSpec) -> bool:
        """Return True if an update cannot be merged onto what is kept here, and needs the base to be sent again."""
        if not self.holds(spec.base):
            return True
        before = self._before
        if not self.own and before is not None and not before.whole <= spec.whole:
            return True  # their base was overwritten
        return bool(self.wanted(spec))

    def _touched(self, spec: UpdateSpec) -> frozenset[str]:
        """Return the names of the tensors that change when this update follows the one before."""
        return spec.changed if self._before is None else spec.changed | self._before.changed

    def _layers_of(self, names: frozenset[str]) -> frozenset[str]:
        """Return all names of the layers that are laid out anew and are made of some of these names."""
        return frozenset().union(*(some for _, some in self._report.layers if some & names))

    def merge(self, update: ReceivedUpdate) -> None:
        """Take the update before off, and merge this one.

        Raises:
            NotRestored: somebody has written to the weights.
            InvalidInput: merged values are beyond float16.
            torch.OutOfMemoryError: no memory for the way back.
            After either, the weights are neither the base nor anything else.
        """
        touched = self._touched(update.spec)
        plan = self._merge_products(update)
        gone = frozenset() if self._before is None else self._before.whole - update.spec.whole
        self._plan, self._before = plan, update.spec
        self._write_whole(update, gone)
        self._make_layers(update, plan, touched)
        self._loader.finish()

    def _merge_products(self, update: ReceivedUpdate) -> _Products | None:
        """Merge what an update adds where parameters lie, in the place of what the one before added."""
        before, self._plan = self._plan, None
        plan, self._spare = self._spare, None
        if before is not None and not before.is_like(update):
            before.tracked.unmerge()
            plan = before = None  # their memory is free before the next one's is taken
        if not update.spec.tensors:
            return None
        if plan is None or not plan.serves(update):
            plan = None
            plan = _Products(update, self._report, self._loader.device)
        plan.merge(update, before)
        self._spare = before
        return plan

    def _write_whole(self, update: ReceivedUpdate, gone: frozenset[str]) -> None:
        """Write tensors that came whole to where they go straight, and the base of those (`gone`) that came with the
        update before and do not come now."""
        moved = [pair for slot, data in update.whole() for pair in pairs(self._report, slot, data)]
        for name in gone.intersection(self._report.copies):
            base = self._kept[name].to(self._loader.device).contiguous()
            (slots,) = lay_out([Meta(name, base.dtype, tuple(base.shape))], 1 << 62)
            moved += pairs(self._report, slots[0], base.view(-1).view(torch.uint8))
        if moved:
            Plan([segment for source, to in moved for segment in copies("engine", source, to)]).run()

    def _make_layers(self, update: ReceivedUpdate, plan: _Products | None, touched: frozenset[str]) -> None:
        """Make layers that are laid out anew, of their base and what has changed."""
        layers = [(layer, names) for layer, names in self._report.layers if names & touched]
        staged = self._layers_of(touched)
        whole: dict[str, Tensor] = {}
        for slot, data in update.whole():
            if slot.name in staged:
                if slot.name not in whole:
                    whole[slot.name] = torch.empty(slot.whole, dtype=slot.dtype, device=data.device)
                cut(whole[slot.name], slot.box).copy_(slot.view(data))

        def tensor(name: str) -> Tensor:
            if name in whole:
                return whole[name]
            if plan is not None and name in update.spec.tensors:
                return plan.merged(name, self._kept[name].to(self._loader.device))
            return self._kept[name].to(self._loader.device, copy=True)

        if layers:
            self._loader.load_layers(self._report, layers, tensor)


class _Products(DeviceFactors):
    """The products of updates like this one on their way into a worker's tensors, and back."""

    def __init__(self, update: ReceivedUpdate, report: DryRunReport, device: torch.device) -> None:
        places: dict[int, list[Piece]] = {}
        for name, (number, window) in update.spec.tensors.items():
            places.setdefault(number, []).extend(report.pieces(name, window))
        super().__init__(update, places, device)
        self.tracked = TrackedPlan(
            [
                segment
                for number, delta in enumerate(self.deltas)
                for job in in_place(delta)
                for segment in self.segments(number, job)
            ],
            keep=True,
        )

    def merge(self, update: ReceivedUpdate, before: _Products | None) -> None:
        """Merge the products of an update in the place of those before, and keep them: taking them off needs them."""
        self.take(update)
        if before is None:
            self.tracked.merge()
        else:
            self.tracked.remerge(before.tracked)
        written = ((s.name, s.destination, s.row_scale is not None) for s in self.tracked.segments)
        check_in_place(written, self.tracked.unmerge, self.tracked.merge)

    def merged(self, name: str, base: Tensor) -> Tensor:
        """Return a tensor of the stream with its product, in memory of its own."""
        number, window = self._spec.tensors[name]
        out = torch.empty_like(base)
        job = Job(self.deltas[number], window.start, window.unfold(base), window.unfold(out))
        run_in_range(Plan(self.segments(number, job)))
        return out


def problems(spec: UpdateSpec, report: DryRunReport) -> list[str]:
    """Return why updates cannot be merged into what a dry run of their base showed; nothing if they can."""
    found = []
    for name, (number, _) in spec.tensors.items():
        wanted = dtype_of(spec.deltas[number]["dtype"])
        held = {copy.destination.dtype for copy in report.copies.get(name, ())}
        if held - {wanted}:
            found.append(f"{name}: {wanted} in the trainer, {held.pop()} in the engine")
    anew = frozenset[str]().union(*(names for _, names in report.layers))
    for name in sorted(spec.changed & report.staged - anew):
        found.append(f"{name}: loading makes something else of it in the engine, which a merge there would not")
    return found
