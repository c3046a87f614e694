"""A worker's end of a pull: the trainer's memory, mapped, and the plan that merges from it into the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.plan import Plan
from ...kernels.ranges import run_in_range
from ...kernels.segments import Segment, copies
from ...models.delta import Job
from ...shards import Box, cut, overlap
from ..payload.spec import DeviceFactors, ReceivedUpdate, UpdateSpec
from ..transport.peer_memory import MappedMemory
from .loader import DryRunReport


class _Source(NamedTuple):
    """A box of a parameter in the trainer's memory; `peer`: on another GPU."""

    box: Box
    view: Tensor
    peer: bool


class _Part(NamedTuple):
    """A part of such a box that this worker holds; `start` is in the whole parameter."""

    start: tuple[int, ...]
    source: Tensor
    destination: Tensor
    peer: bool


class PullTarget:
    """What a trainer exports, and where it goes in this worker.

    Args:
        spec: which tensors are merged, and which copied.
        table: digest of the stream's table.
        report: of that table.
        sources: what each rank of the trainer exports, with its `introduction`. Ranks of one `group` export the model
            between them; the nearest group is read.
        here: the `introduction` of this worker.

    Attributes:
        pids: of the processes whose memory is mapped.
        closed: whether nothing is mapped any more.

    Raises:
        RuntimeError, OSError: it cannot be mapped here, or does not have all that is read of it.
    """

    def __init__(
        self,
        spec: UpdateSpec,
        table: str,
        report: DryRunReport,
        sources: Sequence[Mapping[str, Any]],
        here: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        self.spec, self.table, self.report, self.device = spec, table, report, device
        self._made: tuple[DeviceFactors, Plan] | None = None
        self._mapped: list[MappedMemory] = []
        self.pids: set[int] = set()
        self.closed = False
        self._views: dict[str, list[_Source]] = {}
        self._read: dict[str, Tensor] = {}
        near = nearest(sources, here)
        self._far = near["device"] != here["device"]
        """Whether the factors are on another GPU. They are then copied to here for each merge, as kernels read them
        often."""
        try:
            for source in (source for source in sources if source["group"] == near["group"]):
                views = {name: self._overlapping(name, found) for name, found in source["views"].items()}
                mapped = self._map(source, {name: found for name, found in views.items() if found})
                peer = source["device"] != here["device"]
                for name, found in mapped.views.items():
                    self._views.setdefault(name, []).extend(_Source(box, view, peer) for box, view in found)
            if spec.there:
                lie = self._map({**near, **near["factors"]}, near["factors"]["views"]).views
                if lacking := [name for name in spec.there if name not in lie]:
                    raise RuntimeError(f"an adapter's {lacking[0]} is not exported")
                self._read = {name: lie[name][0][1] for name in spec.there}
            for name in (*spec.tensors, *spec.copied):
                self._check(name)
        except BaseException:
            self.close()
            raise

    def _map(self, source: Mapping[str, Any], views: Mapping[str, Any]) -> MappedMemory:
        self.pids.add(source["pid"])
        self._mapped.append(MappedMemory({**source, "views": views}, self.device, source["pid"]))
        return self._mapped[-1]

    def _overlapping(self, name: str, found: Sequence[Any]) -> list[Any]:
        """Return those of a rank's boxes of a tensor that this worker holds some of."""
        if name not in self.spec.tensors and name not in self.spec.copied:
            return []
        boxes = [piece.box for piece in self.report.pieces(name, self._window(name))]
        return [told for told in found if any(overlap((tuple(told[0]), tuple(told[1])), box) for box in boxes)]

    def _window(self, name: str) -> Any:
        return self.spec.tensors[name][1] if name in self.spec.tensors else self.spec.copied[name]

    def _check(self, name: str) -> None:
        """Raise if some rank exports less of a tensor than this worker holds."""
        for view, boxes in self._targets(name):
            found = sum(taken.destination.numel() for taken in boxes)
            if found != view.numel():
                raise RuntimeError(f"{name}: {found} of {view.numel()} elements that this worker holds are exported")

    def _targets(self, name: str) -> Iterator[tuple[Tensor, list[_Part]]]:
        """Yield each destination of a tensor in this engine, with the parts that make it up."""
        for piece in self.report.pieces(name, self._window(name)):
            boxes = []
            for there in self._views.get(name, ()):
                met = overlap(there.box, piece.box)
                if met is not None:
                    source, to = cut(there.view, _inside(met, there.box)), cut(piece.tensor, _inside(met, piece.box))
                    boxes.append(_Part(met[0], source, to, there.peer))
            yield piece.tensor, boxes

    def merge(self, update: ReceivedUpdate, run: Mapping[str, Any]) -> None:
        """Merge the trainer's weights and an update's factors into the engine's tensors; `run` is for `Plan.run`."""
        if self._made is None or not self._made[0].serves(update):
            self._made = None
            near, far = ({}, self._read) if self._far else (self._read, {})
            factored = DeviceFactors(update, {}, self.device, near, far)
            self._made = factored, Plan(list(self._segments(factored)))
        factored, plan = self._made
        factored.take(update)
        run_in_range(plan, run)

    def _segments(self, factored: DeviceFactors) -> Iterator[Segment]:
        for name, (number, _) in self.spec.tensors.items():
            for _, boxes in self._targets(name):
                for taken in boxes:
                    job = Job(factored.deltas[number], taken.start, taken.source, taken.destination)
                    yield from _from_peer(factored.segments(number, job), taken)
        for name, window in self.spec.copied.items():
            _, shape = window.inner(window.box)
            for _, boxes in self._targets(name):
                for taken in boxes:
                    begin, _ = window.inner((taken.start, tuple(taken.source.shape)))
                    source, to = window.fold(taken.source), window.fold(taken.destination)
                    yield from _from_peer(copies(name, source, to, begin, shape), taken)

    def close(self) -> None:
        """Unmap the trainer's memory."""
        self._made, self._views, self._read = None, {}, {}
        for mapped in self._mapped:
            mapped.close()
        self._mapped, self.closed = [], True


def nearest(sources: Sequence[Mapping[str, Any]], here: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the source of a rank on this worker's GPU, or else on its host, together with all ranks of its group."""
    away = {source["group"] for source in sources if source["host"] != here["host"]}
    on_host = [source for source in sources if source["group"] not in away]
    return next((source for source in on_host if source["device"] == here["device"]), (*on_host, sources[0])[0])


def _from_peer(segments: Sequence[Segment], taken: _Part) -> Iterator[Segment]:
    for segment in segments:
        yield replace(segment, peer=True) if taken.peer else segment


def _inside(met: Box, box: Box) -> Box:
    return tuple(a - b for a, b in zip(met[0], box[0], strict=True)), met[1]
