"""PEFT's layers as training on merged weights sees them: what acts in one, and how its parameters get gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import InvalidInput, UnsupportedAdapter
from ..models.peft.layer import EMBEDDING, LAYERS, LINEAR, PARAMETER, TUNER_LAYER
from ..models.peft.tokens import TOKENS
from ..names import innermost, lineage, path_of, walk
from ..shards import fsdp2, here
from . import gathered, straight, tensor_parallel

_CONVS = tuple(f"{LAYERS}Conv{n}d" for n in (1, 2, 3))
_VARIANTS = "peft.tuners.lora.variants."
_AS_LORA = {_VARIANTS + name for name in ("MiCALinearVariant", "MiCAEmbeddingVariant")}
"""Variants whose forward and backward are those of LoRA."""
_DORA = {_VARIANTS + f"Dora{kind}Variant" for kind in ("Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d")}


Ready: TypeAlias = Callable[[], object]
"""What a backward pass calls before it reads weights."""


def layers_of(model: nn.Module) -> list[tuple[str, Any]]:
    """List the adapter layers of a model with their names, each once."""
    found: dict[int, tuple[str, Any]] = {}
    for name, module in walk(model):
        if TUNER_LAYER in lineage(type(module)):
            found.setdefault(id(module), (name, module))
    return list(found.values())


@dataclass(frozen=True, eq=False)
class Acting:
    """What acts in one layer.

    Args:
        layer: of PEFT's.
        adapters: names of the adapters that act in its forward.
        scalings: theirs; 1 of one that has none.
        parameters: theirs, and of sharded ones what is here of them.
        weights: base parameters that hold them while they are merged.
        name: of the layer.
        cut: whether tensor parallelism has cut the base's weight.
        rows: DoRA's, as merged; None: there are none, or nothing is merged yet.
    """

    layer: Any
    adapters: tuple[str, ...]
    scalings: tuple[float, ...]
    parameters: Sequence[Tensor]
    weights: Sequence[Tensor]
    name: str = ""
    rows: straight.Rows | None = None
    cut: bool = False

    def check(self) -> None:
        """Raise as `acting` does, where dropout or a variant has changed."""
        dropouts = self.layer._modules.get("lora_dropout")
        if dropouts is None:  # of no LoRA, or not where PEFT has them
            dropouts = getattr(self.layer, "lora_dropout", None)
        for adapter in self.adapters if dropouts is not None else ():
            _check(self.name, self.layer, adapter, dropouts[adapter])

    @property
    def stands(self) -> bool:
        """Whether the same adapters act now, with the same scalings."""
        return _acting(self.layer) == (self.adapters, self.scalings)

    @property
    def base(self) -> Any:
        """The module inside."""
        return innermost(self.layer)

    @property
    def dora(self) -> str | None:
        """The DoRA adapter that acts, which does so alone."""
        return next((adapter for adapter in self.adapters if _is_dora(self.layer, adapter)), None)

    def attach_to_input(self, x: Tensor) -> tuple[Tensor, list[straight.Held]]:
        """Return the layer's input, with the way back to the parameters of the adapters, and what `attach` then wants.
        Nothing where the way back has to begin at the output."""
        plain = path_of(type(self.layer)) == LINEAR and self.rows is None and x.requires_grad
        plain = plain and not self.cut
        halves = [_halves(self.layer, adapter) for adapter in self.adapters] if plain else []
        if not all(_is_at_hand(half) for pair in halves for half in pair):
            return x, []
        held = [straight.Held() for _ in halves]
        for one, scaling, (lora_A, lora_B) in zip(held, self.scalings, halves, strict=False):
            x = straight.Input.apply(one, x, lora_A.weight, lora_B.weight, lora_B.bias, scaling)
        return x, held

    def attach(self, y: Tensor, x: Tensor, ready: Ready, held: Sequence[straight.Held] = ()) -> Tensor:
        """Return the layer's output, with the way back to the parameters of the adapters.

        Args:
            y, x: output and input.
            held: of `attach_to_input`, which `x` comes from then.
        """
        if self.cut:
            return self._attach_cut(y, x, ready)
        if held:
            return straight.Output.apply(y, held, ready)
        way = _WAYS[path_of(type(self.layer))]
        for adapter, scaling in zip(self.adapters, self.scalings, strict=True):
            y = way(self, adapter, scaling, y, x, ready)
        if self.rows is not None:
            channels = -1 - len(getattr(self.base, "kernel_size", ()))
            magnitude = self.layer.lora_magnitude_vector[self.dora].weight
            bias = getattr(self.base, "bias", None)
            y = straight.Magnitude.apply(y, x, magnitude, bias, channels, self.rows, ready)
        return y

    def _attach_cut(self, y: Tensor, x: Tensor, ready: Ready) -> Tensor:
        """Return the output of the base, a DTensor, with the way back to the parameters of the adapters."""
        for adapter, scaling in zip(self.adapters, self.scalings, strict=True):
            lora_A, lora_B = _halves(self.layer, adapter)
            gradients = partial(tensor_parallel.of_linear, scaling=scaling)
            y = straight.Attached.apply(y, gradients, ready, x, lora_A.weight, lora_B.weight)
        return y


def _is_at_hand(half: Any) -> bool:
    """Return True if the whole parameters of a lora_A or lora_B are there before the layer is called."""
    if type(half) is not nn.Linear or gathered.is_gathered(half):
        return False
    return half.weight.ndim == 2 and not fsdp2.is_dtensor_kind(type(half.weight))


def _linear(acting: Acting, adapter: str, scaling: float, y: Tensor, x: Tensor, ready: Ready) -> Tensor:
    lora_A, lora_B = acting.layer.lora_A[adapter], acting.layer.lora_B[adapter]
    if gathered.is_gathered(lora_A) or gathered.is_gathered(lora_B):
        return gathered.attach(y, x, acting.layer, adapter, scaling, ready)
    if type(lora_A) is not nn.Linear or type(lora_B) is not nn.Linear:
        return _recomputed(acting, adapter, scaling, y, x, ready)
    gradients = partial(straight.of_linear, scaling=scaling, rows=acting.rows)
    return straight.Attached.apply(y, gradients, ready, x, lora_A.weight, lora_B.weight, lora_B.bias)


def _recomputed(acting: Acting, adapter: str, scaling: float, y: Tensor, x: Tensor, ready: Ready) -> Tensor:
    if any(map(gathered.is_gathered, _halves(acting.layer, adapter))):
        return gathered.attach(y, x, acting.layer, adapter, scaling, ready)
    named = [(half, dict(half.named_parameters())) for half in _halves(acting.layer, adapter)]
    factor: float | Tensor = scaling
    if acting.rows is not None:
        shape = (-1, *[1] * len(getattr(acting.base, "kernel_size", ())))
        factor = acting.rows.factor.to(x.device).view(shape) * factor
    parameters = [p for _, some in named for p in some.values()]
    gradients = partial(straight.recomputed, added=_adds(named, factor))
    return straight.Attached.apply(y, gradients, ready, x, *parameters)


def _embedding(acting: Acting, adapter: str, scaling: float, y: Tensor, x: Tensor, ready: Ready) -> Tensor:
    lora_A, lora_B = acting.layer.lora_embedding_A[adapter], acting.layer.lora_embedding_B[adapter]
    gradients = partial(straight.of_embedding, base=acting.base, scaling=scaling, rows=acting.rows)
    return straight.Attached.apply(y, gradients, ready, x, lora_A, lora_B)


def _tokens(acting: Acting, adapter: str, scaling: float, y: Tensor, x: Tensor, ready: Ready) -> Tensor:
    values = acting.layer.trainable_tokens_delta[adapter]
    index = torch.as_tensor(acting.layer.token_indices[adapter], dtype=torch.int64, device=y.device)
    if not len(index):
        return y
    embeds = isinstance(acting.base, nn.Embedding)
    gradients = partial(straight.of_embedding_rows, base=acting.base) if embeds else straight.of_linear_rows
    return straight.Attached.apply(y, gradients, ready, x, values, index)


_WAYS: dict[str, Callable[[Acting, str, float, Tensor, Tensor, Ready], Tensor]] = {
    LINEAR: _linear,
    EMBEDDING: _embedding,
    **dict.fromkeys(_CONVS, _recomputed),
    TOKENS: _tokens,
    PARAMETER: lambda acting, adapter, scaling, y, x, ready: y,  # experts.py has seen to it
}
"""How the output of a layer leads back to the parameters of an adapter, by class of PEFT's."""


