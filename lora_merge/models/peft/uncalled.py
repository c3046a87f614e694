"""Modules that are never called, as the module around them reads their weight.

PEFT puts its layer in a module's place, and the adapter acts where that is called. Mamba multiplies by
`self.dt_proj.weight` itself: an adapter on `dt_proj` does nothing in training, and merging would switch it on.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import cache
from types import CellType, CodeType, FunctionType

from torch import nn

from ...names import lineage

_ABOUT = frozenset({"dtype", "device", "shape", "size", "ndim", "dim", "numel", "data_ptr", "is_cuda", "is_meta"})
"""What may be asked of a weight without computing with it."""
_LOOKS = frozenset({"hasattr", "isinstance", "getattr"})
"""Functions that look at a module and do not call it."""
_ASIDE = ("__init__", "_init", "init_", "tie_", "_tie", "get_", "set_", "reset_", "load_", "_load")
"""How methods begin that are no part of a forward."""
_MIXED = {
    "transformers.models.falcon_mamba.modeling_falcon_mamba.FalconMambaMixer": {"dt_proj"},
    "transformers.models.jamba.modeling_jamba.JambaMambaMixer": {"dt_proj"},
}
"""Classes -> children that they call in some of their forwards, and whose weight they read in others."""


def read_itself(parent: type, child: str) -> str:
    """Return the dotted path of a class that computes with the weight of a child itself, and does not call it; "" where
    it calls it, or that cannot be told.

    Args:
        parent: class of the module around it.
        child: attribute that the module has there.
    """
    paths = lineage(parent)
    if any(child in _MIXED.get(path, ()) for path in paths) or child in _only_read(parent):
        return paths[0]
    return ""


@cache
def _only_read(cls: type) -> frozenset[str]:
    """Return the names of attributes whose `weight` a class's methods read, and which they use in no other way."""
    read, used = set[str](), set[str]()
    for base in cls.__mro__:
        if base is nn.Module or not issubclass(base, nn.Module):
            continue
        for name, function in vars(base).items():
            for code in _codes(function) if not name.startswith(_ASIDE) else ():
                for child, reads in _children(code):
                    (read if reads else used).add(child)
    return frozenset(read - used)


def _codes(function: object) -> Iterator[CodeType]:
    """Yield the code of a method, and of what its decorators call."""
    if isinstance(function, FunctionType):
        yield function.__code__
        inside = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
        for one in {id(f): f for f in (*inside, getattr(function, "__wrapped__", None)) if f is not function}.values():
            yield from _codes(one)


def _children(code: CodeType) -> Iterator[tuple[str, bool]]:
    """Yield each `self.NAME` in some code, and whether what follows computes with its weight."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _children(inner)
    own = code.co_varnames[:1] + code.co_freevars  # "self", also in a function inside
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG", "PUSH_NULL")]
    for first, before, step, after, last in zip(steps, steps[1:], steps[2:], steps[3:], steps[4:], strict=False):
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD") or not before.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            continue
        loaded = before.argval[-1] if isinstance(before.argval, tuple) else before.argval
        if loaded not in own or first.argval in _LOOKS:
            continue
        if after.opname == "LOAD_ATTR" and after.argval in ("weight", "bias"):
            if after.argval == "weight" and last.argval not in _ABOUT:
                yield step.argval, True
        elif after.opname != "STORE_ATTR":
            yield step.argval, False
