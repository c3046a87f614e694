"""HF checkpoint names, whatever wraps the model.

`walk` looks through PEFT, torch.compile, activation checkpointing, DDP, DataParallel, DeepSpeed and FSDP by the
wrapper's type, so a module of the user's that happens to be called `base_layer` keeps its name. `hf_name` does what can
be done with text alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, compress, repeat
from operator import attrgetter, is_, itemgetter, methodcaller
from types import NoneType
from typing import Any, NamedTuple

from torch import Tensor, nn

from .errors import InvalidInput

_WRAPPERS = {
    "peft.peft_model.PeftModel": "base_model",
    "peft.mixed_model.PeftMixedModel": "base_model",
    "peft.tuners.tuners_utils.BaseTuner": "model",
    "peft.tuners.tuners_utils.BaseTunerLayer": "base_layer",
    "peft.utils.other.TrainableTokensWrapper": "token_adapter",
    "peft.utils.other.ModulesToSaveWrapper": "modules_to_save",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.optim.swa_utils.AveragedModel": "module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
    "megatron.core.distributed.data_parallel_base._BaseDataParallel": "module",
    "megatron.core.transformer.module.Float16Module": "module",
    "megatron.bridge.peft.adapter_wrapper.AdapterWrapper": "to_wrap",
}
"""Class -> the child that it wraps. By name, so that nothing is imported to look."""
_IN_FILES = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_STRIPPED = {"base_layer", *_IN_FILES}


_LOOP = "a module of the model contains itself, so that its weights have names without end: take that child out"
_VALUES = methodcaller("values")
_TOGETHER = 256
_DEEPEST = 200
"""Modules below one another; a model that goes deeper contains itself."""


class NamedTensor(NamedTuple):
    """A parameter or a persistent buffer: its HF name and where it lives."""

    name: str
    owner: nn.Module
    attribute: str
    tensor: Tensor


def hf_name(name: str) -> str:
    """Return the HF checkpoint name of a parameter's path in a wrapped model.

    Strips `base_model.model.` at the start, and `base_layer`, `modules_to_save.<adapter>`, `_orig_mod`,
    `_checkpoint_wrapped_module` and `_fsdp_wrapped_module` as whole path components (`base_layer_norm` stays). Where
    the model is at hand, `walk` decides by type instead, and is right for a user's own `base_layer` too.
    """
    parts = [part for part in name.split(".") if part not in _STRIPPED]
    if parts[:2] == ["base_model", "model"]:
        parts = parts[2:]
    while "modules_to_save" in parts:
        at = parts.index("modules_to_save")
        del parts[at : at + 2]
    return ".".join(parts)


def renamed(name: str, beginnings: Iterable[Sequence[str]]) -> str:
    """Return a name with another beginning: of the pairs of a beginning and what takes its place, the first that fits
    counts."""
    for begin, instead in beginnings:
        if name.startswith(begin):
            return instead + name.removeprefix(begin)
    return name


def unwrapped(key: str) -> str:
    """Return a name out of a file, without what wrappers have added to it: `_orig_mod`, `_checkpoint_wrapped_module`
    and `_fsdp_wrapped_module` anywhere, `module` in front, also behind `base_model.model`, which is taken off, too."""
    parts = [part for part in key.split(".") if part not in _IN_FILES]
    while parts[:1] == ["module"] or parts[:2] == ["base_model", "model"]:
        parts = parts[1 if parts[0] == "module" else 2 :]
    return ".".join(parts)


def check_module(model: Any) -> None:
    """Raise `InvalidInput` unless a model is a module."""
    if not isinstance(model, nn.Module):
        got = repr(model)[:80] if isinstance(model, str) else f"a {type(model).__name__}"
        raise InvalidInput(
            "model must be a torch.nn.Module that holds its weights (a PeftModel, what from_pretrained returned), or "
            f"the chunks of a megatron-core model where these are taken; got {got}"
        )


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module that takes part in the model's forward, in order, under its HF name.

    A wrapper is yielded before the module in it, under the same name; a module that has two places comes twice. Of a
    module in `modules_to_save` the copy of the active adapter is followed, or the original where no adapter is
    active; adapters' own modules are left out.
    """
    stack = [("", model)]
    while stack:
        name, module = stack.pop()
        if len(name) > _DEEPEST and name.count(".") > _DEEPEST:
            raise InvalidInput(_LOOP)
        yield name, module
        inner = wrapped(module)
        if inner is not None:
            stack.append((name, inner))
            continue
        prefix = f"{name}." if name else ""
        children = [(prefix + key, child) for key, child in module._modules.items() if child is not None]
        stack.extend(reversed(children))


