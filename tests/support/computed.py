"""What the layers of a model compute with, looked at while they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from helpers import assert_same_bits
from torch import Tensor, nn


@contextmanager
def computed(
    model: nn.Module, pushed: Callable[[], Mapping[str, Tensor]], base: Mapping[str, Tensor] | None = None
) -> Iterator[dict[str, int]]:
    """Hold the weights of all adapted layers in each forward and each backward pass inside against what was pushed, bit
    for bit: whole ones, in the dtype that they have there, rounded to that of what was pushed.

    Args:
        pushed: returns the policy by HF names; passes of an empty one are not looked at.
        base: weights by HF names, with which a forward with disabled adapters computes; None: it is not looked at.

    Yields:
        how many were looked at: "forward", "backward", "reference".
    """
    seen = {"forward": 0, "backward": 0, "reference": 0}

    def look(name: str, layer: nn.Module, kind: str) -> None:
        wanted, weight = pushed(), layer.base_layer.weight.detach()
        if layer.disable_adapters:
            if base is not None:
                assert_same_bits(weight, base[name], f"{name} of the reference")
                seen["reference"] += 1
        elif wanted:
            assert_same_bits(weight.to(wanted[name].dtype), wanted[name], f"{name} in a {kind} pass")
            seen[kind] += 1

    hooks = []
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            key = name.replace("_fsdp_wrapped_module.", "").removeprefix("base_model.model.") + ".weight"
            inner = module.base_layer
            hooks.append(inner.register_forward_hook(lambda m, x, y, k=key, at=module: look(k, at, "forward")))
            hooks.append(inner.register_full_backward_pre_hook(lambda m, dy, k=key, at=module: look(k, at, "backward")))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
