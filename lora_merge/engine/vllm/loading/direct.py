"""Layers of 8 bits that are written where they lie: a trainer in the engine's process merges, scales and converts in
one launch, and no layer goes through vLLM's reload.

Each kind of layer is tried before one of it is written, whether it is loaded with plain weights, which vLLM quantises,
or with values and scales. vLLM's own code loads and processes random weights; if our kernel fills memory of the same
layout with the same bits, values and scales, layers of this kind are written. Others go through the reload (reload.py),
as all do for a trainer in another process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ....kernels.plan import Plan
from ....kernels.scaled.weights import SCALED_FROM, Group, Scaled, trials
from ....kernels.segments import FP8, copies
from ....shards import cut
from ....stream.buckets import dtype_name
from ....stream.direct_targets import DirectTargets
from ...worker.dry_run import Copy, Record
from .. import internals
from .compressed import Scheme, weights_of
from .formats import quantises
from .layer_snapshot import LayerSnapshot
from .reload import on_meta

_log = logging.getLogger(__name__)
_DEPTH = 6
"""Depth to which objects are searched for tensors that a layer computes with."""


@dataclass(frozen=True, slots=True, eq=False)
class _Weight:
    """A parameter of 8 bits: as matrices `[experts, rows, cols]`, in the order in which it is loaded, and the dtype in
    which the stream has it."""

    values: Tensor
    scales: Tensor
    dtype: torch.dtype

    def scaled(self, group: Group) -> list[Scaled]:
        """Return each matrix with its scales; none if the scales are not as many as groups."""
        found = [
            Scaled(values, scales, group, self.dtype)
            for values, scales in zip(self.values, self.scales.view(len(self.values), -1), strict=True)
        ]
        return found if all(s.grid[0] * s.grid[1] == s.scales.numel() for s in found) else []


@dataclass(frozen=True, slots=True, eq=False)
class _Loading:
    """A layer and what is copied into it as it is loaded.

    Args:
        root: the layer.
        records: what is copied into it: of the stream, and of scales that are made of it.
        fed: the stream, on the meta device.
        schemes: of those of its tensors that are loaded as values and scales.
    """

    root: Any
    records: Sequence[Record]
    fed: Mapping[str, Tensor]
    schemes: Mapping[str, Scheme]

    @property
    def recorded(self) -> Mapping[str, Tensor]:
        """Return its parameters while it is loaded, on the meta device."""
        parameters, _ = internals.get_layerwise_info(self.root).restore_metadata
        return parameters

    @property
    def asis(self) -> set[str]:
        """Return names of parameters that stay what they are while it is loaded."""
        return {_key(r) for r in self.records if r.copy is not None and not r.copy.destination.is_meta}

    @property
    def pairs(self) -> set[str]:
        """Return names of parameters that get values of pairs."""
        return {_key(r) for r in self.records if r.name in self.schemes}

    @property
    def plain(self) -> dict[str, tuple[Tensor, torch.dtype]]:
        """Return its parameters while it is loaded, without scales of pairs; each with the dtype in which the stream
        has it."""
        scales = {_key(r) for r in self.records if r.name not in self.fed}
        dtypes = {_key(r): r.dtype for r in self.records}
        return {key: (meta, dtypes.get(key, meta.dtype)) for key, meta in self.recorded.items() if key not in scales}

    @property
    def way(self) -> tuple[Any, ...]:
        """Return where pairs are copied to; equal for layers that are filled alike."""
        if not self.schemes:
            return ()
        weights = weights_of(self.schemes)
        names = [weights.get(r.name, r.name) for r in self.records]
        order = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return tuple(
            (order[name], r.name in weights, _key(r), r.dtype, tuple(self.fed[name].shape), c.offset, c.stride,
             v.storage_offset(), tuple(v.shape), v.stride())
            for name, r in zip(names, self.records, strict=True)
            if (c := r.copy) is not None and (v := c.destination).is_meta
        )  # fmt: skip

    def load(self, numbers: Mapping[str, Tensor]) -> None:
        """Fill the memory that it is loaded into.

        Args:
            numbers: for all that is `plain`, in its dtype. For parameters that are loaded as pairs, they make up the
                stream's tensors, and the pairs made of these are copied as loading does.
        """
        parameters = {key: self.root._parameters[key].data for key in self.recorded}
        for key, parameter in parameters.items():
            parameter.copy_(numbers[key]) if key in numbers else parameter.fill_(torch.nan)
        of: dict[str, list[tuple[str, Copy]]] = {}
        for record in self.records:
            if record.copy is not None:
                of.setdefault(record.name, []).append((_key(record), record.copy))
        for name, scheme in self.schemes.items():
            meta = self.fed[name]
            tensor = torch.zeros(meta.shape, dtype=meta.dtype, device=next(iter(numbers.values())).device)
            for key, copy in of[name]:
                _source(tensor, copy).copy_(_place(numbers[key], copy))
            for of_pair, made in scheme.pair(name, tensor):
                for key, copy in of.get(of_pair, ()):
                    _place(parameters[key], copy).copy_(_source(made, copy))


def _source(tensor: Tensor, copy: Copy) -> Tensor:
    """Return the part of a contiguous tensor that is copied."""
    return tensor.as_strided(copy.destination.shape, copy.stride, copy.offset)


def _place(tensor: Tensor, copy: Copy) -> Tensor:
    """Return the destination of a copy, in a tensor of the same layout as the recorded parameter."""
    view = copy.destination
    return tensor.as_strided(view.shape, view.stride(), tensor.storage_offset() + view.storage_offset())


def _target(root: Any, record: Record, live: Tensor | None) -> tuple[Any, Tensor]:
    """Return the box of a tensor that loading copies into a layer, and the memory of the layer where it belongs.

    Args:
        live: the parameter of 8 bits that it goes to, as it is loaded; None for other parameters.
    """
    assert record.copy is not None
    view, window = record.copy.destination, record.copy.window
    if view.is_meta:  # it was recorded in the parameter that the layer has while it is loaded
        view = _place(root._parameters[_key(record)].detach() if live is None else live, record.copy)
    return window.box, window.unfold(view)


def _key(record: Record) -> str:
    """Return the name of a parameter in its layer."""
    return record.path.rpartition(".")[2]


class _Reloaded(Exception):
    """Why a layer goes through vLLM's reload."""


