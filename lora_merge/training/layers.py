"""PEFT's layers as training on merged weights sees them: what acts in one, and how its parameters get gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import InvalidInput, UnsupportedAdapter
from ..names import innermost, lineage, path_of, walk
from ..shards import here
from . import gathered, straight, tensor_parallel

_TUNER_LAYER = "peft.tuners.tuners_utils.BaseTunerLayer"
_LAYERS = "peft.tuners.lora.layer."
_LINEAR, _EMBEDDING = _LAYERS + "Linear", _LAYERS + "Embedding"
_CONVS = tuple(f"{_LAYERS}Conv{n}d" for n in (1, 2, 3))
_VARIANTS = "peft.tuners.lora.variants."
_AS_LORA = {_VARIANTS + name for name in ("MiCALinearVariant", "MiCAEmbeddingVariant")}
"""Variants whose forward and backward are those of LoRA."""


def layers_of(model: nn.Module) -> list[tuple[str, Any]]:
    """List the adapter layers of a model with their names, each once."""
    found: dict[int, tuple[str, Any]] = {}
    for name, module in walk(model):
        if _TUNER_LAYER in lineage(type(module)):
            found.setdefault(id(module), (name, module))
    return list(found.values())


@dataclass(frozen=True, eq=False)
class Acting:
    """What acts in one layer.

    Args:
        layer: of PEFT's.
        adapters: names of the adapters that act in its forward.
        scalings: theirs.
        parameters: theirs, and of sharded ones what is here of them.
        weights: base parameters that hold them while they are merged.
        cut: whether tensor parallelism has cut the base's weight, and the adapters are not called for it.
    """

    layer: Any
    adapters: tuple[str, ...]
    scalings: tuple[float, ...]
    parameters: Sequence[Tensor]
    weights: Sequence[Tensor]
    cut: bool = False

    def attach_to_base(self, y: Tensor, x: Tensor, ready: Callable[[], object]) -> Tensor:
        """Return the output of the base, a DTensor, with the way back to the parameters of the adapters."""
        for adapter, scaling in zip(self.adapters, self.scalings, strict=True):
            lora_A, lora_B = self.layer.lora_A[adapter], self.layer.lora_B[adapter]
            y = tensor_parallel.Linear.apply(y, x, lora_A.weight, lora_B.weight, scaling, ready)
        return y

    def attach(self, y: Tensor, x: Tensor, ready: Callable[[], object]) -> Tensor:
        """Return the layer's output, with the way back to the parameters of the adapters."""
        path = path_of(type(self.layer))
        for adapter, scaling in zip(self.adapters, self.scalings, strict=True):
            if path == _EMBEDDING:
                y = self._embedding(y, x, adapter, scaling, ready)
                continue
            lora_A, lora_B = self.layer.lora_A[adapter], self.layer.lora_B[adapter]
            if gathered.is_gathered(lora_A) or gathered.is_gathered(lora_B):
                y = gathered.attach(y, x, self.layer, adapter, scaling, ready)
                continue
            if path == _LINEAR and type(lora_A) is nn.Linear and lora_B.bias is None:
                y = straight.Linear.apply(y, x, lora_A.weight, lora_B.weight, scaling, ready)
                continue
            named = [(half, dict(half.named_parameters())) for half in (lora_A, lora_B)]
            parameters = [p for _, some in named for p in some.values()]
            y = straight.Recomputed.apply(y, x, _adds(named, scaling), ready, *parameters)
        return y

    def _embedding(self, y: Tensor, x: Tensor, adapter: str, scaling: float, ready: Callable[[], object]) -> Tensor:
        base = innermost(self.layer)
        scale = getattr(base, "embed_scale", None)
        scaling = scaling if scale is None else scaling * float(scale)
        lora_A, lora_B = self.layer.lora_embedding_A[adapter], self.layer.lora_embedding_B[adapter]
        return straight.Embedding.apply(y, x, lora_A, lora_B, scaling, base.padding_idx, ready)


