"""Which parameters of a trainer an engine keeps as they are: each is a rectangle of one of the engine's parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...names import named_tensors
from ...shards import Box, cut
from ...stream.bucket_writer import BucketWriter
from ...stream.direct_targets import DirectTargets
from ...stream.source import Entry


class Place(NamedTuple):
    """Where a parameter of the trainer's may lie in the engine.

    Args:
        name: of the parameter, or of its tensor in the stream.
        owners: the modules that have it, with its attribute: several where it is tied.
        view: of the engine's memory, laid out as the parameter.
    """

    name: str
    owners: Sequence[tuple[nn.Module, str]]
    view: Tensor

    @property
    def parameter(self) -> Tensor | None:
        """The parameter as its first owner has it now."""
        owner, attribute = self.owners[0]
        return owner._parameters.get(attribute)

    def put(self, parameter: Tensor) -> None:
        """Put another parameter in its place: PyTorch lets none change between meta and a device."""
        for owner, attribute in self.owners:
            owner._parameters[attribute] = parameter  # type: ignore[assignment]


class Apart(NamedTuple):
    """A tensor that the trainer holds by itself, and why."""

    nbytes: int
    why: str


def places(model: nn.Module, writer: BucketWriter, targets: DirectTargets, apart: dict[int, Apart]) -> Iterator[Place]:
    """Yield the places of all parameters that the engine keeps as the trainer has them.

    Args:
        writer: the stream of the base, as it fits the engine.
        targets: where the engine keeps its tensors.
        apart: gets all other tensors, by identity.
    """
    entries = defaultdict[str, list[Entry]](list)
    for entry in writer.entries.values():
        for source in entry.sources:
            entries[source].append(entry)
    owners, found = defaultdict[int, list[tuple[nn.Module, str]]](list), dict[int, tuple[list[str], Tensor]]()
    for name, owner, attribute, tensor in named_tensors(model):
        owners[id(tensor)].append((owner, attribute))
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    for key, (names, tensor) in found.items():
        owner, attribute = owners[key][0]
        view: Tensor | None = None
        if attribute in owner._buffers:
            why = "buffers"
        elif tensor.requires_grad:
            why = "trained by itself"
        else:  # of a tied one, the stream has one name or several
            name = next((name for name in names if name in entries), names[0])
            view, why = _place(tensor, entries.get(name, ()), targets)
        if view is None:
            apart[key] = Apart(tensor.nbytes, why)
        else:
            yield Place(names[0], owners[key], view)


def _place(tensor: Tensor, entries: Sequence[Entry], targets: DirectTargets) -> tuple[Tensor | None, str]:
    """Return where the engine keeps a parameter; or None, and why it does not keep it as the trainer has it."""
    if not entries or any(entry.window is None or len(entry.sources) > 1 for entry in entries):
        return None, "converted on its way"
    pieces = list[tuple[Box, Tensor]]()
    for entry in entries:
        piece, why = _view(entry, tensor.dtype, targets)
        if piece is None:
            return None, why
        assert entry.window is not None
        pieces.append((entry.window.box, entry.window.unfold(piece)))
    view = joined(tensor.shape, pieces)
    if view is None:
        return None, "held by the engine in pieces that do not follow each other"
    if view.ndim > 1 and view.stride(-1) != 1:
        return None, "laid out by columns"
    return view, ""


def _view(entry: Entry, dtype: torch.dtype, targets: DirectTargets) -> tuple[Tensor | None, str]:
    """Return where the engine keeps a tensor of the stream; or None, and why it does not keep it as the trainer has
    it."""
    name = entry.meta.name
    found = targets.views.get(name, ())
    if name in targets.scaled or not found:
        return None, "laid out anew by the engine, converted or not held"
    (start, size), view = found[0]
    if len(found) > 1 or any(start) or tuple(size) != tuple(entry.meta.shape):
        return None, "held by the engine in parts"
    if view.dtype != dtype:
        return None, f"{dtype} in the trainer, {view.dtype} in the engine"
    return view, ""


def joined(shape: Sequence[int], pieces: Sequence[tuple[Box, Tensor]]) -> Tensor | None:
    """Return the tensor that these pieces are boxes of, where they lie; None if there is none.

    Args:
        shape: of the tensor.
        pieces: boxes that make it up, each with a view of memory that has the dimensions of the tensor. Experts come
            one by one, and gate and up apart, where model and engine have one parameter for all.
    """
    box, first = min(pieces, key=lambda piece: piece[0][0])
    if any(box[0]) or sum(view.numel() for _, view in pieces) != torch.Size(shape).numel():
        return None
    storage, dtype, step = first.untyped_storage(), first.dtype, first.element_size()
    strides = [first.stride(dim) if size > 1 else 0 for dim, size in enumerate(box[1])]
    # A dimension that one piece does not show is shown by the way from it to the next piece.
    for dim in (d for d, size in enumerate(box[1]) if size < shape[d] and size == 1):
        after = next((view for (start, _), view in pieces if start[dim] and sum(map(bool, start)) == 1), None)
        if after is None:
            return None
        start = next(start for (start, _), view in pieces if view is after)
        strides[dim] = (after.data_ptr() - first.data_ptr()) // step // start[dim]
    if any(stride < 0 for stride in strides):
        return None
    # Outside of inference mode, or no backward pass could keep it.
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=dtype, device=first.device)
        strides = [s if shape[d] > 1 else 1 for d, s in enumerate(strides)]
        end = first.storage_offset() + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        if end * step > storage.nbytes():
            return None
        whole = empty.set_(storage, first.storage_offset(), torch.Size(shape), strides)
    for (start, size), view in pieces:
        there = cut(whole, (start, size))
        if there.data_ptr() != view.data_ptr() or view.untyped_storage().data_ptr() != storage.data_ptr():
            return None
        if any(n > 1 and a != b for n, a, b in zip(size, there.stride(), view.stride(), strict=True)):
            return None
    return whole
