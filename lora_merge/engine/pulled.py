"""A worker's end of a pull: the trainer's memory, mapped, and the plan that merges from there into the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.plan import Plan
from ..kernels.segments import Segment, copies
from ..models.delta import Job
from ..shards import Box, cut, overlap
from .loader import Examination
from .mapped import Mapped, united
from .products import Described, Factored, Update


class Pulled:
    """What a trainer exports, and where it goes here.

    Args:
        said: what goes how.
        table: digest of the stream's table.
        examination: of that table.
        sources: what each rank of the trainer exports.
        device: of the worker.

    Raises:
        RuntimeError, OSError: it cannot be mapped here, or does not have all that is read of it.
    """

    def __init__(
        self,
        said: Described,
        table: str,
        examination: Examination,
        sources: Sequence[Mapping[str, Any]],
        device: torch.device,
    ) -> None:
        self.said, self.table, self.examination = said, table, examination
        self._made: tuple[Factored, Plan] | None = None
        self._mapped: list[Mapped] = []
        try:
            for source in sources:
                self._mapped.append(Mapped(source, device, source["pid"]))
            self._views = united(self._mapped).views
            for name in (*said.tensors, *said.copied):
                self._check(name)
        except BaseException:
            self.close()
            raise

    def _check(self, name: str) -> None:
        """Nothing of the engine may be left as it was because nobody exports it."""
        for view, boxes in self._places(name):
            found = sum(inside.numel() for _, inside, _ in boxes)
            if found != view.numel():
                raise RuntimeError(f"{name}: {found} of {view.numel()} elements that this worker holds are exported")

    def _places(self, name: str) -> Iterator[tuple[Tensor, list[tuple[tuple[int, ...], Tensor, Tensor]]]]:
        """Each place of a tensor in this engine, and what of it comes from where: the start of a box in the whole
        parameter, its source, and its destination."""
        window = self.said.tensors[name][1] if name in self.said.tensors else self.said.copied[name]
        for piece in self.examination.pieces(name, window):
            boxes = []
            for box, source in self._views.get(name, ()):
                met = overlap(box, piece.box)
                if met is not None:
                    boxes.append((met[0], cut(source, _inside(met, box)), cut(piece.tensor, _inside(met, piece.box))))
            yield piece.tensor, boxes

    def merge(self, coming: Update, run: Mapping[str, Any]) -> None:
        """Merge what came beside it with what lies there, into the engine's tensors.

        Args:
            run: arguments of `Plan.run`.
        """
        if self._made is None or not self._made[0].serves(coming):
            self._made = None
            factored = Factored(coming, {})
            self._made = factored, Plan(list(self._segments(factored)))
        factored, plan = self._made
        factored.take(coming)
        plan.run(**run)

    def _segments(self, factored: Factored) -> Iterator[Segment]:
        for name, (number, _) in self.said.tensors.items():
            for _, boxes in self._places(name):
                for start, source, destination in boxes:
                    yield from factored.segments(number, Job(factored.deltas[number], start, source, destination))
        for name, window in self.said.copied.items():
            _, shape = window.inner(window.box)
            for _, boxes in self._places(name):
                for start, source, destination in boxes:
                    begin, _ = window.inner((start, tuple(source.shape)))
                    yield from copies(name, window.fold(source), window.fold(destination), begin, shape)

    def close(self) -> None:
        """Unmap the trainer's memory."""
        self._made, self._views = None, {}
        for mapped in self._mapped:
            mapped.close()
        self._mapped = []


def _inside(met: Box, box: Box) -> Box:
    return tuple(a - b for a, b in zip(met[0], box[0], strict=True)), met[1]
