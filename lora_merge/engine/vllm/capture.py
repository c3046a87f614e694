"""The dry run's recorder: what `load_weights` would copy where, written down instead of done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...kernels.segments import FLOATS
from ...stream.window import Window, window_of


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A box of a tensor of the stream that goes straight to a place in a parameter.

    Args:
        destination: live view in the engine.
        window: the box, seen as the destination is.
        offset, stride: the same in elements of the contiguous tensor, as captured.
    """

    destination: Tensor
    window: Window
    offset: int
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One captured copy: from which tensor of the stream into which of the engine; `copy` where it is a plain one."""

    name: str
    path: str
    copy: Copy | None


class Capture(TorchDispatchMode):
    """Writes down copies into the engine's tensors instead of making them."""

    def __init__(self, tensors: dict[str, Tensor], fed: list[tuple[str, Tensor]]) -> None:
        super().__init__()
        self.tensors = tensors
        self._owners: dict[int, list[tuple[int, int, str]]] = {}
        for path, tensor in tensors.items():
            self._owners.setdefault(_storage(tensor), []).append((*_bytes(tensor), path))
        self._fed = {_storage(tensor): (name, tensor) for name, tensor in fed}
        self.records: list[Record] = []
        self.fills: list[tuple[str, Tensor, Any]] = []
        self.written: dict[str, list[Tensor]] = {path: [] for path in tensors}
        self.current: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and isinstance(args[0], Tensor):
            path = self._owner(args[0])
            if path is not None:
                self._write(func, path, args)
                return args[0]
        return func(*args, **(kwargs or {}))

    def _write(self, func: Any, path: str, args: Any) -> None:
        view = args[0].detach()
        name = func._schema.name
        if name in ("aten::fill_", "aten::zero_") and (len(args) == 1 or not isinstance(args[1], Tensor)):
            self.fills.append((path, view, 0 if len(args) == 1 else args[1]))
            self.written[path].append(view)
            return
        source = args[1] if name == "aten::copy_" and isinstance(args[1], Tensor) else None
        fed = None if source is None else self._fed.get(_storage(source))
        self.written[path].append(view)
        if source is None or fed is None:
            # Something computed: the tensor that is being fed goes through load_weights for real.
            if self.current is not None:
                self.records.append(Record(self.current, path, None))
            return
        offset, stride = int(source.storage_offset()), source.stride()
        window = window_of((offset, source.shape, stride), fed[1].shape, fed[1].stride())
        converts = source.dtype == view.dtype or (source.dtype in FLOATS and view.dtype in FLOATS)
        plain = window is not None and source.shape == view.shape and converts
        copy = Copy(view, window, offset, stride) if window is not None and plain else None
        self.records.append(Record(fed[0], path, copy))

    def _owner(self, tensor: Tensor) -> str | None:
        owners = self._owners.get(_storage(tensor))
        if owners is None:
            return None
        begin, _ = _bytes(tensor)
        return next((path for first, last, path in owners if first <= begin < max(last, first + 1)), owners[0][2])


def feed(model: Any, capture: Capture, metas: list[tuple[str, Tensor]]) -> dict[str, str]:
    """Run `load_weights` under capture; name -> error. All at once, and one by one only where that fails."""

    def noted(pairs: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in pairs:
            capture.current = name
            yield name, tensor

    refused: dict[str, str] = {}
    try:
        with capture:
            model.load_weights(noted(metas))
    except Exception:
        capture.records.clear()
        for views in capture.written.values():
            views.clear()
        capture.fills.clear()
        for pair in metas:
            try:
                with capture:
                    model.load_weights(noted([pair]))
            except Exception as error:
                refused[pair[0]] = f"{type(error).__name__}: {error}".split("\n")[0]
    return refused


def torn(capture: Capture, ties: dict[str, str]) -> dict[str, str]:
    """Tensors for one of two tied names where the other name gets a tensor of its own: the last one would win."""
    names: dict[str, set[str]] = {}
    for record in capture.records:
        names.setdefault(record.path, set()).add(record.name)
    return {
        name: f"the engine ties it to {', '.join(sorted(names[first]))}, but here an adapter changes only one of "
        "the two: start the engine with tie_word_embeddings=False"
        for path, first in ties.items()
        for name in names.get(path, set()) - names.get(first, set())
        if first in names
    }


def coverage(capture: Capture, ties: dict[str, str]) -> tuple[list[str], tuple[int, int]]:
    """Engine tensors with elements that nothing writes, in words; and elements written, elements there are."""
    missing, total, filled = [], 0, 0
    for path, tensor in capture.tensors.items():
        covered = _count(capture.written[path])
        first = ties.get(path, path)
        if first != path:
            covered = max(covered, _count(capture.written[first]))
        # Experts that are padded say how many elements a checkpoint has for them.
        wanted = min(getattr(tensor, "weight_loader_numel", tensor.numel()), tensor.numel())
        total += wanted
        filled += min(covered, wanted)
        if covered < wanted:
            missing.append(f"{path} {list(tensor.shape)}: {wanted - covered} of {wanted} elements")
    return missing, (filled, total)


def _count(views: Sequence[Tensor]) -> int:
    """Elements that views of one tensor cover, each counted once: their contiguous runs, united."""
    runs = [_runs(view) for view in views if view.numel()]
    if not runs:
        return 0
    spans = np.unique(np.concatenate(runs), axis=0)
    ends = np.maximum.accumulate(spans[:, 1])
    starts = np.maximum(spans[:, 0], np.concatenate([spans[:1, 0], ends[:-1]]))
    return int(np.maximum(spans[:, 1] - starts, 0).sum())


def _runs(view: Tensor) -> np.ndarray:
    """`[n, 2]`: begin and end, in elements of the storage, of the contiguous runs of a view."""
    dims = sorted(((st, sz) for st, sz in zip(view.stride(), view.shape, strict=True) if sz > 1), reverse=True)
    length = 1
    while dims and dims[-1][0] == length:
        length *= dims.pop()[1]
    begins = np.array([view.storage_offset()], dtype=np.int64)
    for stride, size in dims:
        begins = (begins[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return np.stack([begins, begins + length], axis=1)


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the one after its last."""
    size = tensor.element_size()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else -1
    begin = int(tensor.storage_offset())
    return begin * size, (begin + last + 1) * size


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