class DirectLayers:
    """The layers of one model that can be written where they lie, as far as that was tried."""

    def __init__(self) -> None:
        self._proved: dict[Any, dict[str, Group] | str] = {}
        """By the kind of layer: groups of its weights; or why it is reloaded, in words (an error would hold what was
        tried)."""
        self._written: list[tuple[_Loading, Any]] = []
        """Layers that can be written, each with its kind."""
        self._snapshot = LayerSnapshot(())

    def targets(
        self, roots: Sequence[nn.Module], records: Sequence[Record], fed: Mapping[str, Tensor],
        owners: Mapping[str, nn.Module], schemes: Mapping[str, Scheme],
    ) -> DirectTargets:  # fmt: skip
        """Return the memory of the stream's tensors that go to layers which can be written.

        Args:
            roots: layers that are laid out anew after loading.
            records: what loading copies, of scales that are made of the stream, too.
            fed: the stream, on the meta device.
            owners: of the engine's parameters, by path.
            schemes: of the stream's tensors that are loaded as values and scales.
        """
        self._written = []
        of_root = {id(module): number for number, root in enumerate(roots) for module in root.modules()}
        of_scales, outside = weights_of(schemes), set[str]()
        found: list[list[Record]] = [[] for _ in roots]
        for record in records:
            if record.path in owners and id(owners[record.path]) in of_root:
                found[of_root[id(owners[record.path])]].append(record)
            else:
                outside.add(of_scales.get(record.name, record.name))
        views: dict[str, list[Any]] = {}
        scaled: dict[str, list[Scaled]] = {}
        together = []
        for root, some in zip(roots, found, strict=True):
            names = frozenset(of_scales.get(record.name, record.name) for record in some)
            if not names:
                continue
            try:
                for record in some:
                    of_scale = record.name in of_scales
                    if record.copy is None or (not of_scale and record.dtype != fed[record.name].dtype):
                        raise _Reloaded(f"{record.name} is not copied to {record.path} as it comes")
                if shared := names & outside or names & views.keys():
                    raise _Reloaded(f"{min(shared)} goes to other layers, too")
                loading = _Loading(root, some, fed, {n: schemes[n] for n in names if n in schemes})
                weights = self._weights(loading)
            except _Reloaded as reason:
                _log.debug("%s of %s is reloaded: %s", type(root).__name__, min(names), reason)
                continue
            for record in some:
                if record.name not in of_scales:
                    live, matrices = weights.get(_key(record), (None, []))
                    views.setdefault(record.name, []).append(_target(root, record, live))
                    scaled.setdefault(record.name, []).extend(matrices)
            together.append(names)
            self._written.append((loading, _kind(loading)))
        self._snapshot = LayerSnapshot(loading.root for loading, _ in self._written)
        return DirectTargets(views, scaled, together)

    @property
    def outdated(self) -> bool:
        """Return True if vLLM has reloaded a layer that could be written, whoever asked for that, so that it computes
        in another way or with tensors of its own."""
        if self._snapshot.unchanged:
            return False
        self._snapshot = LayerSnapshot(loading.root for loading, _ in self._written)
        try:
            for loading, kind in self._written:
                _check_holds_only(loading.root)
                if _kind(loading) != kind:
                    raise _Reloaded("its format is another")
        except _Reloaded as reason:
            _log.debug("layers are examined again: %s", reason)
            return True
        return False

    def _weights(self, loading: _Loading) -> dict[str, tuple[Tensor, list[Scaled]]]:
        """Return a layer's parameters of 8 bits by name: as they are loaded, and by matrices.

        Raises:
            _Reloaded: it cannot be written.
        """
        root, found = loading.root, _read(loading)
        if internals.get_tp_group().world_size > 1:
            raise _Reloaded("tensor parallelism")
        _check_holds_only(root)
        kind = _kind(loading)
        if kind not in self._proved:
            try:
                self._proved[kind] = _prove(loading, found)
            except torch.OutOfMemoryError as error:  # there may be room the next time
                raise _Reloaded("no memory to try it") from error
            except _Reloaded as reason:
                self._proved[kind] = str(reason)
            except Exception as error:  # whatever vLLM's own code does not like about this: it has its own way
                _log.debug("a layer could not be tried: %s", type(root).__name__, exc_info=True)
                self._proved[kind] = f"{type(error).__name__} while it was tried: {error}"
        groups = self._proved[kind]
        if isinstance(groups, str):
            raise _Reloaded(groups)
        recorded = loading.recorded
        return {key: (w.values.view(recorded[key].shape), w.scaled(groups[key])) for key, w in found.items()}