def acting(name: str, layer: Any) -> Acting:
    """Return what acts in a layer.

    Raises:
        InvalidInput: dropout.
        UnsupportedAdapter: it cannot be trained on merged weights.
    """
    path = path_of(type(layer))
    if layer.disable_adapters:
        return Acting(layer, (), (), (), ())
    if path not in (_LINEAR, _EMBEDDING, *_CONVS):
        raise UnsupportedAdapter(
            f"{name}: a {path} cannot be trained on merged weights yet, only LoRA on Linear, Embedding and Conv "
            "layers: train this model with PEFT's forward, and serve it merged"
        )
    adapters = tuple(sorted(a for a in layer.active_adapters if a in layer.scaling))
    for adapter in adapters:
        dropout = layer.lora_dropout[adapter]
        if getattr(dropout, "p", 0.0) > 0:
            raise InvalidInput(
                f"{name}: adapter '{adapter}' has lora_dropout={dropout.p}, which drops inputs of the adapter alone "
                "and no weight can express: make it with lora_dropout=0.0 (RL fine-tuning mostly does), or do not "
                "train on merged weights"
            )
        variant = layer.lora_variant.get(adapter)
        if variant is not None and path_of(type(variant)) not in _AS_LORA:
            raise UnsupportedAdapter(
                f"{name}: adapter '{adapter}' is a {type(variant).__name__}, which cannot be trained on merged weights "
                "yet: train it with PEFT's forward, and serve it merged"
            )
    parts = [p for adapter in adapters for p in _parameters(layer, path, adapter)]
    weights = list(innermost(layer).parameters(recurse=False))
    return Acting(
        layer,
        adapters,
        tuple(float(layer.scaling[adapter]) for adapter in adapters),
        [t for p in parts for t in _counted(p)],
        [t for p in weights for t in _counted(p)],
    )


def cut_of(name: str, acts: Acting, units: list[Any]) -> bool:
    """Return True if tensor parallelism has cut the base of a layer, and its adapters are not called as it is.

    Args:
        units: of FSDP2.

    Raises:
        UnsupportedAdapter: on such a weight, an adapter that cannot be trained on merged weights.
    """
    layer = acts.layer
    if not acts.adapters or not tensor_parallel.is_cut(layer, units):
        return False
    path = path_of(type(layer))
    halves = [half[a] for half in (layer.lora_A, layer.lora_B) for a in acts.adapters if a in half]
    if path != _LINEAR or any(getattr(half, "bias", None) is not None for half in halves):
        raise UnsupportedAdapter(
            f"{name}: tensor parallelism has cut the weight of a {path}, or its adapter has lora_bias; on a cut weight "
            "only LoRA on Linear layers without lora_bias can be trained on merged weights: shard it with FSDP2"
        )
    called = [gathered.is_gathered(half) for half in halves]
    return not any(called)


def _parameters(layer: Any, path: str, adapter: str) -> Iterator[Tensor]:
    if path == _EMBEDDING:
        yield from (layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter])
        return
    for half in (layer.lora_A[adapter], layer.lora_B[adapter]):
        yield from half.parameters()


def _counted(parameter: Tensor) -> list[Tensor]:
    """Return the tensors whose version counters tell of writes to a parameter."""
    local = here(parameter)
    return [parameter] if local is parameter else [parameter, local]


def _adds(named: Sequence[tuple[nn.Module, dict[str, Tensor]]], scaling: float) -> straight.Added:
    """Return PEFT's `scaling * lora_B(lora_A(x))` as a function of the parameters."""

    def adds(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        left = iter(parameters)
        y = x
        for module, names in named:
            some = dict(zip(names, left, strict=False))
            y = functional_call(module, some, (y.to(next(iter(some.values())).dtype),))
        return torch.mul(y, scaling)

    return adds