class Trail(NamedTuple):
    """Some of the modules that `walk` yields.

    Args:
        modules: with two places, twice.
        kinds: their classes.
        insides: their `__dict__`.
        facts: their classes, and names of children: equal for all trails of two models only if `walk` gives the same
            names for both.
    """

    modules: list[nn.Module]
    kinds: list[type]
    insides: list[dict[str, Any]]
    facts: list[Any]


def trail(model: nn.Module) -> Iterator[Trail]:
    """Yield the modules of a model, some hundred at a time and what is below these next, with little Python for each.

    What is looked at of modules while they are at hand is in the CPU's caches.
    """
    found = Trail([], [], [], [])
    stack: list[tuple[int, list[Any]]] = [(1, [model])]
    while stack:
        depth, level = stack.pop()
        if depth > _DEEPEST:
            raise InvalidInput(_LOOP)
        kinds: list[type] = list(map(type, level))
        facts = found.facts
        facts.append(depth)
        facts += kinds
        distinct = dict.fromkeys(kinds)
        if NoneType in distinct:  # a child that is not there
            level = [module for module in level if module is not None]
            kinds = list(map(type, level))
            del distinct[NoneType]
        insides: list[dict[str, Any]] = [vars(module) for module in level]
        below: list[Any] = []
        wrappers = {cls: child for cls in distinct if (child := _kind(cls)) is not None}
        for cls, child in wrappers.items():
            chosen = list(map(is_, kinds, repeat(cls)))
            below += _all_wrapped(list(compress(level, chosen)), compress(insides, chosen), child)
        plain, within = level, insides
        if wrappers:
            others = [cls not in wrappers for cls in kinds] if len(wrappers) < len(distinct) else []
            plain, within = list(compress(level, others)), list(compress(insides, others))
        children = column("_modules", within, plain)
        facts += map(len, children)
        children = list(filter(None, children))
        facts += chain.from_iterable(children)
        below += chain.from_iterable(map(_VALUES, children))
        found.modules.extend(level)
        found.kinds.extend(kinds)
        found.insides.extend(insides)
        if len(found.modules) >= _TOGETHER:
            yield found
            found = Trail([], [], [], [])
        for begin in reversed(range(0, len(below), _TOGETHER)):
            stack.append((depth + 1, below[begin : begin + _TOGETHER]))
    yield found


def column(name: str, insides: Sequence[dict[str, Any]], modules: Iterable[nn.Module]) -> list[Any]:
    """Return an attribute of many modules, straight out of their dicts where all have it there: `__getattr__` of
    thousands of modules takes its time."""
    try:
        return list(map(itemgetter(name), insides))
    except KeyError:
        return list(map(attrgetter(name), modules))


def _all_wrapped(
    wrappers: Sequence[nn.Module], insides: Iterable[dict[str, Any]], child: str
) -> Sequence[nn.Module | None]:
    """Return the module inside each of some wrappers of one class."""
    if child != "modules_to_save":
        with suppress(KeyError, TypeError):
            inside = list(map(itemgetter(child), map(itemgetter("_modules"), insides)))
            if NoneType not in set(map(type, inside)):
                return inside
    return list(map(wrapped, wrappers))


def wrapped(module: nn.Module) -> nn.Module | None:
    """Return the module inside a wrapper; None if `module` is no wrapper."""
    cls = type(module)
    child = _kinds[cls] if cls in _kinds else _kind(cls)
    if child is None:
        return None
    if child == "modules_to_save":
        return _active_copy(module)
    inner = module._modules.get(child)  # `__getattr__` of thousands of modules takes its time
    inner = getattr(module, child, None) if inner is None else inner
    if inner is None:
        raise InvalidInput(f"a {cls.__module__}.{cls.__qualname__} has no {child}, the module that it is around")
    return inner


