"""Weights that are computed whenever they are read: pruned, normalised, parametrised in another way.

A checkpoint that holds what they are made of in the place of the weight is loaded without that weight, and what stands
there then is random. Some models of transformers are built so (Wav2Vec2's convolution of positions), and load it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn

from ..errors import InvalidInput
from ..names import NamedTensor, lineage
from .conversion import pretrained

_HOOKS = {
    "torch.nn.utils.prune.BasePruningMethod": ("_tensor_name", "torch.nn.utils.prune.remove(module, {0!r})"),
    "torch.nn.utils.weight_norm.WeightNorm": ("name", "torch.nn.utils.remove_weight_norm(module, {0!r})"),
    "torch.nn.utils.spectral_norm.SpectralNorm": ("name", "torch.nn.utils.remove_spectral_norm(module, {0!r})"),
}
"""Class of a hook -> where it says which attribute it computes, and what makes that plain again."""
_PARAMETRISED = "torch.nn.utils.parametrize.remove_parametrizations(module, {0!r})"
_LISTS = ".parametrizations."


def check_stored(model: nn.Module, tensors: Iterable[NamedTensor]) -> None:
    """Raise `InvalidInput`, naming the first weight that is computed, unless the model's class is built so.

    Args:
        model: wrapped or not.
    """
    found = [(t, how) for t in tensors if (how := _computed(t))]
    if not found:
        return
    built = _built(model)
    for t, (weight, again) in found:
        if built is not None and t.name not in built:
            part = t.name.removeprefix(weight.rpartition(".")[0] + ".")
            raise InvalidInput(
                f"{weight}: it is computed from {part} and others whenever it is read (pruned, normalised or "
                f"parametrised), and a checkpoint holds a plain weight there: make it one first, with {again}"
            )


def _computed(t: NamedTensor) -> tuple[str, str] | None:
    """Return what a tensor is a part of, by its name, and what makes that plain; None for a weight itself."""
    if _LISTS in f".{t.name}":
        module, _, rest = f".{t.name}".partition(_LISTS)
        attribute = rest.partition(".")[0]
        return f"{module}.{attribute}".lstrip("."), _PARAMETRISED.format(attribute)
    for hook in t.owner._forward_pre_hooks.values():
        for path in lineage(type(hook)):
            where, again = _HOOKS.get(path, ("", ""))
            attribute = str(getattr(hook, where, "")) if where else ""
            if attribute and t.attribute.startswith(f"{attribute}_"):
                module = t.name.removesuffix(t.attribute)
                return f"{module}{attribute}", again.format(attribute)
    return None


def _built(model: nn.Module) -> set[str] | None:
    """Return names of what a model's class builds; None where no class of transformers says so, or none can be made."""
    name, module = pretrained(model)
    try:
        with torch.device("meta"):
            anew = type(module)(copy.deepcopy(module.config))
    except Exception:
        return None
    return {f"{name}.{key}".lstrip(".") for key in anew.state_dict()}
