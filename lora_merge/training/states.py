"""What is called before the state of a module is read or loaded, by `state_dict` and `load_state_dict`.

Checkpoints of accelerate, of torch.distributed and of safetensors begin there, and so does who writes his own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


def before_states(modules: Iterable[nn.Module], call: Callable[..., None]) -> list[Any]:
    """Have modules call something before their state, or that of what is around them, is read or loaded.

    Returns:
        hooks, to be removed.
    """
    hooks: list[Any] = []
    for module in modules:
        saves = module.register_state_dict_pre_hook(call)
        loads = module.register_load_state_dict_pre_hook(call)
        # Before FSDP1 gathers what it holds.
        module._state_dict_pre_hooks.move_to_end(saves.id, last=False)  # type: ignore[attr-defined]
        module._load_state_dict_pre_hooks.move_to_end(loads.id, last=False)  # type: ignore[attr-defined]
        hooks += [saves, loads]
    return hooks