def choices(seen: Trail) -> list[int]:
    """Return the numbers of wrappers whose adapters choose which of several modules is inside."""
    chosen = {cls for cls in set(seen.kinds) if _kind(cls) == "modules_to_save"}
    return [at for at, cls in enumerate(seen.kinds) if cls in chosen] if chosen else []


def wrappers() -> dict[str, str]:
    """Return the classes that `walk` looks through."""
    return dict(_WRAPPERS)


def any_wrapper(modules: Iterable[nn.Module]) -> bool:
    """Return True if some of many modules are wrappers."""
    return any(_kind(cls) is not None for cls in set(map(type, modules)))


def innermost(module: nn.Module) -> nn.Module:
    """Return the module inside all wrappers around it."""
    while (inner := wrapped(module)) is not None:
        module = inner
    return module


def _active_copy(wrapper: Any) -> nn.Module:
    """Return the module that a ModulesToSaveWrapper's forward calls."""
    active = wrapper.active_adapters
    if wrapper.disable_adapters or not active or any(name not in wrapper.modules_to_save for name in active):
        return wrapper.original_module
    return wrapper.modules_to_save[active[0]]


def register_wrapper(path: str, child: str) -> None:
    """Let `walk` look through classes of this dotted path (and their descendants) into their child `child`."""
    _WRAPPERS[path] = child
    _kinds.clear()


def named_tensors(
    model: nn.Module, parameters: Callable[[nn.Module], Iterable[tuple[str, Tensor]]] | None = None
) -> Iterator[NamedTensor]:
    """Yield parameters and persistent buffers of the model without its adapters, under HF names.

    Tied weights come once for each of their names. Values are the base's: adapters are not added here.

    Args:
        parameters: of one module; `Layout.parameters` finds those that FSDP1 has taken out of it too.
    """
    parameters = parameters or own_parameters
    for name, module in walk(model):
        if wrapped(module) is not None:
            continue
        prefix = f"{name}." if name else ""
        for key, tensor in parameters(module):
            yield NamedTensor(prefix + key, module, key, tensor)
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield NamedTensor(prefix + key, module, key, buffer)


def unsaved_buffers(model: nn.Module) -> Iterator[NamedTensor]:
    """Yield buffers that are not persistent: no checkpoint has them."""
    for name, module in walk(model):
        for key in module._non_persistent_buffers_set:
            buffer = module._buffers.get(key)
            if buffer is not None:
                yield NamedTensor(f"{name}.{key}" if name else key, module, key, buffer)


def own_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that a module itself holds."""
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield key, parameter


def lineage(cls: type) -> tuple[str, ...]:
    """Return the dotted paths of a class and its ancestors, nearest first: `isinstance` without an import."""
    if cls not in _lineages:
        _lineages[cls] = tuple(f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)
    return _lineages[cls]


def path_of(cls: type) -> str:
    """Return the dotted path of a class; where torch has made it of another one (`fully_shard` makes an FSDPLinear of a
    Linear), of that other one."""
    paths = lineage(cls)
    if len(paths) < 2 or not paths[1].startswith(_PARALLEL):
        return paths[0]
    return next(path for path in paths[1:] if not path.startswith(_PARALLEL))


_PARALLEL = "torch.distributed."
"""Where the classes are that such a class has in front of the one that it was made of."""


def _kind(cls: type) -> str | None:
    """Return the child that a wrapper of this class wraps; None for other classes."""
    if cls not in _kinds:
        _kinds[cls] = next((_WRAPPERS[path] for path in lineage(cls) if path in _WRAPPERS), None)
    return _kinds[cls]


# No functools.cache: torch.compile warns of one that it meets in a forward, and traces through it.
_lineages: dict[type, tuple[str, ...]] = {}
_kinds: dict[type, str | None] = {}