class DirectComparison:
    """Compares what a trainer has written to layers with the same tensors out of buckets. These are scaled once more,
    in memory of their own, one group of tensors that share scales at a time.

    Args:
        targets: that the trainer writes to.
    """

    def __init__(self, targets: DirectTargets) -> None:
        self._targets = targets
        self.of = {name: group for group in targets.together for name in group}
        """The tensors that it looks at, each with the group that it is in."""
        self._came: dict[str, Tensor] = {}

    def add(self, tensors: Sequence[tuple[str, Tensor]]) -> dict[str, bool]:
        """Take whole tensors; return, for the groups that are complete, whether the layers hold the same bits."""
        self._came.update(tensors)
        equal: dict[str, bool] = {}
        for group in dict.fromkeys(self.of[name] for name, _ in tensors):
            if self._came.keys() >= group:
                same = self._same({name: self._came.pop(name) for name in group})
                equal |= dict.fromkeys(group, same)
        return equal

    def _same(self, tensors: Mapping[str, Tensor]) -> bool:
        rooms: dict[int, Tensor] = {}

        def again(tensor: Tensor) -> Tensor:
            """Return memory of the same layout."""
            storage = tensor.untyped_storage()
            room = rooms.setdefault(storage.data_ptr(), tensor.new_empty(storage.nbytes(), dtype=torch.uint8))
            return room.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

        weights = {id(s): s for name in tensors for s in self._targets.scaled.get(name, ())}
        pairs = [(t, again(t)) for s in weights.values() for t in (s.weight, s.scales)]
        made = [
            Scaled(weight, scales, s.group, s.dtype)
            for s, (_, weight), (_, scales) in zip(weights.values(), pairs[::2], pairs[1::2], strict=True)
        ]
        segments = []
        for name, tensor in tensors.items():
            for box, view in self._targets.views[name]:
                segments += copies(name, cut(tensor, box), again(view))
                pairs += [(view, again(view))] if view.dtype != FP8 else []
        Plan(segments, made).run()
        return all(torch.equal(_bytes(there), _bytes(here)) for there, here in pairs)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _kind(loading: _Loading) -> Any:
    """Return a key that is equal for layers which are filled and processed alike."""
    root: Any = loading.root
    kernel = getattr(root.quant_method, "fp8_linear", getattr(root.quant_method, "fp8_backend", None))
    return (
        type(root), type(root.quant_method), str(kernel) if hasattr(kernel, "name") else type(kernel), loading.way,
        tuple((name, tuple(t.shape), t.dtype) for name, t in loading.recorded.items()),
        tuple((name, tuple(t.shape), t.stride(), t.dtype) for name, t in root._parameters.items() if t is not None),
    )  # fmt: skip


