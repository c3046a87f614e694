"""Names of a checkpoint's tensors by the layer that they are in: the order of a stream, and vLLM's unit of transfer."""

from __future__ import annotations

from collections.abc import Iterable


def by_layer(names: Iterable[str]) -> list[list[str]]:
    """Group names by layer, which is what vLLM's `layerwise_groups` of the same names gives (its definition is in
    `vllm/distributed/weight_transfer/base.py`, and of it is a backend's that takes one group after another).

    A layer is what a name has up to its first number: `model.layers.3.mlp.experts.7.w1` is in layer 3 of
    `model.layers`. Stacks of layers come in the order in which they begin, layers in that of their numbers. Names
    without a number are a group in front of all layers if they come before the first of these, else one behind.
    """
    before: list[str] = []
    behind: list[str] = []
    stacks: dict[str, dict[int, list[str]]] = {}
    for name in names:
        words = name.split(".")
        at = next((at for at, word in enumerate(words) if word.isdigit()), None)
        if at is None:
            (behind if stacks else before).append(name)
        else:
            stacks.setdefault(".".join(words[:at]), {}).setdefault(int(words[at]), []).append(name)
    layers = [names for stack in stacks.values() for _, names in sorted(stack.items())]
    return [group for group in (before, *layers, behind) if group]
