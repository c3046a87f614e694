"""Adapters on megatron-core models. A `Style` says how to read one library's layers, and how to turn them off.

megatron-core has no LoRA of its own. Styles known here: Megatron-Bridge's `LoRA` and `CanonicalLoRA`, and the layers of
mcore-bridge (ms-swift). `register` adds another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from ...errors import AlreadyMerged, UnsupportedAdapter
from ...names import lineage, path_of, register_wrapper, walk

Layer: TypeAlias = Any
"""A layer of some library's, whose attributes differ from class to class."""


class Half(NamedTuple):
    """This rank's part of lora_A `[r, in]` or of lora_B `[out, r]`.

    Args:
        tensor: the part, 2-D.
        cut: dimension along which it is split over tensor-parallel ranks (expert-tensor-parallel for experts); None if
            each rank holds all of it.
    """

    tensor: Tensor
    cut: int | None


class Pair(NamedTuple):
    """One product `scaling * lora_B @ lora_A` that a layer adds to a base weight.

        Pair(Half(layer.down.weight, None), Half(layer.up.weight, 0), layer.scale)

    Args:
        lora_A: this rank's part of lora_A.
        lora_B: this rank's part of lora_B.
        scaling: factor of the product.
        part: which part of a fused weight the rows of lora_B are, in the checkpoint's order: "q", "k", "v", "gate" or
            "up"; None: all rows of the weight, in Megatron's order.
        expert: number of the local expert that it belongs to; None: every weight of the layer.
    """

    lora_A: Half
    lora_B: Half
    scaling: float
    part: str | None = None
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class Style:
    """How to read the adapter layers of one library; `register` takes it.

    Args:
        pairs: function from (name, layer) to the products that are active in the layer's forward; raises
            `UnsupportedAdapter` or `AlreadyMerged`.
        off: function from a layer to a context manager inside which the layer's forward adds nothing.
    """

    pairs: Callable[[str, Layer], Sequence[Pair]]
    off: Callable[[Layer], AbstractContextManager[None]]


def register(path: str, child: str, style: Style) -> None:
    """Teach this package to read adapter layers of another class.

        register("mytrainer.lora.DownUp", "linear", Style(pairs, off))

    Args:
        path: dotted path of the class; exactly this class is meant, not classes derived from it.
        child: name of the attribute that holds the wrapped layer.
        style: how to read its layers.
    """
    register_wrapper(path, child)
    _STYLES[path] = style
    _plain.clear()


_STYLES: dict[str, Style] = {}
_plain: set[type] = set()
"""Classes of modules that are no adapter layers."""
_ADAPTERS = {"megatron.bridge.peft.adapter_wrapper.AdapterWrapper", "peft.tuners.tuners_utils.BaseTunerLayer"}
_UNWRAPPING = {"LinearAdapter", "TELinearAdapter", "PatchedLinearAdapter", "PatchedTELinearAdapter"}
"""Classes of Megatron-Bridge that are themselves the linear which they adapt. Those whose dotted paths are registered
below are read, and any other is refused."""


def style_of(name: str, module: nn.Module) -> Style | None:
    """Return how to read a module, if it is an adapter layer.

    Raises:
        UnsupportedAdapter: an adapter layer of a class that no style knows.
    """
    cls = type(module)
    if cls not in _plain:
        paths = lineage(cls)
        if paths[0] in _STYLES:
            return _STYLES[paths[0]]
        if not _ADAPTERS.isdisjoint(paths) or cls.__name__ in _UNWRAPPING:
            raise UnsupportedAdapter(
                f"{name}: adapters of class {paths[0]} cannot be merged here; expected {', '.join(sorted(_STYLES))}"
            )
        _plain.add(cls)
    return None


