"""Lists an engine's modules and tensors without walking over the model in every call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ...models.watch import Look, Watch
from ..fingerprint import facts

_T = TypeVar("_T")
_MODULES, _PARAMETERS = attrgetter("_modules"), attrgetter("_parameters")
_METHODS = "quant_method", "scheme"
"""Attributes that say how a layer computes. Loading may replace them, and what `kept` finds may depend on them."""
_WATCHED = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", *_METHODS), "nnnvtt"


class Looked(NamedTuple):
    """Live tensors, and `facts` of them: the same object as long as nothing has changed."""

    tensors: list[Tensor]
    facts: list[Any]


class Modules:
    """An engine's modules and tensors, cached: a walk over 28 layers takes half a millisecond. Within one call to a
    worker only this package changes modules; the first method that is called after `doubt` checks whether somebody else
    did. Tensors are checked by each call that returns them: in C if they can be watched, once they were equal twice.

    Args:
        model: the live model, LoRA wrappers and all.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._watch: Watch | None = None
        self._tried = False
        self._facts: list[Any] = []
        self._answers: dict[Any, Any] = {}
        self._still: Looked | None = None
        self._paths: list[tuple[str, nn.Module]] = []
        self._each: list[nn.Module] = []
        self._methods: list[Any] = []
        self._below: list[Any] = []
        self._kept: dict[Any, Any] = {}
        self._sure = False

    def forget(self) -> None:
        """Note that modules have changed."""
        self._paths, self._each, self._methods, self._below, self._kept, self._facts = [], [], [], [], {}, []
        self._unwatch()

    def _unwatch(self) -> None:
        self._watch, self._tried, self._answers, self._still = None, False, {}, None

    @contextmanager
    def others(self) -> Iterator[None]:
        """Run a block in which the model has other modules; afterwards restore what was known, and doubt it."""
        known = dict(vars(self))
        self.forget()
        try:
            yield
        finally:
            vars(self).update(known)
            self.doubt()

    def doubt(self) -> None:
        """Begin a new call: modules may have changed since the last one."""
        self._sure = False

    def _children(self) -> list[Any]:
        """Return what tells whether modules have changed: of each one the number, names and ids of its children and
        methods (all are alive, so an `id` stands for one)."""
        below = list(map(_MODULES, self._each))
        ids = map(id, chain(chain.from_iterable(map(dict.values, below)), _methods(self._each)))
        return [*map(len, below), *chain(*below), *ids]

    def paths(self) -> list[tuple[str, nn.Module]]:
        """List every module under every path, in the order of `named_modules(remove_duplicate=False)`, whose nested
        generators take ten times as long."""
        if not self._sure and self._watched() is None and self._children() != self._below:
            self.forget()
        self._sure = True
        if not self._paths:
            rest: list[tuple[str, nn.Module]] = [("", self.model)]
            while rest:
                path, module = rest.pop()
                self._paths.append((path, module))
                below = [
                    (f"{path}.{key}" if path else key, child)
                    for key, child in module._modules.items()
                    if child is not None
                ]
                rest.extend(reversed(below))
            self._each = list({id(module): module for _, module in self._paths}.values())
            self._methods, self._below = _methods(self._each), self._children()
        return self._paths

    def __iter__(self) -> Iterator[nn.Module]:
        """Yield every module once, as `Module.modules()`."""
        self.paths()
        return iter(self._each)

    def kept(self, find: Callable[[Modules], _T]) -> _T:
        """Return what a function finds here; cached until modules or their methods change."""
        self.paths()
        if find not in self._kept:
            self._kept[find] = find(self)
        return self._kept[find]

    def answer(self, find: Callable[[Modules], _T]) -> _T:
        """Return what a function finds here; cached until modules or their tensors may have changed."""
        if self._watched() is None:
            return find(self)
        if find not in self._answers:
            self._answers[find] = find(self)
        return self._answers[find]

    def tensors(self) -> list[Tensor]:
        """Return live parameters, then persistent buffers, each once."""
        return self.look().tensors

    @contextmanager
    def still(self) -> Iterator[None]:
        """Check tensors once for a block that only reads."""
        self._still = self.look()
        try:
            yield
        finally:
            self._still = None

    def look(self) -> Looked:
        """Return the tensors, and the facts that tell them apart from others."""
        tensors = self._watched()
        if tensors is not None:
            return Looked(tensors, self._facts)
        tensors = self._tensors()
        found = facts(tensors)
        if found != self._facts:
            self._facts, self._tried = found, False
        elif not self._tried:
            self._tried, self._watch = True, self._watching(tensors)
        return Looked(tensors, self._facts)

    def _watched(self) -> list[Tensor] | None:
        """Return the tensors if they are watched and nothing has changed; else None."""
        if self._watch is None:
            return None
        if self._still is not None:
            return self._still.tensors
        found = self._watch.again(self.model)
        if found is None:
            self._unwatch()
            return None
        return found[0]

    def _watching(self, tensors: list[Tensor]) -> Watch | None:
        """Return a watch over all that `_tensors` reads; None if there can be none."""
        watch = Watch(self.model)
        watch.look(Look(list(self), *_WATCHED))
        with torch._C.DisableTorchFunctionSubclass():
            watch.tensors(tensors, own=True)
        return watch if watch.done(tensors) else None

    def _tensors(self) -> list[Tensor]:
        found = {id(p): p for p in chain.from_iterable(map(dict.values, map(_PARAMETERS, self)))}
        for module in self:
            for key, buffer in module._buffers.items():
                if key not in module._non_persistent_buffers_set:
                    found[id(buffer)] = buffer
        with torch._C.DisableTorchFunctionSubclass():
            return [t for t in found.values() if t is not None and t.numel()]