def _read(loading: _Loading) -> dict[str, _Weight]:
    """Return the parameters of 8 bits of a layer.

    Raises:
        _Reloaded: the layer holds something else than these, their scales, and tensors as they were loaded.
    """
    root, pairs, asis, loaded = loading.root, loading.pairs, loading.asis, loading.plain
    if not (pairs or quantises(root)) or any(True for _ in root.children()) or "cpu_linear" in root.__dict__:
        raise _Reloaded("vLLM does not quantise it, or it holds other layers")
    if other := next((name for name, scheme in loading.schemes.items() if not scheme.by_kernel), None):
        raise _Reloaded(f"the scales of {other} are of its own dtype in the checkpoint, and the kernel's of float32")
    _, buffers = internals.get_layerwise_info(root).restore_metadata
    live = {name: p.data for name, p in root._parameters.items() if p is not None}
    held = {name for name, buffer in root._buffers.items() if buffer is not None}
    if missing := (loaded.keys() - live.keys()) | (held - buffers.keys()):
        raise _Reloaded(f"{min(missing)} is there before or after loading only")
    if both := loading.recorded.keys() & asis:
        raise _Reloaded(f"{min(both)} lies elsewhere while it is loaded, but not all of it")
    scales, found = live.keys() - loaded.keys() - asis, {}
    for name, (meta, dtype) in loaded.items():
        tensor = live[name]
        same = (tensor.shape, tensor.stride(), tensor.dtype) == (meta.shape, meta.stride(), meta.dtype)
        if same and name not in pairs:
            continue
        own = [scale for scale in scales if scale.startswith(f"{name}_scale")]
        values = _as_loaded(tensor, meta)
        if tensor.dtype != FP8 or values is None or len(own) != 1:
            raise _Reloaded(f"{name} is {_layout(tensor)}, loaded as {_layout(meta)}, with scales {own}")
        scale = live[own[0]]
        if scale.dtype != torch.float32 or not scale.is_contiguous() or scale.numel() % len(values):
            raise _Reloaded(f"{own[0]} is {_layout(scale)} for {len(values)} matrices")
        if dtype not in SCALED_FROM:
            raise _Reloaded(f"{name} comes as {dtype}")
        scales = scales - set(own)
        found[name] = _Weight(values, scale, dtype)
    if scales or not found:
        raise _Reloaded(f"it holds {', '.join(sorted(scales)) or 'no weight of 8 bits'}")
    return found


def _layout(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)} by {list(tensor.stride())}"


def _as_loaded(tensor: Tensor, meta: Tensor) -> Tensor | None:
    """Return a quantised weight as matrices of the shape in which it is loaded; None if its elements lie otherwise."""
    if meta.dim() not in (2, 3) or not meta.is_contiguous():
        return None
    if tensor.shape == meta.shape and tensor.is_contiguous():
        return tensor.view(-1, *meta.shape[-2:])
    turned = tensor.mT if tensor.dim() == meta.dim() else tensor
    return turned.view(-1, *meta.shape[-2:]) if turned.shape == meta.shape and turned.is_contiguous() else None


