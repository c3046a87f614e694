"""Forwards of modules that are called through a training, from `take` to `release`.

A hook of a module may see what comes in before others have changed it, or what goes out after: accelerate's hooks and
patches replace `forward`, and torch's global hooks come before a module's own. What reads the weight is inside of all.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

_SLOTS = ("_old_forward", "forward")
"""Where a module may have a forward of its own, the innermost first: accelerate keeps one that it calls."""


class _Forward:
    """A forward that takes the place of another one.

    Args:
        call: called as `call(module, inside, *args, **kwargs)`.
        own: the forward that the module had; None: that of its class.
    """

    def __init__(self, module: nn.Module, own: Any, call: Callable[..., Any]) -> None:
        self.module, self.own, self.call = module, own, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.module, self.inside, *args, **kwargs)

    def inside(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward in whose place this is."""
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __func__(self) -> Any:
        """What computes, for those who look whether it is linear in the weight."""
        return type(self.module).forward if self.own is None else getattr(self.own, "__func__", self.own)


class Through:
    """Modules whose forwards are called through a training: once for all, as a plan of a merge is made anew when a base
    has another forward."""

    def __init__(self) -> None:
        self._forwards: dict[nn.Module, _Forward] = {}

    def take(self, module: nn.Module, call: Callable[..., Any]) -> None:
        """Have a forward be `call(module, inside, *args, **kwargs)`, where it is not yet."""
        if module not in self._forwards:
            slot = next((name for name in _SLOTS if name in vars(module)), "forward")
            self._forwards[module] = vars(module)[slot] = _Forward(module, vars(module).get(slot), call)

    def release(self) -> None:
        """Give the modules their own forwards back. What others have put around them since passes calls on."""
        for module, forward in self._forwards.items():
            inside = vars(module)
            own = MethodType(type(module).forward, module) if forward.own is None else forward.own
            inside.update({slot: own for slot in _SLOTS if inside.get(slot) is forward})
            if forward.own is None and inside.get("forward") == own:
                del inside["forward"]  # it is that of the class
        self._forwards.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        """Let modules of a copied model call their own forwards."""
        return Through, ()
