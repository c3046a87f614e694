"""Records which copies `load_weights` would make, in a dry run on tensors without values."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from traceback import extract_tb, walk_tb
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ...kernels.segments import FLOATS
from ...stream.window import Window, window_of
from ..messages import ANOTHER_SIZE, TIED

_log = logging.getLogger(__name__)
_TO_COPY = torch.ops.aten._to_copy.default
_MODES = torch._C.DispatchKeySet(torch._C.DispatchKey.Python) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.PythonTLSSnapshot
)
"""The keys by which a thread calls its dispatch modes."""


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
    """A captured write of a tensor of the stream (`name`) to one of the engine (`path`, which has `dtype`); `copy` is
    None unless it is a plain copy."""

    name: str
    path: str
    dtype: torch.dtype
    copy: Copy | None


class Capture(TorchDispatchMode):
    """Records copies into the engine's tensors instead of making them. Code that reads values of the stream finds all
    of them to be `value`.

    Args:
        tensors: of the engine, by path, that a checkpoint fills.
        fed: tensors of the stream, on the meta device.
        live: all that the engine holds, also what no checkpoint fills: nothing of it is written.
    """

    def __init__(
        self, tensors: dict[str, Tensor], fed: list[tuple[str, Tensor]], live: Iterable[tuple[str, Tensor]] = ()
    ) -> None:
        super().__init__()
        self.tensors = tensors
        self._owners: dict[int, list[tuple[int, int, str]]] = {}
        for path, tensor in tensors.items():
            self._owners.setdefault(_storage(tensor), []).append((*_bytes(tensor), path))
        self._live = {_storage(tensor): path for path, tensor in live}
        self._fed = {_storage(tensor): (name, tensor) for name, tensor in fed}
        self._origins: dict[int, tuple[frozenset[str], Any]] = {
            _storage(tensor): (frozenset([name]), tensor) for name, tensor in fed
        }
        self.clear()
        self.current: str | None = None
        self.value = 0

    def clear(self) -> None:
        """Forget what was captured."""
        self.records: list[Record] = []
        self.fills: list[tuple[str, Tensor, Any]] = []
        self.written: dict[str, list[Tensor]] = {path: [] for path in self.tensors}
        self.made: list[tuple[frozenset[str], Tensor]] = []
        """Writes to tensors that did not exist before, and the names in the stream that they are made of."""
        self.read: set[str] = set()
        """Names whose values `load_weights` looks at."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        if any(_storage(tensor) in self._live or self._owner(tensor) is not None for tensor in written):
            for tensor in written:
                self._write(func, tensor, args, kwargs)
            return args[0]
        names = self._names((args, kwargs))
        if func is _TO_COPY and args[0].is_meta:
            # Where a tensor of the stream lies makes no difference, and its values stay the same.
            kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
            if kwargs.get("dtype") in (None, args[0].dtype):
                return args[0]
        try:
            result = func(*args, **kwargs)
        except Exception:
            if not names and not any(tensor.is_meta for tensor in _tensors((args, kwargs))):
                raise
            self.read |= names
            result = func(*tree_map(self.stand_in, args), **tree_map(self.stand_in, kwargs))
        self.made += [(names, tensor) for tensor in written]
        if names:
            for tensor in written:
                self._fed.pop(_storage(tensor), None)  # not what the stream holds any more
            for tensor in [*written, *_tensors(result)]:
                before = self._origins.get(_storage(tensor), (frozenset(), None))[0]
                self._origins[_storage(tensor)] = before | names, tensor
        return result

    def stand_in(self, thing: Any) -> Any:
        """Return a tensor filled with `value`, without memory of its own, for a tensor without values."""
        if not isinstance(thing, Tensor) or not thing.is_meta:
            return thing
        self.read |= self._names(thing)
        return torch.full((), self.value, dtype=thing.dtype).expand(thing.shape)

    def _names(self, things: Any) -> frozenset[str]:
        """Return the names in the stream that some tensors are made of."""
        found = [self._origins[key][0] for t in _tensors(things) if (key := _storage(t)) in self._origins]
        return frozenset().union(*found)

    def _write(self, func: Any, tensor: Tensor, args: Any, kwargs: Any) -> None:
        path, view, name = self._owner(tensor), tensor.detach(), func._schema.name
        if path is not None:
            self.written[path].append(view)
        if name in ("aten::fill_", "aten::zero_") and (len(args) == 1 or not isinstance(args[1], Tensor)):
            if path is not None:
                self.fills.append((path, view, 0 if len(args) == 1 else args[1]))
            return
        source = args[1] if name == "aten::copy_" and isinstance(args[1], Tensor) else None
        if source is not None and torch.broadcast_shapes(source.shape, view.shape) != view.shape:
            raise RuntimeError(f"a tensor of size {list(source.shape)} does not go into one of {list(view.shape)}")
        fed = None if source is None else self._fed.get(_storage(source))
        if path is None or source is None or fed is None or fed[0] in self.read:
            # Something computed: the tensor that is being fed goes through load_weights for real.
            made_of = (
                self._names((args, kwargs)) or self._loaded(args) or ([] if self.current is None else [self.current])
            )
            where = path or self._live[_storage(tensor)]
            self.records += [Record(name, where, view.dtype, None) for name in made_of]
            return
        offset, stride = int(source.storage_offset()), source.stride()
        window = window_of((offset, source.shape, stride), fed[1].shape, fed[1].stride())
        converts = source.dtype == view.dtype or (source.dtype in FLOATS and view.dtype in FLOATS)
        plain = window is not None and source.shape == view.shape and converts
        copy = Copy(view, window, offset, stride) if window is not None and plain else None
        self.records.append(Record(fed[0], path, view.dtype, copy))

    def _loaded(self, things: Any) -> frozenset[str]:
        """Return the names that were loaded into the engine's tensors among these objects."""
        read = {path for tensor in _tensors(things) if (path := self._owner(tensor)) is not None}
        return frozenset(record.name for record in self.records if record.path in read)

    def _owner(self, tensor: Tensor) -> str | None:
        owners = self._owners.get(_storage(tensor))
        if owners is None:
            return None
        begin, _ = _bytes(tensor)
        return next((path for first, last, path in owners if first <= begin < max(last, first + 1)), owners[0][2])

    def adopt(self, path: str, parameter: Tensor) -> None:
        """Note that `load_weights` created this parameter, perhaps in place of another, as it will in a real load."""
        for names, tensor in self.made:
            if _storage(tensor) == _storage(parameter):
                if path in self.tensors and self.tensors[path].shape == parameter.shape:
                    self.written[path].append(tensor)
                self.records += [Record(name, path, parameter.dtype, None) for name in names]

    def owner_in(self, error: BaseException) -> str | None:
        """Return the path of the engine's tensor that was being written when an error was raised."""
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        for frame in reversed(frames):
            for value in frame.f_locals.values():
                if isinstance(value, Tensor) and (path := self._owner(value)) is not None:
                    return path
        return None