def _check_holds_only(root: Any) -> None:
    """Raise `_Reloaded` if a layer computes with tensors that are no parameters or buffers of it: an earlier reload of
    experts leaves their kernel with scales of its own."""
    registered = [t for t in [*root._parameters.values(), *root._buffers.values()] if t is not None]
    own = {t.untyped_storage().data_ptr() for t in registered}
    rest = {key: value for key, value in root.__dict__.items() if not key.startswith("_")}
    for tensor in _tensors([rest, root.quant_method], {id(root)}, 0):
        if tensor.untyped_storage().data_ptr() not in own:
            raise _Reloaded(f"it computes with a tensor that is no parameter of it, {_layout(tensor)}")


def _tensors(thing: Any, seen: set[int], depth: int) -> Iterator[Tensor]:
    elsewhere = isinstance(thing, nn.Module) and "fused_moe" not in type(thing).__module__
    if id(thing) in seen or depth > _DEPTH or isinstance(thing, type) or elsewhere:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        if thing.dtype in (FP8, torch.float32) and thing.numel() and not thing.is_meta:
            yield thing
    elif isinstance(thing, (list, tuple, set)):
        for part in thing:
            yield from _tensors(part, seen, depth + 1)
    else:
        inside = thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})
        for part in list(inside.values()):
            yield from _tensors(part, seen, depth + 1)


def _prove(loading: _Loading, weights: Mapping[str, _Weight]) -> dict[str, Group]:
    """Load random weights into memory of their own, let vLLM process them, and compare.

    Raises:
        _Reloaded: no kind of group gives vLLM's bits.
    """
    shapes = {name: tuple(meta.shape) for name, (meta, _) in loading.plain.items()}
    left: dict[str, list[Group]] = {name: list(get_args(Group)) for name in weights}
    fewest = min(weight.scales.numel() for weight in weights.values())
    for given in trials(shapes, weights.keys(), fewest):
        _try(loading, weights, given, left)
    return {name: groups[0] for name, groups in left.items()}


def _try(
    loading: _Loading, weights: Mapping[str, _Weight], given: Mapping[str, Tensor], left: dict[str, list[Group]]
) -> None:
    """Try the numbers in `given`, and remove from `left` the groups whose bits differ from vLLM's.

    Raises:
        _Reloaded: no group is left for a weight.
    """
    root, plain = loading.root, loading.plain
    with _untouched(root), on_meta([root]):
        internals.materialize_layer(root, internals.get_layerwise_info(root))
        numbers = {name: given[name].to(root._parameters[name].device, dtype) for name, (_, dtype) in plain.items()}
        loading.load(numbers)
        root.__dict__.pop("_already_called_process_weights_after_loading", None)
        root.quant_method.process_weights_after_loading(root)
        made = {name: p.data for name, p in root._parameters.items() if p is not None}
    for name, weight in weights.items():
        values = _as_loaded(made[name], plain[name][0])
        scales = [t for key, t in made.items() if key.startswith(f"{name}_scale")]
        live = root._parameters[name]
        same = made[name].stride() == live.stride() and made[name].dtype == FP8
        if values is None or len(scales) != 1 or scales[0].shape != weight.scales.shape or not same:
            raise _Reloaded(f"{name} came out as {_layout(made[name])} with scales {[_layout(t) for t in scales]}")
        source, theirs = numbers[name].view(values.shape), _Weight(values, scales[0], weight.dtype)
        left[name] = [group for group in left[name] if _same_bits(source, theirs, group)]
        if not left[name]:
            raise _Reloaded(f"{name} came out with other bits than the kernel's")


def _same_bits(source: Tensor, theirs: _Weight, group: Group) -> bool:
    ours = replace(theirs, values=torch.empty_like(theirs.values), scales=torch.empty_like(theirs.scales))
    scaled = ours.scaled(group)
    if not scaled:
        return False
    Plan(copies("trial", source, ours.values), scaled).run()
    pairs = (ours.values, theirs.values), (ours.scales, theirs.scales)
    return all(torch.equal(_bytes(here), _bytes(there)) for here, there in pairs)


@contextmanager
def _untouched(root: Any) -> Iterator[None]:
    """Undo what vLLM notes on a layer, beside its parameters, while it processes it."""
    method = root.quant_method
    things = [root, method, *(p for p in [getattr(method, "fp8_linear", None)] if p is not None)]
    before = [dict(thing.__dict__) for thing in things]
    try:
        yield
    finally:
        for thing, was in zip(things, before, strict=True):
            thing.__dict__.clear()
            thing.__dict__.update(was)
