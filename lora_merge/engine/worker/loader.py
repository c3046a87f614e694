"""Loads a stream into an engine's parameters: first a dry run of the model's own `load_weights`, then bucket by bucket.

The dry run feeds meta tensors to `load_weights` and records every copy instead of making it. So the engine's own code
says, before the first byte, which names it does not take, which shapes do not fit, which elements of which parameter
nothing would fill (a missing k_proj, one expert's gate), and where every part of every tensor goes. Parameters that
keep the layout in which they are loaded are then filled straight from the bucket, one launch a bucket. The others go
through `load_weights`: what some engines lay out anew after loading, and what loading computes something of. An
engine's own `Loader` overrides what is different there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.plan import Plan
from ...kernels.segments import copies
from ...shards import Box, Piece, cut, numel, overlap
from ...stream.buckets import Slot, Table, dtype_name, metas
from ...stream.direct_targets import DirectTargets
from ...stream.window import Window
from ..messages import DryRunAnswer
from ..transport.peer_memory import ExportedMemory
from .dry_run import Capture, Copy, Record, coverage, feed, torn
from .modules import Modules, ties_of, unchanged


@dataclass(eq=False)
class DryRunReport:
    """What the dry run of one table showed.

    Args:
        copies: what goes straight, by name.
        targets: the same for a trainer that writes by itself: tensors that the engine holds in the stream's dtype.
        near: the same for a trainer in this process, which also writes to some layers that are laid out anew.
        staged: names that go through `load_weights`, whole.
        fills: constants that loading writes (padding).
        answer: what the trainer gets of it.
        elements: elements filled and elements there are.
        layers: that are laid out anew after loading, each with the names that it is made of.
        touched: modules that get something of the stream, by `id`.
    """

    copies: dict[str, list[Copy]]
    targets: DirectTargets
    near: DirectTargets
    staged: set[str]
    fills: list[tuple[Tensor, Any]]
    answer: DryRunAnswer
    elements: tuple[int, int]
    layers: list[tuple[nn.Module, frozenset[str]]]
    touched: frozenset[int]
    _exports: ExportedMemory | None = None

    @property
    def blocked(self) -> set[str]:
        """Names of tensors that become more here than boxes of parameters in the stream's dtype."""
        return self.staged.union(self.copies).difference(self.targets.views)

    @property
    def exports(self) -> ExportedMemory:
        """How trainers in other processes of this host map `targets`."""
        if self._exports is None or (self._exports.digest and not self._exports.hold()):
            self._exports = ExportedMemory(self.targets, self.blocked)
        return self._exports

    def pieces(self, name: str, window: Window) -> Iterator[Piece]:
        """Yield where a tensor goes straight to, as boxes of the parameter that it is a window of."""
        for copy in self.copies.get(name, ()):
            start, _ = window.outer(copy.window.box)
            yield Piece(start, window.unfold(copy.window.unfold(copy.destination)))

    @cached_property
    def digest(self) -> str:
        """Equal for two reports if the trainer would get the same of both."""
        sent = json.dumps([asdict(self.answer), self.elements], sort_keys=True)
        return hashlib.blake2b(sent.encode(), digest_size=16).hexdigest()


