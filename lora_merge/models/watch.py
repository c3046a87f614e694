"""Watch: tells that a live model needs no new reading, because nothing that the last reading looked at has changed.

The compiled module (csrc/watch/watch.cpp) keeps what the reading saw: which objects, of which classes, what is in their
dicts, and of tensors class, address, shape, strides, dtype and device. It looks at all of that again in one call. What
it cannot keep (a dict of a class of its own, a tensor that is no plain one, what is reached in another way than through
modules), or where there is no compiled module, there is no watch, and everything is read each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..kernels.bindings import native

Question = Callable[[Any], object]


class Look(NamedTuple):
    """What a reading looks at in the `__dict__`, or the slots, of each of some objects.

    Args:
        objects: the model itself, or held in dicts of modules that come before.
        names: of attributes.
        kinds: a letter for each: "n", a dict of objects that may be looked at in turn; "v", a value that never changes,
            or a dict, list or set of such values; "t", an object of which nothing counts but which one it is and its
            class, or a dict of those. "v" and "t" may be missing. Of slots (`__slots__`): "T", as "t", and "O", an
            object that may be looked at in turn.
        insides: their dicts, where these are at hand.
    """

    objects: Sequence[Any]
    names: tuple[str, ...]
    kinds: str
    insides: Sequence[dict[str, Any]] | None = None


class Watch:
    """Notes what one reading of a model looks at, in its order; `again` then says whether it is all the same.

    It keeps no module, no tensor and no dict of theirs.
    """

    def __init__(self, model: nn.Module) -> None:
        exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
        usable = native.load_error() is None and exchange is not None
        self._seen = native.compiled.Watch(model, exchange) if usable else None
        self._asked: list[tuple[Question, Sequence[Any], list[object]]] = []

    def look(self, *looks: Look) -> None:
        """Note these."""
        for objects, names, kinds, insides in looks:
            if self._seen is not None:
                try:
                    within = list(map(vars, objects) if insides is None else insides)
                except TypeError:  # something that has no dict
                    within = []
                if not self._seen.add(list(objects), within, names, kinds):
                    self._seen = None

    def tensors(self, tensors: Sequence[Tensor], *, own: bool = False) -> None:
        """Note these, which are in the dicts of what was noted.

        Args:
            own: also of classes of their own, of which nothing counts but the memory that they are.
        """
        if self._seen is None:
            return
        kinds = set(map(type, tensors))
        known = all(map(_is_memory, kinds)) if own else {Tensor, nn.Parameter} >= kinds
        if not known or not self._seen.add_tensors(list(tensors), [t.untyped_storage()._cdata for t in tensors]):
            self._seen = None

    def ask(self, question: Question, objects: Sequence[Any]) -> None:
        """Note the answers to a question about objects among those noted, for what only Python can tell."""
        if self._seen is not None and objects:
            self._asked.append((question, objects, list(map(question, objects))))

    def done(self, *columns: Sequence[Any]) -> bool:
        """Return True if it can be watched; called when all was noted.

        Args:
            columns: objects among those noted, for `again`.
        """
        seen = self._seen
        if seen is not None and all(
            map(seen.give, [*map(list, columns), *(list(about) for _, about, _ in self._asked)])
        ):
            self._asked = [(question, (), answers) for question, _, answers in self._asked]
            seen.done()
            return True
        self._seen = None
        return False

    def again(self, model: nn.Module) -> list[list[Any]] | None:
        """Return the columns, live; None where something may be other than it was."""
        found = None if self._seen is None else self._seen.again(model)
        if found is None:
            return None
        columns = list(found)
        for question, _, answers in reversed(self._asked):
            try:
                if list(map(question, columns.pop())) != answers:
                    return None
            except Exception:  # the reading says of what
                return None
        return columns


def _is_memory(kind: type[Tensor]) -> bool:
    """Return True if a tensor of a class is the memory at its address, and nothing that only its class knows of."""
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__