def _methods(modules: Sequence[nn.Module]) -> list[Any]:
    return [inside.get(name) for inside in map(vars, modules) for name in _METHODS]


def ties_of(modules: Modules) -> dict[str, str]:
    """Return the path of each tied parameter -> the path under which it comes first."""
    everywhere = [id(p) for _, module in modules.paths() for p in module._parameters.values() if p is not None]
    if len(set(everywhere)) == len(everywhere):
        return {}
    first: dict[int, str] = {}
    ties = {}
    # A head may be the embedding module itself, under a second name.
    for name, module in modules.paths():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.numel():
                path: str = f"{name}.{key}" if name else key
                if first.setdefault(id(parameter), path) != path:
                    ties[path] = first[id(parameter)]
    return ties


@contextmanager
def unchanged(modules: Sequence[nn.Module]) -> Iterator[Callable[[], list[tuple[int, str, Tensor]]]]:
    """Restore the parameters and buffers of these modules after a block.

    Yields:
        a function that returns parameters which are new, or replaced, each with its module's number and its name.
    """
    before = [(dict(module._parameters), dict(module._buffers)) for module in modules]

    def new() -> list[tuple[int, str, Tensor]]:
        return [
            (number, name, parameter)
            for number, (module, (parameters, _)) in enumerate(zip(modules, before, strict=True))
            for name, parameter in module._parameters.items()
            if parameter is not None and parameters.get(name) is not parameter
        ]

    try:
        yield new
    finally:
        for module, (parameters, buffers) in zip(modules, before, strict=True):
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)


def wrapped(modules: Modules, wrapper: type) -> list[tuple[nn.Module, str, Any]]:
    """Return parent, name and wrapper of an engine's LoRA wrappers: of this class, with the layer as `base_layer`."""
    return [
        (parent, key, child)
        for parent in modules
        for key, child in parent._modules.items()
        if isinstance(child, wrapper) and isinstance(getattr(child, "base_layer", None), nn.Module)
    ]


@contextmanager
def unwrapped(modules: Modules, find: Callable[[Modules], list[tuple[nn.Module, str, Any]]]) -> Iterator[None]:
    """Run a block with the model without its LoRA wrappers, whose names `load_weights` does not know; `find` is like
    `wrapped`, and the same function each time, as its result is kept."""
    found = modules.kept(find)
    if not found:
        yield
        return
    swapped: list[tuple[Any, str, Any]] = []
    prefixes: list[tuple[Any, str]] = []
    module: Any
    with modules.others():
        try:
            while found:
                for parent, key, wrapper in found:
                    parent._modules[key] = wrapper.base_layer
                    swapped.append((parent, key, wrapper))
                modules.forget()
                found = modules.kept(find)
            for module in modules:
                prefix = getattr(module, "lora_base_layer_prefix", "")  # of some of vLLM's
                if prefix:
                    prefixes.append((module, prefix))
                    module.lora_base_layer_prefix = ""
            yield
        finally:
            for module, prefix in prefixes:
                module.lora_base_layer_prefix = prefix
            for parent, key, wrapper in reversed(swapped):
                parent._modules[key] = wrapper