def acting(name: str, layer: Any) -> Acting:
    """Return what acts in a layer.

    Raises:
        InvalidInput: dropout.
        UnsupportedAdapter: it cannot be trained on merged weights.
    """
    path = path_of(type(layer))
    if layer.disable_adapters:
        return Acting(layer, (), (), (), ())
    if path not in _WAYS:
        raise UnsupportedAdapter(
            f"{name}: a {path} cannot be trained on merged weights yet, only LoRA on Linear, Embedding, Conv "
            "layers and parameters, and trainable tokens: train this model with PEFT's forward, and serve it merged"
        )
    adapters, scalings = _acting(layer)
    parts = [p for adapter in adapters for p in _parameters(layer, path, adapter)]
    weights = list(innermost(layer).parameters(recurse=False))
    counted = [t for p in parts for t in _counted(p)]
    found = Acting(layer, adapters, scalings, counted, [t for p in weights for t in _counted(p)], name)
    found.check()
    return found


def acts_in(layer: Any) -> bool:
    """Return True if some adapter acts in a layer of a kind that can be trained."""
    return not layer.disable_adapters and bool(_acting(layer)[0])


def _acting(layer: Any) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Return the names and scalings of the adapters that act in a layer of a kind that can be trained."""
    tokens = path_of(type(layer)) == TOKENS
    there = layer.trainable_tokens_delta if tokens else layer.scaling
    adapters = () if layer.disable_adapters else tuple(sorted(a for a in layer.active_adapters if a in there))
    return adapters, tuple(1.0 if tokens else float(layer.scaling[adapter]) for adapter in adapters)


def _check(name: str, layer: Any, adapter: str, dropout: Any) -> None:
    if type(dropout) is not nn.Identity and getattr(dropout, "p", 0.0) > 0:
        raise InvalidInput(
            f"{name}: adapter '{adapter}' has lora_dropout={dropout.p}, which drops inputs of the adapter alone "
            "and no weight can express: make it with lora_dropout=0.0 (RL fine-tuning mostly does), or do not "
            "train on merged weights"
        )
    variant = layer.lora_variant.get(adapter)
    if variant is not None and path_of(type(variant)) not in _AS_LORA | _DORA:
        raise UnsupportedAdapter(
            f"{name}: adapter '{adapter}' is a {type(variant).__name__}, which cannot be trained on merged weights "
            "yet: train it with PEFT's forward, and serve it merged"
        )


def cut_of(name: str, acts: Acting, units: list[Any]) -> bool:
    """Return True if tensor parallelism has cut the base of a layer.

    Args:
        units: of FSDP2.

    Raises:
        UnsupportedAdapter: on such a weight, an adapter that cannot be trained on merged weights.
    """
    layer = acts.layer
    if not acts.adapters or not tensor_parallel.is_cut(layer, units):
        return False
    path = path_of(type(layer))
    plain = path == LINEAR and acts.dora is None
    halves = [half for adapter in acts.adapters for half in _halves(layer, adapter)] if plain else []
    if not plain or any(getattr(half, "bias", None) is not None for half in halves):
        raise UnsupportedAdapter(
            f"{name}: tensor parallelism has cut the weight of a {path}, with lora_bias or DoRA perhaps; on a cut "
            "weight only LoRA on Linear layers without these can be trained on merged weights: shard it with FSDP2"
        )
    return True


def _is_dora(layer: Any, adapter: str) -> bool:
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    return variant is not None and path_of(type(variant)) in _DORA


def _parameters(layer: Any, path: str, adapter: str) -> Iterator[Tensor]:
    if path == TOKENS:
        yield layer.trainable_tokens_delta[adapter]
        return
    if path == EMBEDDING:
        yield from (layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter])
    else:
        for half in _halves(layer, adapter):
            yield from half.parameters()
    if _is_dora(layer, adapter):
        yield layer.lora_magnitude_vector[adapter].weight


def _halves(layer: Any, adapter: str) -> tuple[nn.Module, nn.Module]:
    return layer.lora_A[adapter], layer.lora_B[adapter]


def _counted(parameter: Tensor) -> list[Tensor]:
    """Return the tensors whose version counters tell of writes to a parameter."""
    local = here(parameter)
    return [parameter] if local is parameter else [parameter, local]


def _adds(named: Sequence[tuple[nn.Module, Mapping[str, Tensor]]], factor: float | Tensor) -> straight.Added:
    """Return PEFT's `factor * lora_B(lora_A(x))` as a function of the parameters."""

    def adds(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        left = iter(parameters)
        y = x
        for module, names in named:
            some = dict(zip(names, left, strict=False))
            y = functional_call(module, some, (y.to(next(iter(some.values())).dtype),))
        return torch.mul(y, factor)

    return adds