@contextmanager
def adapters_off(chunks: Sequence[nn.Module] | nn.Module) -> Iterator[None]:
    """Switch the adapters' forwards off for the time of a `with` block, when the base holds merged weights.

        with lora_merge.megatron.adapters_off(chunks):
            logits = chunks[0](tokens, positions, mask)

    After the block they are as before. `merged` does this by itself.

    Args:
        chunks: as for `read`.

    Raises:
        UnsupportedAdapter: an adapter layer of a class that is not known; see `register`.
    """
    with layers_off(at for chunk in ([chunks] if isinstance(chunks, nn.Module) else chunks) for at in walk(chunk)):
        yield


@contextmanager
def layers_off(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    """Make those of these modules that are adapter layers add nothing, for the time of a block."""
    with ExitStack() as undo:
        for name, module in modules:
            style = style_of(name, module)
            if style is not None:
                undo.enter_context(style.off(module))
        yield


# ---- how parallel linears cut their weight ---------------------------------------------------------------------------

_LAYERS = "megatron.core.tensor_parallel.layers."
_TE = "megatron.core.extensions.transformer_engine."
_ROWS = {_LAYERS + "ColumnParallelLinear", _LAYERS + "VocabParallelEmbedding"}
_ROWS |= {_TE + f"TE{kind}" for kind in ("ColumnParallelLinear", "LayerNormColumnParallelLinear")}
_ROWS |= {_TE + "TEColumnParallelGroupedLinear"}
_COLUMNS = {_LAYERS + "RowParallelLinear", _TE + "TERowParallelLinear", _TE + "TERowParallelGroupedLinear"}


def cut_of(module: nn.Module) -> int | None:
    """Return the dimension along which a parallel linear splits its weight `[out, in]` over ranks; None if it does not.

        cut_of(column_parallel_linear)  # 0

    Decided by class: the attributes that Megatron sets on parameters are missing on some experts and wrong on others.

    Args:
        module: a layer of megatron-core or Transformer Engine.
    """
    cls = type(module)
    if cls not in _cuts:
        known = (0 if path in _ROWS else 1 for path in lineage(cls) if path in _ROWS or path in _COLUMNS)
        _cuts[cls] = next(known, None)
    return _cuts[cls]


_cuts: dict[type, int | None] = {}


# ---- Megatron-Bridge -------------------------------------------------------------------------------------------------

_BRIDGE = "megatron.bridge.peft."
_PAIRED = {_BRIDGE + "utils." + name for name in ("ParallelLinearAdapter", "GroupedExpertLinearAdapter")}
_PAIRED |= {_BRIDGE + "utils.SharedOuterGroupedExpertAdapter"}


def _bridge(name: str, layer: Layer) -> list[Pair]:
    return _bridge_pairs(name, layer.adapter, None) if layer._adapter_enabled else []


def _canonical(name: str, layer: Layer) -> list[Pair]:
    """Read q, k, v or gate, up with adapters of their own; one that is not targeted is None."""
    if not layer._adapter_enabled:
        return []
    parts = {key.removeprefix("adapter_"): adapter for key, adapter in layer.adapter._modules.items()}
    return [pair for part, a in parts.items() if a is not None for pair in _bridge_pairs(name, a, part)]


def _bridge_pairs(name: str, adapter: Layer, part: str | None) -> list[Pair]:
    """Read linear_in as lora_A and linear_out as lora_B: 2-D, or 3-D `[local experts, ...]`; or one of each."""
    path = path_of(type(adapter))
    if path not in _PAIRED:
        raise UnsupportedAdapter(f"{name}: adapters of class {path} cannot be merged here")
    if not isinstance(adapter.activation, nn.Identity):
        raise UnsupportedAdapter(f"{name}: its adapter has a {type(adapter.activation).__name__} between the factors")
    linear_in, linear_out = adapter.linear_in, adapter.linear_out
    (a, a_cut), (b, b_cut) = (linear_in.weight, cut_of(linear_in)), (linear_out.weight, cut_of(linear_out))
    if path.endswith(".GroupedExpertLinearAdapter"):
        a_cut, b_cut = (1 if adapter.input_is_parallel else 0), 0
    scaling = adapter.alpha / adapter.dim
    if a.dim() == b.dim() == 2:
        return [Pair(Half(a, a_cut), Half(b, b_cut), scaling, part)]
    experts = (a if a.dim() == 3 else b).shape[0]
    return [
        Pair(Half(a[e] if a.dim() == 3 else a, a_cut), Half(b[e] if b.dim() == 3 else b, b_cut), scaling, part, e)
        for e in range(experts)
    ]


@contextmanager
def _bridge_off(layer: Layer) -> Iterator[None]:
    own = layer.__dict__  # thousands of experts: a module's `__setattr__` takes its time
    before, own["_adapter_enabled"] = own["_adapter_enabled"], False
    try:
        yield
    finally:
        own["_adapter_enabled"] = before


for _name in ("lora_layers.LoRALinear", "lora_layers.TEFusedLoRALinear", "lora_layers.LoRATopKRouter"):
    register(_BRIDGE + _name, "to_wrap", Style(_bridge, _bridge_off))
for _name in ("canonical_lora.LoRALinearSplitQKV", "canonical_lora.LoRALinearSplitFC1UpGate"):
    register(_BRIDGE + _name, "to_wrap", Style(_canonical, _bridge_off))


def _linear(name: str, layer: Layer) -> list[Pair]:
    """Read a linear of transformers' (of a tower) that is its own adapter layer; every rank holds all of it."""
    if not layer._adapter_enabled:
        return []
    return [Pair(Half(layer.linear_in.weight, None), Half(layer.linear_out.weight, None), layer.scale)]


for _name in ("LinearAdapter", "TELinearAdapter"):
    _STYLES[f"{_BRIDGE}lora_layers.{_name}"] = Style(_linear, _bridge_off)


# ---- mcore-bridge, ms-swift ------------------------------------------------------------------------------------------


def _peft(name: str, layer: Layer) -> list[Pair]:
    """Read a PEFT layer whose lora_A and lora_B are parallel or replicated linears, grouped for grouped experts."""
    if layer.merged_adapters:
        raise AlreadyMerged(
            f"{name}: the base weight already holds the adapters {', '.join(layer.merged_adapters)}. Inside "
            "lora_merge.merged(), leave it first; after merge_adapter(), reload the base: unmerging is not exact"
        )
    lora_A, lora_B = layer.lora_A._modules, layer.lora_B._modules
    pairs = []
    for adapter in [] if layer.disable_adapters else layer.active_adapters:
        if adapter not in lora_A:
            continue
        a, b = lora_A[adapter], lora_B[adapter]
        for half in (a, b):
            if any("bias" in key and p is not None and p.numel() for key, p in half._parameters.items()):
                raise UnsupportedAdapter(
                    f"{name}: adapter '{adapter}' has lora_bias, which no weight can hold; train with lora_bias=False"
                )
        scaling, grouped = float(layer.scaling[adapter]), "weight" not in a._parameters
        for e, (a_weight, b_weight) in enumerate(zip(_weights(a), _weights(b), strict=True)):
            halves = Half(a_weight, cut_of(a)), Half(b_weight, cut_of(b))
            pairs.append(Pair(*halves, scaling, None, e if grouped else None))
    return pairs


def _weights(linear: Layer) -> list[Tensor]:
    """Return `weight`, or `weight0`, `weight1`, ... of a grouped linear."""
    if "weight" in linear._parameters:
        return [linear._parameters["weight"]]
    return [linear._parameters[f"weight{i}"] for i in range(linear.num_gemms)]


@contextmanager
def _peft_off(layer: Layer) -> Iterator[None]:
    """Take the forward's merged path; the router's has none, so no adapter is active either."""
    before = {key: layer.__dict__.get(key) for key in ("merged_adapters", "_active_adapter")}
    layer.__dict__.update(merged_adapters=before["merged_adapters"] or list(layer.active_adapters), _active_adapter=[])
    try:
        yield
    finally:
        layer.__dict__.update(before)


for _name in ("mcore_bridge.tuners.lora", "swift.megatron.tuners.lora"):
    register(_name + ".LoraParallelLinear", "base_layer", Style(_peft, _peft_off))
