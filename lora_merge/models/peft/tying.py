"""Adapters of tied weights that hold the same numbers, as a folder brings them, made one again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from ..delta import Delta
from .read import read_adapters


def tie_again(model: nn.Module) -> None:
    """Let the factors of a tied weight's adapters share memory where they hold the same numbers.

    `ensure_weight_tying=True` trains one update of a tied embedding and head. A folder holds it twice, and PEFT loads
    it as two where it converts the adapter's dtype.

    Args:
        model: whole on the CPU; nothing trains it.
    """
    read = read_adapters(model)
    deltas = {(id(delta.owner), delta.attribute): delta for delta in read.deltas}
    parameters = {parameter.data_ptr(): parameter for parameter in model.parameters() if parameter.numel()}
    for users in read.users.values():
        found = [delta for owner, key in users if (delta := deltas.get((id(owner), key))) is not None]
        if len(found) < 2 or len(found) < len(users):
            continue
        first = _sides(found[0])
        for other in found[1:]:
            second = _sides(other)
            if other.update() != found[0].update() and _same(first, second):
                for mine, shared in zip(second, first, strict=True):
                    turned = shared.t() if other.transposed else shared
                    parameters[mine.data_ptr()].data = turned


def target_tied(base: nn.Module, config: Any, adapted: Collection[str]) -> None:
    """Let a configuration name the modules of tied weights that a file adapts.

    `ensure_weight_tying=True` adapts all modules that share a weight, and PEFT saves a configuration that names one of
    them. Reading it, PEFT finds the others again where that one is the model's input embedding and the other its head
    (Qwen2), and not where there are more of them (T5's `shared`).

    Args:
        adapted: names of the modules that the file adapts.
    """
    from peft.tuners.tuners_utils import check_target_module_exists

    modules = dict(base.named_modules())
    named = {name for name in modules if name and check_target_module_exists(config, name)}
    tied = {id(weight) for name in named if isinstance(weight := getattr(modules[name], "weight", None), Tensor)}
    others = {name for name in adapted if name not in named and name in modules}
    if others and all(id(getattr(modules[name], "weight", None)) in tied for name in others):
        config.target_modules = named | others  # what the file lacks of those that are named is told later
        config.exclude_modules = config.layers_to_transform = config.layers_pattern = None


def _sides(delta: Delta) -> list[Tensor]:
    """Return the factors of each adapter, as `[out, r]` and `[r, in]` of the parameter as it is stored; none where more
    than a product is added, or there are experts."""
    if delta.experts is not None or delta.magnitude is not None or delta.rows:
        return []
    pairs = [(f.lora_A.pieces[0].tensor, f.lora_B.pieces[0].tensor) for f in delta.factors]
    sides = [(a.t(), b.t()) if delta.transposed else (b, a) for a, b in pairs]
    return [side for pair in sides for side in pair]


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return (
        bool(one)
        and len(one) == len(other)
        and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))
    )
