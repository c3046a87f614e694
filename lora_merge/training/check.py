"""Which models can be trained on merged weights."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..choices import Rounding, check_choice
from ..errors import InvalidInput, UnsupportedAdapter
from ..models.live import Live, check_model, live
from ..models.pausing import is_trained
from ..names import innermost
from ..shards import zero3
from ..shards.layout import Layout
from .layers import Acting, acting, cut_of, layers_of


def check_trainable(model: nn.Module, rounding: Rounding = "nearest") -> dict[nn.Module, Acting]:
    """Return what acts in the layers of a model; raise unless it can be trained so, before anything is changed."""
    check_choice("train_merged: rounding", rounding, Rounding)
    if check_model(model):
        raise InvalidInput(
            "train_merged: layers of megatron-core cannot be trained on merged weights yet: train them by the forward "
            "of their adapters, and serve them merged"
        )
    found = layers_of(model)
    if not found:
        raise InvalidInput(
            "train_merged: the model has no LoRA layers; pass the PeftModel, not its bare base. Full fine-tuning needs "
            "neither train_merged nor share=True: leave them out"
        )
    if any(map(is_trained, model.modules())):
        raise InvalidInput("this model is being trained on merged weights already: close() that training first")
    whole = live(model)
    with whole.ranks.vote("train_merged"):
        layers = dict(acting_layers(model, whole))
        for acts in layers.values():
            if rounding == "stochastic" and any(w.dtype == torch.float32 and w.ndim > 1 for w in acts.weights):
                raise InvalidInput(
                    f"{acts.name}.weight is float32, which rounding={rounding!r} does not round: what is served in 16 "
                    "bits would not be what is trained. Keep the base in bfloat16, or train and push with "
                    'rounding="nearest"'
                )
        whole.weights(whole.adapters()[1])
    return layers


def acting_layers(model: nn.Module, whole: Live) -> Iterator[tuple[nn.Module, Acting]]:
    """Yield the adapter layers of a model that is `whole`, with what acts in them; may fail on one rank alone.

    Raises:
        as `acting` and `cut_of`; UnsupportedAdapter: an adapter that cannot be trained as the model is sharded.
    """
    layout = Layout(model) if whole.sharded else None
    if layout is not None:
        layout.check_idle()
        layout.reshard()
    for name, layer in layers_of(model):
        acts = acting(name, layer)
        if layout is not None:
            if layout.cut is None or not layout.cut.units:  # by more than FSDP2
                _check_layout(name, acts)
            acts = replace(acts, cut=cut_of(name, acts, layout.units))
            acts = _of_flat(acts, layout) if layout.flat else acts
        yield layer, acts


def _check_layout(name: str, acts: Acting) -> None:
    """Raise `UnsupportedAdapter` for adapters that cannot be trained under FSDP1, ZeRO-3 or tensor parallelism."""
    layer = acts.layer
    other = "a DoRA adapter" if acts.dora is not None else ""
    other = "trainable tokens" if hasattr(layer, "trainable_tokens_delta") else other
    other = "an adapter on a parameter" if hasattr(layer, "parameter_name") else other
    if acts.adapters and other:
        raise UnsupportedAdapter(
            f"{name}: {other} cannot be trained on merged weights yet under FSDP1, DeepSpeed ZeRO-3 or tensor "
            "parallelism: shard the model with FSDP2"
        )
    embeds = hasattr(acts.layer, "lora_embedding_A") and any(a in acts.layer.lora_embedding_A for a in acts.adapters)
    if embeds and any(map(zero3.is_managed, acts.parameters)):
        raise UnsupportedAdapter(
            f"{name}: an adapter on an embedding under DeepSpeed ZeRO-3 cannot be trained on merged weights yet: shard "
            "the model with FSDP2, use ZeRO-2, or leave the embedding out of target_modules"
        )


def _of_flat(found: Acting, layout: Layout) -> Acting:
    """Return what acts in a layer of a model under FSDP1, whose modules do not always hold their parameters: with what
    is here of them instead."""
    kept = [place for adapter in found.adapters for place in _places(found.layer, adapter)]
    # Adapters and bases lie in one tensor, whose version `merged` sets: what they hold is compared instead.
    parameters = [tensor.data for owner, attribute in kept for tensor in _pieces(layout, owner, attribute)]
    base = innermost(found.layer)
    weights = [tensor for attribute, _ in layout.parameters(base) for tensor in _pieces(layout, base, attribute)]
    return replace(found, parameters=parameters, weights=weights)


def _places(layer: Any, adapter: str) -> Iterator[tuple[nn.Module, str]]:
    """Yield where the parameters of an adapter are."""
    if hasattr(layer, "lora_embedding_A") and adapter in layer.lora_embedding_A:
        yield from ((layer.lora_embedding_A, adapter), (layer.lora_embedding_B, adapter))
        return
    for half in (innermost(layer.lora_A[adapter]), innermost(layer.lora_B[adapter])):
        yield from ((half, attribute) for attribute in ("weight", "bias"))


def _pieces(layout: Layout, owner: nn.Module, attribute: str) -> Iterator[Tensor]:
    shard = layout.of(attribute, owner, attribute)
    if shard is not None:
        yield from (piece.tensor for piece in shard.pieces)


def check_own(module: nn.Module, known: Container[nn.Module]) -> None:
    """Raise `InvalidInput` if a module is called that has the hooks of a training, and is a copy of the one trained."""
    if module not in known:
        raise InvalidInput(
            f"this {type(module).__name__} is a shallow copy of one that is trained on merged weights, as "
            "nn.DataParallel makes for each GPU (transformers' Trainer, where one process sees several): start a "
            "process for each GPU (torchrun, DistributedDataParallel), or let it see one (CUDA_VISIBLE_DEVICES=0). "
            "Copies by copy.deepcopy after training.pause() may be called"
        )


def check_called(awaited: Collection[nn.Module], layers: Mapping[nn.Module, Acting]) -> None:
    """Raise `InvalidInput` if the forward of a layer that others have replaced did not call its base."""
    for name in [layers[layer].name for layer in awaited if layer in layers][:1]:
        raise InvalidInput(
            f"{name}: its forward was replaced by one that does not call its base_layer, but reads weights by itself: "
            "they are merged, and the adapters would get no gradients. Take it out (`del layer.forward`), have it call "
            "the forward in whose place it is, or do not train on merged weights"
        )


def check_gradients(optimizer: Optimizer, adapters: Sequence[Tensor]) -> bool:
    """Return True if an optimizer that is about to step holds some of the adapters; warn if none has a gradient."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    held = [p for p in adapters if id(p) in stepped]
    if held and all(p.grad is None for p in held):
        warnings.warn(
            "lora_merge: an optimizer steps on adapters that are trained on merged weights, and none of them has a "
            "gradient. Was backward() called? If so, something reads the weights without a call of the layers (as "
            "Unsloth's kernels do), so that adapters get none: leave that out, or do not train on merged weights",
            stacklevel=3,
        )
    return bool(held)


def check_untransformed() -> None:
    """Raise `InvalidInput` inside of a transform of torch.func, whose tensors hold no values that could be merged."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise InvalidInput(
            "a model that is trained on merged weights is called inside of torch.func.grad, vmap or another transform, "
            "which cannot see the merge: use backward() and loops, or close() the training before. (functional_call "
            "by itself works)"
        )


def tops(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that hold all adapter layers: a forward of each of them is one of the whole model."""
    wanted = set(map(id, layers))
    found = []
    for module in model.modules():
        if wanted <= set(map(id, module.modules())):
            found.append(module)
    return found
