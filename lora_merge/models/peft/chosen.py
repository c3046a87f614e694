"""Activates other PEFT adapters for a while than those that `set_adapter` chose."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ...errors import InvalidInput
from ...names import lineage
from ..claims import undone
from ..guards import Replaced
from .layer import PEFT_MODEL, TUNER_LAYER
from .tokens import TOKENS

_TUNER = "peft.tuners.tuners_utils.BaseTuner"
_WRAPPER = "peft.utils.other.ModulesToSaveWrapper"
Turns = dict[object, tuple[int, bool]]
"""The threads that read a model, and whether each chooses which adapters act."""
_turns: WeakKeyDictionary[nn.Module, Turns] = WeakKeyDictionary()
"""Of each model, by its first adapter layer, which its wrappers share."""
_known: WeakKeyDictionary[nn.Module, Turns | None] = WeakKeyDictionary()
"""The same by the models that were asked for; None where the last look found no adapter."""
_turned = threading.Condition()


def _renew() -> None:
    """Begin anew in a forked process, where the threads that read, or hold the lock, do not exist."""
    global _turned
    _turns.clear()
    _known.clear()
    _turned = threading.Condition()


os.register_at_fork(after_in_child=_renew)


def _turns_of(model: Any, look: bool) -> Turns | None:
    """Return those of a model; None where it has no adapters.

    Args:
        look: whether a model that had none is looked at again.
    """
    parts = [part for part in (model if isinstance(model, list | tuple) else (model,)) if isinstance(part, nn.Module)]
    if not parts:
        return None
    found = _known.get(parts[0], ...)
    if found is ... or (found is None and look):
        layer = next((m for part in parts for m in part.modules() if TUNER_LAYER in lineage(type(m))), None)
        found = _known[parts[0]] = None if layer is None else _turns.setdefault(layer, {})
    return found


def turn(model: Any, names: Sequence[str] | None = None) -> AbstractContextManager[None]:
    """Let one thread read a model while it chooses which adapters act, or several that take those that act.

    Args:
        names: that it will choose; None: those that act.
    """
    chooses = names is not None
    turns = _turns_of(model, chooses)
    if turns is None:
        return nullcontext()
    me, mine = threading.get_ident(), object()
    if not chooses and any(who == me for who, _ in list(turns.values())):  # others begin and end meanwhile
        return nullcontext()

    def free() -> bool:
        return not turns or all(who == me or not (chooses or other) for who, other in turns.values())

    def begin() -> None:
        with _turned:
            if not free():
                _turned.wait_for(free)
            turns[mine] = me, chooses

    def end() -> None:
        with _turned:
            turns.pop(mine, None)
            _turned.notify_all()

    return undone(begin, end)


def check_names(names: Any) -> tuple[str, ...] | None:
    """Return names of adapters that were an argument; None for those that act.

    Raises:
        InvalidInput: it is no list of different names.
    """
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
        raise InvalidInput(f"adapter_names must be a list of names of adapters, got {names!r}")
    if not names or len(set(names)) < len(names):
        raise InvalidInput(f"adapter_names must be at least one name, each once, got {list(names)}")
    return tuple(names)


@contextmanager
def chosen(model: Any, names: Sequence[str] | None) -> Iterator[None]:
    """Activate exactly these adapters, as `activated` does, for the time of a block that reads a model; other threads
    that read it meanwhile wait for one another."""
    with turn(model, names), activated(model, names):
        yield


def activated(model: Any, names: Sequence[str] | None) -> AbstractContextManager[None]:
    """Activate exactly these adapters in a model's forward for the time of a block, in this order, like `set_adapter`
    but without its effect on `requires_grad`. Who begins it has the model's `turn`; its end waits for one, as the block
    may be longer than the turn, and another thread that chooses meanwhile puts back what it found.

    Args:
        model: whatever holds PEFT's layers.
        names: None changes nothing.

    Raises:
        InvalidInput: an adapter is not there; the model has none of PEFT's; several have a copy of one module
            (`modules_to_save`).
    """
    if names is None:
        return nullcontext()
    replaced, wanted = Replaced(), list(names)

    def back() -> None:
        with turn(model, names):
            replaced.back()

    return undone(lambda: replaced.put(_changes(model, wanted)), back)


def originals(model: Any) -> AbstractContextManager[None]:
    """Show a model's modules as the base's own for the time of a block, also those of which adapters hold a copy
    (`modules_to_save`), so that weights which the base ties are seen as tied."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    wrappers, replaced = [m for m in modules if _WRAPPER in lineage(type(m))], Replaced()
    return undone(lambda: replaced.put([(wrappers, {"_disable_adapters": True})]), replaced.back)


def _changes(model: Any, names: list[str]) -> list[tuple[Sequence[nn.Module], dict[str, Any]]]:
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    layers: list[Any] = [m for m in modules if TUNER_LAYER in lineage(type(m))]
    wrappers: list[Any] = [m for m in modules if _WRAPPER in lineage(type(m))]
    there = {name for layer in layers for name in layer._get_available_adapters()}
    there |= {name for wrapper in wrappers for name in wrapper.modules_to_save}
    if not there:
        raise InvalidInput("adapter_names: expected a model with adapters of PEFT's, which have names; got one without")
    if unknown := [name for name in names if name not in there]:
        raise InvalidInput(f"adapter_names: there is no adapter {unknown[0]!r}; there are {', '.join(sorted(there))}")
    # PEFT's layers of trainable tokens fail on adapters that they do not hold.
    tokens = [layer for layer in layers if TOKENS in lineage(type(layer))]
    ids = set(map(id, tokens))
    layers = [layer for layer in layers if id(layer) not in ids]
    changes: list[tuple[Sequence[nn.Module], dict[str, Any]]] = [
        (layers, {"_active_adapter": names, "_disable_adapters": False})
    ]
    for layer in tokens:
        own = [name for name in names if name in layer.token_indices]
        changes.append(([layer], {"_active_adapter": own, "_disable_adapters": False}))
    for wrapper in wrappers:
        own = [name for name in names if name in wrapper.modules_to_save]
        if len(own) > 1:
            raise InvalidInput(
                f"adapter_names: {own[0]} and {own[1]} each have a copy of one module (modules_to_save), and there is "
                "no sum of these"
            )
        changes.append(([wrapper], {"_active_adapter": own, "_disable_adapters": False}))
    changes.append(([m for m in modules if _TUNER in lineage(type(m))], {"active_adapter": names}))
    changes.append(([m for m in modules if PEFT_MODEL in lineage(type(m))], {"active_adapter": names[0]}))
    return changes
