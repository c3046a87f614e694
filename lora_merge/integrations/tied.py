"""Checks tied weights that go over a trainer's own transport, where the engine is not asked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..errors import InvalidInput
from ..names import walk
from ..stream.weights import MergedWeights


def check_tied(weights: MergedWeights, flag: str) -> None:
    """Refuse a stream that holds two names of one tied weight because an adapter makes them differ.

    An engine holds them as one tensor: vLLM's `load_weights` passes over the other name without a word. `VllmSync` asks
    the engine, and needs no such check.

    Args:
        weights: what is streamed.
        flag: of the trainer, in words, that leaves the module out: "--target_modules".

    Raises:
        InvalidInput: names the weight.
    """
    if not isinstance(weights.model, nn.Module):  # Megatron's chunks: what is tied there is one tensor
        return
    tied = dict(_tied(weights.model))
    differing = sorted(meta.name for meta in weights.metadata() if meta.name in tied)
    if differing:
        name, other = differing[0], tied[differing[0]]
        raise InvalidInput(
            f"{name} is tied to {other} in the engine, and an adapter makes the two differ here: leave "
            f"{name.removesuffix('.weight')} and {other.removesuffix('.weight')} out of {flag}"
        )


def _tied(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield names that transformers ties, with the names that they are tied to."""
    for prefix, module in walk(model):
        before = f"{prefix}." if prefix else ""
        known: Any = getattr(module, "all_tied_weights_keys", None)  # transformers 5
        if isinstance(known, dict):
            yield from ((before + name, before + first) for name, first in known.items())
        elif getattr(getattr(module, "config", None), "tie_word_embeddings", False):
            patterns = getattr(module, "_tied_weights_keys", None) or ()
            names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
            found = (name for name in names if any(re.search(pattern, name) for pattern in patterns))
            yield from ((before + name, "the input embedding") for name in found)
