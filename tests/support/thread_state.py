"""Modes and keys of dispatch that a test leaves the thread's torch with.

Twice in CI's runs something in a process with vLLM's engines left the main thread so that torch called no dispatch mode
and recorded no gradients: all later tests that need either failed, and nothing said since when. products.py says what
can do that.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch

_KEYS = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set


class ThreadState(NamedTuple):
    """Modes and keys of this thread."""

    included: torch._C.DispatchKeySet
    excluded: torch._C.DispatchKeySet
    modes: int
    gradients: bool
    inference: bool

    @staticmethod
    def now() -> ThreadState:
        included, excluded = (keys() for keys in _KEYS)
        modes = torch._C._len_torch_dispatch_stack()
        return ThreadState(included, excluded, modes, torch.is_grad_enabled(), torch.is_inference_mode_enabled())


_entered: list[Any] = []
"""Modes and guards that stay entered: torch has no other way to end what somebody has begun."""
_BEGINNING = ThreadState.now()
"""What a thread has that has run nothing."""


def restore(after: str) -> None:
    """Give this thread what it began with, and warn where that was something else."""
    found = ThreadState.now()
    if found == _BEGINNING:
        return
    warnings.warn(f"{after} left this thread's torch with {found}, where it began with {_BEGINNING}", stacklevel=1)
    while torch._C._len_torch_dispatch_stack():
        torch._C._pop_torch_dispatch_stack(None)
    if found.inference != _BEGINNING.inference:
        _entered.append(torch.inference_mode(_BEGINNING.inference))
        _entered[-1].__enter__()
    torch.set_grad_enabled(_BEGINNING.gradients)
    # Not key by key: keys of a backend leave its bit behind.
    _entered.append(torch._C._ForceDispatchKeyGuard(_BEGINNING.included, _BEGINNING.excluded))
    _entered[-1].__enter__()