class _Values(TorchFunctionMode):
    """Lets a tensor without values be made a list or an array: calls that no dispatch sees."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            args = tree_map(self._capture.stand_in, args)
        return func(*args, **(kwargs or {}))


@contextmanager
def _no_other_modes() -> Iterator[None]:
    """Run a block in which torch calls the dispatch modes that it enters, and none that was entered before.

    Where something has left a thread with modes but without their keys, torch calls no mode at all: every copy of a dry
    run was made instead of recorded, and raised.
    """
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    modes = torch._C._len_torch_dispatch_stack()
    if (exclude & _MODES).raw_repr() or (modes and not (include & _MODES).raw_repr()):
        _log.warning("torch calls none of the thread's %d dispatch modes: keys %s without %s", modes, include, exclude)
    with torch._C._ForceDispatchKeyGuard(include - _MODES, exclude - _MODES), _disable_current_modes():
        try:
            yield
        finally:  # a mode that an interrupt kept from leaving would take the writes of later pushes for a dry run's
            while torch._C._len_torch_dispatch_stack():
                torch._C._pop_torch_dispatch_stack(None)


def feed(model: Any, capture: Capture, metas: list[tuple[str, Tensor]]) -> dict[str, str]:
    """Run `load_weights` on all tensors under capture, and on single ones if that fails; returns name -> error."""

    def run(pairs: list[tuple[str, Tensor]]) -> None:
        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in pairs:
                capture.current = name
                yield name, tensor

        with _no_other_modes(), _Values(capture), capture:
            model.load_weights(noted())

    refused: dict[str, str] = {}
    try:
        run(metas)
    except Exception:
        capture.clear()
        for name, tensor in metas:
            try:
                run([(name, tensor)])
            except Exception as error:
                refused[name] = _why(capture, name, tensor, error)
    # If the way depends on values, the other way counts as well: vLLM takes it in a real load, when the values are
    # there.
    capture.value = 1
    for name, tensor in metas:
        if name in capture.read and name not in refused:
            with suppress(Exception):
                run([(name, tensor)])
    capture.value = 0
    capture.records = [replace(r, copy=None) if r.name in capture.read else r for r in capture.records]
    return refused


def _why(capture: Capture, name: str, tensor: Tensor, error: Exception) -> str:
    """Return in one line why a tensor is refused; vLLM asserts sizes without a message."""
    text = str(error).strip().split("\n")[0]
    path = capture.owner_in(error)
    if path is not None and (not text or "size" in text.lower() or "shape" in text.lower()):
        there = list(capture.tensors[path].shape)
        if there != list(tensor.shape):
            return f"{ANOTHER_SIZE}{list(tensor.shape)} here and {'' if path == name else f'{path} '}{there} there"
    frame = extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text or f'{frame.line} (in {frame.name})'}"


def torn(capture: Capture, ties: dict[str, str]) -> dict[str, str]:
    """Find tensors for one of two tied names where the other name gets a tensor of its own: the last one loaded would
    win."""
    names: dict[str, set[str]] = {}
    for record in capture.records:
        names.setdefault(record.path, set()).add(record.name)
    return {
        name: f"{TIED}{', '.join(sorted(names[first]))}"
        for path, first in ties.items()
        for name in names.get(path, set()) - names.get(first, set())
        if first in names
    }


def coverage(capture: Capture, ties: dict[str, str]) -> tuple[dict[str, str], tuple[int, int]]:
    """Return engine tensors with elements that nothing writes, each in words by its path; and how many elements are
    written, and how many there are."""
    missing, total, filled = dict[str, str](), 0, 0
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
            missing[path] = f"{path} {list(tensor.shape)}: {wanted - covered} of {wanted} elements"
    return missing, (filled, total)


def _count(views: Sequence[Tensor]) -> int:
    """Return how many elements views of one tensor cover: their contiguous runs, united."""
    runs = [_runs(view) for view in views if view.numel()]
    if not runs:
        return 0
    spans = np.unique(np.concatenate(runs), axis=0)
    ends = np.maximum.accumulate(spans[:, 1])
    starts = np.maximum(spans[:, 0], np.concatenate([spans[:1, 0], ends[:-1]]))
    return int(np.maximum(spans[:, 1] - starts, 0).sum())


def _runs(view: Tensor) -> np.ndarray:
    """Return int64 `[n, 2]`: begin and end, in elements of the storage, of the contiguous runs of a view."""
    dims = sorted(((st, sz) for st, sz in zip(view.stride(), view.shape, strict=True) if sz > 1), reverse=True)
    length = 1
    while dims and dims[-1][0] == length:
        length *= dims.pop()[1]
    begins = np.array([view.storage_offset()], dtype=np.int64)
    for stride, size in dims:
        begins = (begins[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return np.stack([begins, begins + length], axis=1)


def _tensors(things: Any) -> list[Tensor]:
    return [thing for thing in tree_leaves(things) if isinstance(thing, Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    return [t for at, name in _writes(func) for t in _tensors(args[at] if at < len(args) else kwargs.get(name))]


@cache
def _writes(func: Any) -> list[tuple[int, str]]:
    """Return the arguments that an operator writes to, by position and name."""
    infos = [(at, argument.name, argument.alias_info) for at, argument in enumerate(func._schema.arguments)]
    return [(at, name) for at, name, info in infos if info is not None and info.is_write]


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after its last."""
    size = tensor.element_size()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else -1
    begin = int(tensor.storage_offset())
    return begin * size, (begin + last + 1) * size


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
