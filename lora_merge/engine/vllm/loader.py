"""Into vLLM's parameters: a dry run of the model's own `load_weights` first, then buckets along what it showed.

The dry run feeds meta tensors to `load_weights` and writes down every copy that it would make instead of making it.
So vLLM's own code says, before the first byte, which names it does not take, which shapes do not fit, and which
elements of which parameter nothing would fill (a missing k_proj, one expert's gate); and where every part of every
tensor goes. Parameters whose layout after loading is the one at loading are then filled straight from the bucket, one
launch a bucket. The others (prepacked on CPUs, shuffled experts) go through `load_weights` into memory of their own
(reload.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.plan import Plan
from ...kernels.segments import copies
from ...shards import Box, cut, numel, overlap
from ...stream.buckets import Slot, Table, dtype_name, metas
from ...stream.filler import Places
from ..mapped import Exports
from ..sampler import facts
from . import internals
from .capture import Capture, Copy, Record, coverage, feed, torn
from .modules import Modules, ties_of, unwrapped
from .reload import Reload, on_meta, same_layout, unchanged

_AS_LOADED = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
"""Methods that leave weights on a CUDA device as they were loaded."""
_EXPERTS, _PLAIN_EXPERTS = "UnquantizedFusedMoEMethod", {"TRITON", "BATCHED_TRITON"}
"""The method for experts, and those of its backends that leave them as they were loaded (0.26, 0.32)."""
_ENGINE_OWNED = {
    "_expert_map",
    "expert_mask",
    "expert_global_to_physical",
    "expert_physical_to_global",
    "expert_local_to_global",
    "W_UV",
    "W_UK_T",
    "W_UK_T_dcp_qrep",
}
"""Tensors that vLLM computes and no checkpoint holds; MLA's may be views of the weight that they come from."""
_COMPUTED = {"FusedMMInputNorm"}
"""Modules whose persistent buffers vLLM makes from the processor's settings: in no checkpoint, and random after a dummy
load."""
_HOOK = "process_weights_after_loading"
_IDLE = "vllm.v1.attention.backend"
"""Where the hook of attention backends is defined that does nothing."""
_NOT_BUILT = "StageMissingLayer"
"""What vLLM puts in the place of a part that its settings leave out."""


