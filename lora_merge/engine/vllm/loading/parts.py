"""Parts of vLLM's models: which tensors of a checkpoint a model leaves out on purpose, which parameters belong to the
language model, and under which names a narrower class of transformers fits a wider one of vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from torch import nn

from ...messages import NO_PART

Renames: TypeAlias = tuple[tuple[str, str], ...]
"""Beginnings of names, each with what takes its place; the first that fits a name counts."""
NARROWER: tuple[Renames, ...] = (
    (("model.", "model.language_model."),),
    (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    (("", "thinker."),),
)
"""From the names of a class to those of one around it: a language model in one with towers, as transformers 5 and 4
name it, and the thinker of an Omni model."""
_UNKNOWN = "There is no module or parameter named "
_LISTED = " The available parameters belonging to "


def left_out(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return those of some names that vLLM leaves out by itself: its mappers drop them (`hf_to_vllm_mapper` to None: a
    talker, a head of a tower), or they are of layers of a tower behind the last that is computed. A language model's
    own head is none of them: where a class takes the embedding for it, an untied one would be missed. Classes of
    embeddings put `model.` before the names of a bare model as they load it, and BERT's drops its pooler there."""
    towers = _outside(model)
    return [name for name in names if any(_dropped(model, one, towers) for one in (name, f"model.{name}"))]


def _dropped(model: nn.Module, name: str, tower: Callable[[str], bool]) -> bool:
    """Follow a name down the modules as vLLM's loader does, each of which may rename or drop what is below it."""
    module: nn.Module = model
    path: list[str] = []
    rest = name
    while True:
        map_name = getattr(getattr(module, "hf_to_vllm_mapper", None), "_map_name", None)
        mapped = rest if map_name is None else map_name(rest)
        if mapped is None:
            return not rest.startswith("lm_head.")
        component, _, below = mapped.partition(".")
        child = module._modules.get(component)
        if child is None:
            unbuilt = bool(below) and getattr(module, component, module) is None  # as vLLM 0.26 leaves heads out
            return tower(".".join(path)) and (unbuilt or _behind_the_last(model, path, component))
        module, rest = child, below
        path.append(component)


def _behind_the_last(model: nn.Module, path: Sequence[str], component: str) -> bool:
    """Return True if a component is the number of a layer that the configuration has and vLLM does not build."""
    layers = model.get_submodule(".".join(path))
    if not isinstance(layers, nn.ModuleList) or not component.isdigit() or int(component) < len(layers):
        return False
    around = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path), 0, -1)]
    configured = next((c for m in around if (c := getattr(m, "config", None)) is not None), None)
    return int(component) < int(getattr(configured, "num_hidden_layers", 0))


def _outside(model: Any) -> Callable[[str], bool]:
    """Return a test of whether a path lies outside of the language model; of a model without towers none does."""
    inside = language_model(model)
    if inside is None:
        return lambda path: False
    return lambda path: path != inside and not path.startswith(f"{inside}.")


def language_model(model: Any) -> str | None:
    """Return the path of the language model in a model with towers; None for another model."""
    get = getattr(model, "get_language_model", None)
    if get is None:
        return None
    try:
        found = get()
    except Exception:  # of models that take part in it by name only
        return None
    return next((path for path, module in model.named_modules() if module is found and path), None)


def parts_of(paths: Iterable[str]) -> dict[str, int]:
    """Return how many parameters lie in each part at the top of a model."""
    counted: dict[str, int] = {}
    for path in paths:
        top = path.partition(".")[0]
        counted[top] = counted.get(top, 0) + 1
    return counted


def plainly(why: str) -> str:
    """Return why a tensor is refused without vLLM's list of all parameters."""
    at = why.find(_UNKNOWN)
    if at < 0:
        return why
    return NO_PART + why[at + len(_UNKNOWN) :].partition(_LISTED)[0].rstrip(". ")
