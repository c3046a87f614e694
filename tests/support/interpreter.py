"""Triton's interpreter, made several times as fast: most of its time went into reductions element by element, and into
replacing the functions of `triton.language` again in each function that a kernel calls. Results are the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _reduced(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """In the place of `ReduceOps.generic_reduce`: all pairs of neighbours at once."""
    if self.axis is None:
        return list(_by_elements(self, inputs))
    held = [np.moveaxis(one.handle.data, self.axis, 0) for one in inputs]
    while len(held[0]) > 1:
        halves = [[data[first::2] for data in held] for first in (0, 1)]
        pairs = [self.to_tensor(data, one.dtype) for half in halves for data, one in zip(half, inputs, strict=True)]
        made = self.combine_fn.fn(*pairs)
        held = [one.handle.data for one in (made if isinstance(made, tuple) else (made,))]
    kept = [np.expand_dims(data[0], self.axis) if self.keep_dims else data[0] for data in held]
    return [self.to_tensor(data, one.dtype) for data, one in zip(kept, inputs, strict=True)]


@functools.cache
def _seen_by(function: Callable[..., Any]) -> list[Any]:
    return [module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())]


def _patched(function: Callable[..., Any]) -> Any:
    """In the place of `_patch_lang`, which looks through all names of `triton.language` to find nothing left to do."""
    if any(tl.core.is_builtin(module.load) for module in _seen_by(function)):
        return _patch(function)
    return interpreter._LangPatchScope()


def _np_dtype(kind: Any) -> Any:
    """In the place of `_get_np_dtype`, which lists all dtypes each time."""
    return _listed(kind.scalar) if type(kind.scalar) is tl.dtype else _every_dtype(kind)


_every_dtype, _listed = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)
_by_elements, _patch = interpreter.ReduceOps.generic_reduce, interpreter._patch_lang
interpreter.ReduceOps.generic_reduce = _reduced
interpreter._patch_lang = _patched
interpreter._get_np_dtype = _np_dtype