@dataclass(eq=False)
class Examination:
    """What the dry run of one table showed.

    Args:
        copies: what goes straight, by name.
        places: the same for a trainer that writes there, of tensors that the engine holds in the stream's dtype.
        staged: names that go through `load_weights`, whole.
        fills: constants that loading writes (padding).
        refused: name -> why `load_weights` does not take it.
        ignored: names that filled nothing here.
        absent: those among them that would fill a part which the engine was started without (a vision tower).
        missing: parameters and persistent buffers that stay unfilled, in words.
        partial: name -> elements that are taken here, of tensors of which others are left.
        elements: elements filled and elements there are.
        dtypes: name -> dtype that the engine holds it in.
        layers: that are laid out anew after loading, each with the names that it is made of.
        touched: modules that get something of the stream, by `id`.
    """

    copies: dict[str, list[Copy]]
    places: Places
    staged: set[str]
    fills: list[tuple[Tensor, Any]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    partial: dict[str, int] = field(default_factory=dict)
    elements: tuple[int, int] = (0, 0)
    dtypes: dict[str, str] = field(default_factory=dict)
    layers: list[tuple[nn.Module, frozenset[str]]] = field(default_factory=list)
    touched: frozenset[int] = frozenset()
    _exports: Exports | None = None

    @property
    def exports(self) -> Exports:
        """How trainers in other processes of this host map the places."""
        if self._exports is None or not self._exports.hold():
            blocked = self.staged.union(self.copies).difference(self.places.views)
            self._exports = Exports(self.places, blocked)
        return self._exports

    @cached_property
    def digest(self) -> str:
        """Equal for two examinations of which the trainer would hear the same."""
        sorts = sorted(self.partial.items()), sorted(self.dtypes.items())
        said = (self.refused, self.ignored, self.absent, self.missing, self.elements, *sorts)
        return hashlib.blake2b(repr(said).encode(), digest_size=16).hexdigest()


class Loader:
    """Loads full weight sets into one worker's model.

    Args:
        modules: of the live vLLM model, LoRA wrappers and all.
        model_config: vLLM's.
        device: of the worker.
    """

    def __init__(self, modules: Modules, model_config: Any, device: torch.device) -> None:
        self.model: Any = modules.model
        self._modules = modules
        self._config, self.device = model_config, device
        self._examined: tuple[Any, Examination] | None = None
        self._plans: dict[int, tuple[int, Plan]] = {}
        self._reload: Reload | None = None
        self._begun: dict[str, tuple[Tensor, int]] = {}

    @property
    def ties(self) -> bool:
        """Whether some parameter has two names here (a head tied to the embedding)."""
        return bool(ties_of(self._modules))

    def examine(self, digest: str, table: Table) -> Examination:
        """The dry run; kept for as long as table (by its digest) and parameters stay the same. Nothing is written."""
        key = digest, facts(self._modules.tensors())
        if self._examined is None or self._examined[0] != key:
            with torch.no_grad(), unwrapped(self._modules):
                self._examined = key, self._dry_run(table)
            self._plans.clear()
        return self._examined[1]

    def begin(self, examination: Examination) -> None:
        """Fill what loading fills with constants, and wait for layers whose layout changes after loading."""
        with torch.no_grad():
            for view, value in examination.fills:
                view.fill_(value)
        if examination.staged:
            self._reload = Reload(examination.layers, examination.touched, self.device.type)

    def load(
        self,
        examination: Examination,
        index: int,
        slots: Sequence[Slot],
        data: Tensor,
        keep: Callable[[str, Tensor], object],
    ) -> None:
        """Write one bucket into the engine, on the current stream; `data` may be reused after that work.

        Args:
            keep: told of every whole tensor that goes through `load_weights`, before it does.
        """
        at, plan = self._plans.get(index, (0, None))
        if plan is None or at != data.data_ptr():
            found = [pair for slot in slots for pair in pairs(examination, slot, data)]
            plan = Plan([segment for source, to in found for segment in copies("engine", source, to)])
            self._plans[index] = (data.data_ptr(), plan)
        plan.run()
        tensors = [whole for slot in slots if slot.name in examination.staged for whole in self._staged(slot, data)]
        if tensors:
            for name, tensor in tensors:
                keep(name, tensor)
            with torch.no_grad(), unwrapped(self._modules):
                self._through(tensors)

    def _through(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Load whole tensors of layers that are laid out anew."""
        assert self._reload is not None
        names = [name for name, _ in tensors]
        self._reload.before(names)
        self.model.load_weights(iter(tensors))
        self._reload.after(names)

    def load_layers(
        self,
        examination: Examination,
        layers: Sequence[tuple[nn.Module, frozenset[str]]],
        tensor: Callable[[str], Tensor],
    ) -> None:
        """Make some of the layers again that are laid out anew after loading.

        Args:
            layers: with the names that each is made of.
            tensor: makes one of these, whole, in memory of its own: `load_weights` may write to it.
        """
        self._reload = Reload(layers, examination.touched, self.device.type)
        done: set[str] = set()
        with torch.no_grad(), unwrapped(self._modules):
            for _, names in layers:
                self._through([(name, tensor(name)) for name in sorted(names - done)])
                done |= names

    def tensors(self) -> list[Tensor]:
        """As `Modules.tensors`."""
        return self._modules.tensors()

    def _staged(self, slot: Slot, data: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Keep a slot of a tensor that goes through `load_weights`; yield the tensor when it is whole. In memory of its
        own, as `load_weights` may write to what it is given (GPT-OSS zeroes biases)."""
        if slot.name not in self._begun:
            self._begun[slot.name] = torch.empty(slot.whole, dtype=slot.dtype, device=data.device), 0
        tensor, filled = self._begun[slot.name]
        cut(tensor, slot.box).copy_(slot.view(data))
        filled += slot.nbytes // slot.dtype.itemsize
        self._begun[slot.name] = tensor, filled
        if filled == tensor.numel():
            del self._begun[slot.name]
            yield slot.name, tensor

    def arrived(self, examination: Examination, slots: Sequence[Slot], data: Tensor) -> dict[str, bool]:
        """For what went straight: whether the engine's parameters hold the bucket's values, bit for bit."""
        equal: dict[str, bool] = {}
        for slot in slots:
            found = pairs(examination, slot, data)
            if slot.shape == slot.whole:
                # Not by way of windows, so that a mistake there shows.
                flat = slot.view(data).view(-1)
                straight = examination.copies.get(slot.name, ())
                found = ((flat[c.offset :].as_strided(c.destination.shape, c.stride), c.destination) for c in straight)
            for source, to in found:
                there = source.to(to.dtype).contiguous().view(-1).view(torch.uint8)
                here = to.contiguous().view(-1).view(torch.uint8)
                equal[slot.name] = equal.get(slot.name, True) and torch.equal(here, there)
        return equal

    def finish(self) -> None:
        """Everything is loaded: what vLLM makes of several layers' weights is made again."""
        if self._reload is not None and self._reload.lacking:  # their layers are closed by `abort`
            raise RuntimeError(f"these tensors did not come: {', '.join(self._reload.lacking)}")
        reload, self._reload = self._reload, None
        derived, tied, computed = self._modules.kept(_derived), self._tied_layers(), self._modules.kept(_computed)
        if not (reload or derived or tied or computed):
            return
        if reload is not None:
            self._modules.forget()
        with torch.no_grad(), unwrapped(self._modules):
            for layer in derived:
                layer.process_weights_after_loading(self._config.dtype)
            for layer in self._tied_layers():
                layer.quant_method.process_weights_after_loading(layer)
            for layer in computed:
                self._compute(layer)

    def _compute(self, layer: nn.Module) -> None:
        """Bring buffers that vLLM makes itself to what it would make them now."""
        made = internals.build_mm_input_norm(self._config)
        for key, buffer in layer._buffers.items():
            if buffer is not None:
                buffer.copy_(made._buffers[key])

    def abort(self) -> None:
        """Put the engine's own tensors back into layers that a broken load left open."""
        if self._reload is not None:
            with torch.no_grad(), unwrapped(self._modules):
                self._reload.abort()
        self._reload, self._begun = None, {}

    def let_go(self) -> None:
        """Forget plans that read buckets: their memory goes away."""
        self._plans.clear()

    def _dry_run(self, table: Table) -> Examination:
        fed = [(meta.name, torch.empty(meta.shape, dtype=meta.dtype, device="meta")) for meta in metas(table).values()]
        ties = ties_of(self._modules)
        roots = self._staged_layers()
        named = list(self.model.named_modules())
        with on_meta(roots), unchanged([module for _, module in named]) as made:
            tensors = _engine_tensors(self.model)
            capture = Capture({path: tensor for path, (tensor, _) in tensors.items()}, fed, _everything(self.model))
            refused = feed(self.model, capture, fed)
            owners = {path: owner for path, (_, owner) in tensors.items()}
            for number, name, parameter in made():
                prefix, owner = named[number]
                capture.adopt(path := f"{prefix}.{name}" if prefix else name, parameter)
                owners[path] = owner
            missing, elements = coverage(capture, ties)
        refused |= torn(capture, ties) | _unreachable(self._modules)
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
        places = {
            name: [(copy.window.box, copy.window.unfold(copy.destination)) for copy in found]
            for name, found in straight.items()
            if all(copy.destination.dtype == dtypes[name] for copy in found)
        }
        ignored = {name: tensor for name, tensor in fed if name not in taken and name not in refused}
        return Examination(
            straight,
            Places(places),
            staged,
            [(view, value) for path, view, value in capture.fills if path not in staged_paths],
            refused,
            list(ignored),
            self._absent(list(ignored.items())),
            missing,
            _partial(capture.records, dict(fed)),
            elements,
            {r.name: dtype_name(r.dtype) for r in capture.records},
            [(root, frozenset(names[id(root)])) for root in roots],
            frozenset(id(owners[r.path]) for r in capture.records if r.path in owners),
        )

    def _absent(self, fed: list[tuple[str, Tensor]]) -> list[str]:
        """Which tensors are for parts that vLLM did not build (`limit_mm_per_prompt` of 0) but keeps on the meta device
        beside the model: with these in their places, `load_weights` takes or refuses them, and passes over others."""
        parts = [
            (parent, key, stage)
            for parent in self._modules
            for key, stage in parent._modules.items()
            if type(stage).__name__ == _NOT_BUILT and isinstance(stage.__dict__.get("module"), nn.Module)
        ]
        if not parts or not fed:
            return []
        tensors: dict[str, Tensor] = {}
        try:
            for number, (parent, key, stage) in enumerate(parts):
                parent._modules[key] = part = stage.__dict__["module"]
                tensors |= {f"{number}.{name}": t for name, t in [*part.named_parameters(), *part.named_buffers()]}
            capture = Capture(tensors, fed, _everything(self.model))
            refused = feed(self.model, capture, fed)
        finally:
            for parent, key, stage in parts:
                parent._modules[key] = stage
        return sorted(refused.keys() | {record.name for record in capture.records})

    def _staged_layers(self) -> list[Any]:
        """Layers that vLLM processes after loading; the outermost where they nest."""
        tied = {id(layer) for layer in self._tied_layers()}
        inside: set[int] = set()
        layers = []
        for module in self._modules:
            method = getattr(module, "quant_method", None)
            if method is None or id(module) in tied or id(module) in inside:
                continue
            if self.device.type == "cuda" and _as_loaded(method) and same_layout(module):
                continue
            inside.update(map(id, module.modules()))
            layers.append(module)
        return layers

    def _tied_layers(self) -> list[Any]:
        """Layers on a CPU that compute from a packed copy of a parameter that another layer loads (a tied head)."""
        if self.device.type != "cpu":
            return []
        seen: set[int] = set()
        tied = []
        for module in self._modules:
            own = {id(p) for p in module._parameters.values() if p is not None and p.numel()}
            if own and own <= seen and getattr(module, "quant_method", None) is not None:
                tied.append(module)
            seen |= own
        return tied


def _partial(records: Sequence[Record], fed: Mapping[str, Tensor]) -> dict[str, int]:
    """Of tensors of which some elements are taken: how many."""
    boxes: dict[str, set[Box]] = {}
    for record in records:
        whole = ((0,) * fed[record.name].dim(), tuple(fed[record.name].shape))
        boxes.setdefault(record.name, set()).add(whole if record.copy is None else record.copy.window.box)
    taken = {name: numel(list(some)) for name, some in boxes.items()}
    return {name: count for name, count in taken.items() if count < fed[name].numel()}


def _as_loaded(method: Any) -> bool:
    """Whether a layer with this method keeps its weights on a GPU as `load_weights` puts them."""
    kind = type(method).__name__
    if kind == _EXPERTS:
        backend = getattr(getattr(method, "unquantized_backend", None), "name", "")
        return backend in _PLAIN_EXPERTS and torch.version.hip is None  # which pads them
    return kind in _AS_LOADED


def _deferred(module: nn.Module) -> bool:
    """Whether vLLM calls this module's hook after loads and reloads, when all other layers are done."""
    if internals.has("is_deferred_attention_layer"):
        return bool(internals.is_deferred_attention_layer(module))
    kinds = internals.Attention, internals.MLAAttention, internals.MMEncoderAttention  # vLLM 0.26
    return isinstance(module, kinds) and callable(getattr(module, _HOOK, None))


def _derived(modules: Modules) -> list[Any]:
    """Attention layers whose hook may keep something that it makes of weights: MLA's matrices, sinks in float32."""
    return [module for module in modules if _deferred(module) and not _keeps_nothing(module)]


def _keeps_nothing(layer: Any) -> bool:
    """Plain attention over a backend without a hook: only the scales of its cache would be set back, in six small
    steps a layer."""
    plain = getattr(type(layer), _HOOK) is getattr(internals.Attention, _HOOK)
    return plain and getattr(layer.impl, _HOOK).__module__ == _IDLE


def _unreachable(modules: Modules) -> dict[str, str]:
    """Parts of a model that make something of weights which no reload makes again, and why they are refused."""
    why = {}
    for path, module in modules.paths():
        if _deferred(module):
            projection = module._modules.get("kv_b_proj")
            if isinstance(projection, nn.Module) and not getattr(projection, "weight", torch.empty(1)).numel():
                why[f"{path}.kv_b_proj"] = (
                    "the engine's attention backend packed this weight and dropped it, which vLLM cannot reload: start "
                    'the engine with attention_backend="CPU_MLA"'
                )
        elif hasattr(module, _HOOK) and hasattr(module, "load_weights"):
            why[path or type(module).__name__] = (
                f"{type(module).__name__}.{_HOOK} makes something of all its weights when the engine starts, and vLLM "
                "does not make it again after a reload: start a new engine on a checkpoint instead"
            )
    return why


def _computed(modules: Modules) -> list[nn.Module]:
    return [module for module in modules if type(module).__name__ in _COMPUTED]


def pairs(examination: Examination, slot: Slot, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """What of a slot goes straight: its view in the bucket, and its place in the engine."""
    view = slot.view(data)
    for copy in examination.copies.get(slot.name, ()):
        box = overlap(slot.box, copy.window.box)
        if box is not None:
            inside = tuple(b - s for b, s in zip(box[0], slot.start, strict=True)), box[1]
            yield copy.window.fold(cut(view, inside)), cut(copy.destination, copy.window.inner(box))


def _everything(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All that the engine holds, non-persistent buffers, too."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _engine_tensors(model: nn.Module) -> dict[str, tuple[Tensor, nn.Module]]:
    """Parameters and persistent buffers that a checkpoint has to fill, and whose they are, by path."""
    found: dict[str, tuple[Tensor, nn.Module]] = {}
    for name, module in model.named_modules():
        if type(module).__name__ in _COMPUTED:
            continue
        # Attention's buffers are scales of a quantised cache, which vLLM sets itself.
        buffers = {} if hasattr(module, "kv_cache_dtype") else module._buffers
        own = module._parameters | {k: b for k, b in buffers.items() if k not in module._non_persistent_buffers_set}
        for key, tensor in own.items():
            if tensor is not None and tensor.numel() and key not in _ENGINE_OWNED:
                found[f"{name}.{key}" if name else key] = (tensor, module)
    return found