class Loader:
    """Loads full weight sets into one worker's model.

    Args:
        modules: of the engine's live model, LoRA wrappers and all.
    """

    def __init__(self, modules: Modules, device: torch.device) -> None:
        self.model: Any = modules.model
        self.modules, self.device = modules, device
        self._examined: tuple[Any, DryRunReport] | None = None
        self._plans: dict[Hashable, tuple[int, Sequence[Slot], Plan]] = {}
        self._begun: dict[str, tuple[Tensor, int]] = {}
        self.reloaded = 0
        """Layers that the last load had the engine lay out anew."""

    @property
    def ties(self) -> bool:
        """Whether some parameter has two names here (a head tied to the embedding)."""
        return bool(self.modules.answer(ties_of))

    def examine(self, digest: str, table: Table) -> DryRunReport:
        """Return the dry run of a table; kept while table (by its digest) and parameters stay the same."""
        key = digest, self.modules.look().facts
        if self._examined is None or self._examined[0] != key:
            with torch.no_grad(), self._bare():
                self._examined = key, self._dry_run(table)
            self._plans.clear()
        return self._examined[1]

    def begin(self, report: DryRunReport) -> None:
        """Fill what loading fills with constants."""
        with torch.no_grad():
            for view, value in report.fills:
                view.fill_(value)

    def load(
        self,
        report: DryRunReport,
        index: Hashable,
        slots: Sequence[Slot],
        data: Tensor,
        keep: Callable[[str, Tensor], object],
    ) -> None:
        """Write one bucket into the engine, on the current stream; `data` may be reused after that work.

        Args:
            index: under which its plan is kept, for slots that are the same object the next time.
            keep: called with every whole tensor that goes through `load_weights`, before it does.
        """
        at, known, plan = self._plans.get(index, (0, (), None))
        if plan is None or at != data.data_ptr() or known is not slots:
            moved = [pair for slot in slots for pair in pairs(report, slot, data)]
            plan = Plan([segment for source, to in moved for segment in copies("engine", source, to)])
            self._plans[index] = (data.data_ptr(), slots, plan)
        plan.run()
        tensors = [whole for slot in slots if slot.name in report.staged for whole in self._staged(slot, data)]
        if tensors:
            for name, tensor in tensors:
                keep(name, tensor)
            with torch.no_grad(), self._bare():
                self._through(tensors)

    def written(self, names: Collection[str]) -> None:
        """Note that the trainer has written tensors by itself which otherwise go through `load_weights`."""

    def load_layers(
        self, report: DryRunReport, layers: Sequence[tuple[nn.Module, frozenset[str]]], tensor: Callable[[str], Tensor]
    ) -> None:
        """Make some of the layers again that are laid out anew after loading.

        Args:
            layers: with the names that each is made of.
            tensor: makes one of these, whole, in memory of its own: `load_weights` may write to it.
        """
        raise NotImplementedError("this engine lays no layer out anew")

    def _staged(self, slot: Slot, data: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Keep a slot of a tensor that goes through `load_weights`; yield the tensor once it is whole, in memory of its
        own, as `load_weights` may write to it (GPT-OSS zeroes biases)."""
        if slot.name not in self._begun:
            self._begun[slot.name] = torch.empty(slot.whole, dtype=slot.dtype, device=data.device), 0
        tensor, filled = self._begun[slot.name]
        cut(tensor, slot.box).copy_(slot.view(data))
        filled += slot.nbytes // slot.dtype.itemsize
        self._begun[slot.name] = tensor, filled
        if filled == tensor.numel():
            del self._begun[slot.name]
            yield slot.name, tensor

    def arrived(
        self, report: DryRunReport, slots: Sequence[Slot], data: Tensor, placed: bool = False
    ) -> dict[str, bool]:
        """Return by name whether the engine's parameters hold the bucket's values, bit for bit: of what went straight,
        and of what the trainer has written (`placed`), once all that shares scales has arrived."""
        equal: dict[str, bool] = {}
        for slot in slots:
            found = pairs(report, slot, data)
            if slot.shape == slot.whole:
                # Not by way of windows, so that a mistake there shows.
                flat = slot.view(data).view(-1)
                straight = report.copies.get(slot.name, ())
                found = ((flat[c.offset :].as_strided(c.destination.shape, c.stride), c.destination) for c in straight)
            for source, to in found:
                sent = source.to(to.dtype).contiguous().view(-1).view(torch.uint8)
                held = to.contiguous().view(-1).view(torch.uint8)
                equal[slot.name] = equal.get(slot.name, True) and torch.equal(held, sent)
        return equal

    def finish(self) -> None:
        """Make again what the engine makes of several layers' weights: everything is loaded."""

    def abort(self) -> None:
        """Forget what a broken load left open."""
        self._begun = {}

    def drop_plans(self) -> None:
        """Forget plans that read buckets, whose memory goes away."""
        self._plans.clear()

    # What is different from engine to engine

    def kernels(self) -> list[Any]:
        """Return what layers compute with instead of their parameters, and make anew whenever these are processed."""
        return []

    def _bare(self) -> AbstractContextManager[None]:
        """Run a block with the model as `load_weights` knows it."""
        return nullcontext()

    def _laid_anew(self) -> list[nn.Module]:
        """Return the layers that are laid out anew after loading; the outermost where they nest."""
        return []

    def _as_loading(self, layers: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Run a block with these layers as they are at loading."""
        return nullcontext()

    def _near(
        self,
        targets: DirectTargets,
        roots: Sequence[nn.Module],
        records: Sequence[Record],
        fed: Mapping[str, Tensor],
        owners: Mapping[str, nn.Module],
    ) -> DirectTargets:
        """Return `DryRunReport.near`.

        Args:
            targets: of any trainer.
            roots: layers that are laid out anew after loading.
            records: what loading copies.
            fed: the stream, on the meta device.
            owners: of the engine's parameters, by path.
        """
        return targets

    def _through(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Load whole tensors that do not go straight."""
        self.model.load_weights(iter(tensors))

    def _filled(self, module: nn.Module) -> dict[str, Tensor | None]:
        """Return the parameters and persistent buffers of a module, which a checkpoint has to fill."""
        buffers = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
        return {**module._parameters, **buffers}

    def _unreachable(self) -> dict[str, str]:
        """Return which parts of the model are refused and why: they make something of weights only once."""
        return {}

    def _absent(self, fed: Sequence[tuple[str, Tensor]]) -> list[str]:
        """Return the tensors for parts of the model that the engine was started without."""
        return []

    def _left_out(self, names: Sequence[str]) -> list[str]:
        """Return those of some names that the engine's class has no part for, whatever its settings."""
        return []

    def _kept(self, missing: Mapping[str, str], written: Collection[str]) -> tuple[list[str], list[str]]:
        """Return parameters that stay as the engine has them, by path, and what nothing would fill, in words.

        Args:
            missing: paths of parameters that the stream does not fill -> in words.
            written: paths of those that get something.
        """
        return [], list(missing.values())

    def _renames(self, table: Table, refused: Mapping[str, str]) -> Sequence[Sequence[str]]:
        """Return `DryRunAnswer.renames` for a table some of whose tensors are refused."""
        return ()

    def _serves(self) -> str:
        """Return `DryRunAnswer.serves`."""
        return type(self.model).__name__

    # The dry run

    def _dry_run(self, table: Table) -> DryRunReport:
        fed = [(meta.name, torch.empty(meta.shape, dtype=meta.dtype, device="meta")) for meta in metas(table).values()]
        ties = ties_of(self.modules)
        roots = self._laid_anew()
        named = list(self.model.named_modules())
        # Of a part that the engine was started without: they stay without values.
        unbuilt = {path for path, (tensor, _) in self._engine_tensors().items() if tensor.is_meta}
        with self._as_loading(roots), unchanged([module for _, module in named]) as made:
            tensors = {path: found for path, found in self._engine_tensors().items() if path not in unbuilt}
            owners = {path: owner for path, (_, owner) in tensors.items()}
            capture, refused = self._recorded({path: tensor for path, (tensor, _) in tensors.items()}, owners, fed)
            capture.records = [record for record in capture.records if record.path not in unbuilt]
            for number, name, parameter in made():
                prefix, owner = named[number]
                capture.adopt(path := f"{prefix}.{name}" if prefix else name, parameter)
                owners[path] = owner
            missing, elements = coverage(capture, ties)
        refused |= torn(capture, ties) | self._unreachable()
        outermost = {id(layer): root for root in roots for layer in root.modules()}
        names: dict[int, set[str]] = {id(root): set() for root in roots}
        for record in capture.records:
            if record.path in owners and id(owners[record.path]) in outermost:
                names[id(outermost[id(owners[record.path])])].add(record.name)
        staged_paths = {path for path, owner in owners.items() if id(owner) in outermost}
        staged = {r.name for r in capture.records if r.copy is None or r.path in staged_paths}
        straight: dict[str, list[Copy]] = {}
        for record in capture.records:
            if record.copy is not None and record.name not in staged:
                straight.setdefault(record.name, []).append(record.copy)
        taken = straight.keys() | staged
        dtypes = {meta.name: meta.dtype for meta in metas(table).values()}
        targets = DirectTargets(
            {
                name: [(copy.window.box, copy.window.unfold(copy.destination)) for copy in found]
                for name, found in straight.items()
                if all(copy.destination.dtype == dtypes[name] for copy in found)
            }
        )
        ignored = {name: tensor for name, tensor in fed if name not in taken and name not in refused}
        dropped = self._left_out(list(ignored))
        absent = self._absent([pair for pair in ignored.items() if pair[0] not in set(dropped)])
        kept, lacking = self._kept(missing, {record.path for record in capture.records})
        return DryRunReport(
            straight,
            targets,
            self._near(targets, roots, capture.records, dict(fed), owners),
            staged,
            [(view, value) for path, view, value in capture.fills if path not in staged_paths],
            DryRunAnswer(
                refused=refused,
                ignored=list(ignored),
                absent=[*absent, *dropped],
                missing=lacking,
                partial=_partial(capture.records, dict(fed)),
                dtypes={r.name: dtype_name(r.dtype) for r in capture.records},
                dropped=dropped,
                kept=kept,
                renames=self._renames(table, refused) if refused else (),
                serves=self._serves(),
            ),
            elements,
            [(root, frozenset(names[id(root)])) for root in roots],
            frozenset(id(owners[r.path]) for r in capture.records if r.path in owners),
        )

    def _recorded(
        self, tensors: dict[str, Tensor], owners: Mapping[str, nn.Module], fed: list[tuple[str, Tensor]]
    ) -> tuple[Capture, dict[str, str]]:
        """Return what `load_weights` copies, and which tensors it refuses, and why.

        Args:
            tensors: of the engine, by path, that a checkpoint fills.
            owners: of them, by path.
            fed: tensors of the stream, on the meta device.
        """
        capture = Capture(tensors, fed, everything(self.model))
        return capture, feed(self.model, capture, fed)

    def _engine_tensors(self) -> dict[str, tuple[Tensor, nn.Module]]:
        """Return the tensors that a checkpoint has to fill, and their modules, by path."""
        return {
            f"{name}.{key}" if name else key: (tensor, module)
            for name, module in self.model.named_modules()
            for key, tensor in self._filled(module).items()
            if tensor is not None and tensor.numel()
        }


def _partial(records: Sequence[Record], fed: Mapping[str, Tensor]) -> dict[str, int]:
    """Return how many elements are taken of each tensor that is not taken whole."""
    boxes: dict[str, set[Box]] = {}
    for record in records:
        whole = ((0,) * fed[record.name].dim(), tuple(fed[record.name].shape))
        boxes.setdefault(record.name, set()).add(whole if record.copy is None else record.copy.window.box)
    taken = {name: numel(list(some)) for name, some in boxes.items()}
    return {name: count for name, count in taken.items() if count < fed[name].numel()}


def pairs(report: DryRunReport, slot: Slot, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what of a slot goes straight: views in the bucket, and in the engine."""
    view = slot.view(data)
    for copy in report.copies.get(slot.name, ()):
        box = overlap(slot.box, copy.window.box)
        if box is not None:
            inside = tuple(b - s for b, s in zip(box[0], slot.start, strict=True)), box[1]
            yield copy.window.fold(cut(view, inside)), cut(copy.destination, copy.window.inner(box))


def everything(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all that the engine holds, also non-persistent buffers."""
    yield from model.named_parameters()
    yield from model.named_buffers()
