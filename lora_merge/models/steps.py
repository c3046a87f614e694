"""Which optimizers have stepped: fused ones write parameters and leave their version counters as they were.

Seen with torch 2.13 (`AdamW(fused=True)`, the default of transformers' Trainer), and true of kernels of other packages.
Every subclass of `torch.optim.Optimizer` calls the hook after `step`, also from inside DeepSpeed's and Megatron's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Steps(Protocol):
    """Somebody who is told of each step before it is made."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before an optimizer of this process steps."""


_last: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
_count = 0
_told = WeakSet[Steps]()


def _note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global _count
    _count += 1
    _last[optimizer] = _count


def _tell(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for one in list(_told):
        one.before_step(optimizer)


register_optimizer_step_post_hook(_note)
register_optimizer_step_pre_hook(_tell)


def tell(somebody: Steps, *, of_steps: bool) -> None:
    """Tell somebody of each step before it is made, as long as he lives; or no longer."""
    (_told.add if of_steps else _told.discard)(somebody)


def steps() -> int:
    """Return how often optimizers of this process have stepped since this package was imported."""
    return _count


def stepped(since: int, tensors: Iterable[Tensor]) -> bool:
    """Return True if an optimizer that holds some of these tensors has stepped.

    Args:
        since: what `steps` was then.
    """
    found = [optimizer for optimizer, at in list(_last.items()) if at > since]
    held = {id(p) for optimizer in found for group in optimizer.param_groups for p in group["params"]}
    return bool(held) and not held.isdisjoint(map(id, tensors))
