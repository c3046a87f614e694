"""Work whose results outlive the modes that a caller happens to be in."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")
_CPU = torch.device("cpu")


def outside_inference_mode(work: Callable[_P, _T]) -> Callable[_P, _T]:
    """Run a function outside of `torch.inference_mode`, whoever calls it: tensors that are made in that mode, and kept,
    could not be written to outside of it later."""

    @wraps(work)
    def outside(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not torch.is_inference_mode_enabled():
            return work(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return work(*args, **kwargs)

    return outside


def outside_default_device(work: Callable[_P, _T]) -> Callable[_P, _T]:
    """Run a function with torch's own default device, whichever a caller has set for tensors that he makes
    (`torch.set_default_device`, `with torch.device(...)`): an engine in the caller's process makes some of its own."""

    @wraps(work)
    def outside(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.get_default_device() == _CPU:
            return work(*args, **kwargs)
        with _CPU:
            return work(*args, **kwargs)

    return outside
