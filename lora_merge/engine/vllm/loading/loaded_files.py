"""Notes which files an engine's weights came from, as vLLM's loaders read them: a checkpoint that has changed since is
not what the engine holds.

`watch` is called before a worker is made. It wraps two methods of vLLM's loaders: `_prepare_weights`, which says the
files, and `load_weights`. Where a release lacks them nothing is noted, and reading a checkpoint again is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from ...stamps import Stamp, Stamps, difference, stamps
from .. import internals

_READ = "_lora_merge_read"
"""Attribute of loaders while they read, and of models that were read."""
Sources: TypeAlias = list[Stamps]
"""The files of each source of weights, by path, in the order in which the loader comes to the sources."""


def watch() -> None:
    """Note from now on what loaders read; harmless when called twice."""
    loaders = [internals.DefaultModelLoader] if internals.has("DefaultModelLoader") else []
    loaders += [internals.RunaiModelStreamerLoader] if internals.has("RunaiModelStreamerLoader") else []
    for loader in loaders:
        if _READ in vars(loader) or not {"_prepare_weights", "load_weights"} <= vars(loader).keys():
            continue
        setattr(loader, _READ, None)
        loader._prepare_weights = _noting(loader._prepare_weights)
        loader.load_weights = _handing_over(loader.load_weights)


def _noting(prepare: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(prepare)
    def _prepare_weights(loader: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare(loader, *args, **kwargs)
        files = prepared if isinstance(prepared, list) else prepared[1]  # else behind the folder that they are in
        vars(loader).setdefault(_READ, []).append(stamps(files))
        return prepared

    return _prepare_weights


def _handing_over(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_weights(loader: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        vars(loader)[_READ] = []  # it may have fetched them before
        loaded = load(loader, model, *args, **kwargs)
        vars(model)[_READ] = read_by(loader)
        return loaded

    return load_weights


def read_by(loader: Any) -> Sources:
    """Return what a loader has read since the last call of this function."""
    found: Sources = vars(loader).pop(_READ, [])
    return found


def check_unchanged(model: nn.Module, where: str, read: Sources | None = None) -> Mapping[str, Stamp]:
    """Raise `RuntimeError` if a model's files have changed since it was read.

    Args:
        where: where they lie, in words.
        read: what was read of them now; None for nothing yet.

    Returns:
        the files.

    Raises:
        RuntimeError: they differ, or nothing is known of them.
    """
    before: Sources | None = vars(model).get(_READ)
    if not before:
        raise RuntimeError(
            f"the engine did not note at its start which files its weights came from, so that {where} cannot be "
            "compared with it: does its load_format read files of safetensors?"
        )
    files = {path: found for source in before for path, found in source.items()}
    if unseen := sorted(path for path, found in files.items() if found is None):
        raise RuntimeError(
            f"{unseen[0]} is no file that can be checked, so that a change of it would go unseen: {_ANEW}"
        )
    differs = difference(files, stamps(files))
    if not differs and read is not None:
        differs = next(filter(None, map(difference, map(_by_name, before), map(_by_name, read))), "")
        differs = differs or ("its sources are others" if len(before) != len(read) else "")
    if differs:
        raise RuntimeError(changed(where, differs))
    return {path: found for path, found in files.items() if found is not None}


def changed(where: str, differs: str) -> str:
    """Return the error for files that have changed."""
    return f"{where} is not any more what the engine was started from: {differs}; {_ANEW}"


_ANEW = "start the engine anew, on a folder that nothing writes to while it serves"


def _by_name(source: Stamps) -> Stamps:
    """Drop the folder: a snapshot of the hub's cache is another folder with links to the same files."""
    return {Path(path).name: found for path, found in source.items()}
