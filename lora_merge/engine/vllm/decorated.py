"""What vLLM does to transformers' classes in its own process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

_WRAPPER = "TorchCompileWithNoGuardsWrapper"
"""The base that vLLM gives to classes which it decorates for its compiler."""


def decorated(model: nn.Module | Sequence[nn.Module]) -> list[str]:
    """Classes of a trainer's modules that an engine in this process has changed, so that their forward fails.

    vLLM's Transformers backend (models that it has no class of its own for) decorates transformers' decoder classes
    themselves. `__call__` of instances that were made before then asks for attributes which they lack, and passes by
    hooks; making another instance asks for vLLM's configuration.
    """
    found = {
        type(module).__name__
        for part in ([model] if isinstance(model, nn.Module) else model)
        for module in part.modules()
        # Asked now, not once for a class: its bases are what changes.
        if "do_not_compile" not in module.__dict__ and any(base.__name__ == _WRAPPER for base in type(module).__mro__)
    }
    return sorted(found)


def complaint(model: Any) -> str:
    """What to tell who trains a model whose classes were changed; "" where none was."""
    names = decorated(model if isinstance(model, nn.Module | list | tuple) else [])
    if not names:
        return ""
    return (
        f"an engine in this process has changed {', '.join(names)} of transformers for itself (vLLM's Transformers "
        "backend), and the trainer's forward of the same class fails with \"no attribute 'do_not_compile'\": start the "
        "engine in a process of its own (VLLM_ENABLE_V1_MULTIPROCESSING=1, an AsyncLLM, a Ray actor, a server)"
    )
