"""Loads the compiled extension, if it was built, and says what is in it."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from . import layout

BUILD_HINT = "build it with `pip install .` from the sources (needs a C++ compiler)"
compiled: Any = None
"""The compiled module, once `load_error` has found it usable."""


@cache
def load_error() -> str | None:
    """Load the module once; return why it cannot be used, or None."""
    global compiled
    try:
        found = _import()
    except ModuleNotFoundError:
        return f"the compiled extension is missing; {BUILD_HINT}"
    except ImportError as error:
        return f"the compiled extension does not load ({error}); re-{BUILD_HINT}"
    problem = stale(found)
    if problem is None:
        _lend_threads(found)
        compiled = found
    return problem


def _import() -> Any:
    """Import the module next to these files, or that of an installed lora_merge where Python was started in a checkout
    without one. `stale` says whether the two fit."""
    try:
        return import_module("lora_merge._C")
    except ModuleNotFoundError:
        file = next(_installed(), None)
        if file is None or "lora_merge._C" in sys.modules:  # as None, which bars it
            raise
    spec = spec_from_file_location("lora_merge._C", file)
    assert spec is not None
    assert spec.loader is not None
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def _installed() -> Iterator[Path]:
    """Yield compiled modules of lora_merge in the folders from which this Python imports."""
    for folder in sys.path:
        for file in sorted(Path(folder or ".", "lora_merge").glob("_C.*")):
            if file.name.endswith(tuple(EXTENSION_SUFFIXES)):
                yield file


def stale(found: Any) -> str | None:
    """Return why the compiled module does not fit this Python code; None if it does."""
    built = found.layout_hash() if hasattr(found, "layout_hash") else "none"
    if built == layout.HASH:
        return None
    return (
        f"the compiled extension is of another version than lora_merge's Python files (layout {built}, not "
        f"{layout.HASH}): the files changed since it was built; re-{BUILD_HINT}, and start Python again"
    )


def _lend_threads(found: Any) -> None:
    """Let the compiled module run on torch's own threads, through functions that libtorch exports from 2.10 on; with an
    older torch it has one thread."""
    libtorch = ctypes.CDLL(torch._C.__file__)
    names = ("torch_parallel_for", "torch_get_num_threads")
    if all(hasattr(libtorch, name) for name in names):
        found.use_threads(*(ctypes.cast(getattr(libtorch, name), ctypes.c_void_p).value for name in names))


def has_cuda() -> bool:
    """Return True if the extension was built with nvcc."""
    return load_error() is None and hasattr(compiled, "launch_cuda")


@cache
def cuda_problem() -> str | None:
    """Return why the CUDA kernels cannot be launched in this process; None if they can."""
    problem = compiled.cuda_problem()
    return f"the compiled kernels do not start: {problem}; a newer driver runs them" if problem else None


def no_image(capability: tuple[int, int]) -> str | None:
    """Return why the extension has no code for a GPU of this compute capability; None if it has."""
    built = architectures()
    if any(runs(name, capability) for name in built):
        return None
    major, minor = capability
    return (
        f"the compiled extension was built for {', '.join(built) or 'no architecture'}, and this GPU has compute "
        f"capability {major}.{minor}; build it again on this machine, or with TORCH_CUDA_ARCH_LIST={major}.{minor}"
    )


@cache
def architectures() -> tuple[str, ...]:
    """Return what the extension was built for, as nvcc calls it: "80", "90a", "120+PTX"."""
    return tuple(compiled.cuda_architectures())


def runs(architecture: str, capability: tuple[int, int]) -> bool:
    """Return True if a GPU runs code of an architecture.

    Machine code runs on its own major version, from its minor one on; PTX, which the driver compiles, on all that came
    later, too. With an "a" both are for exactly one GPU, with an "f" for a family, here that of the major version.
    """
    match = re.fullmatch(r"(\d+)(\d)([af]?)(\+PTX)?", architecture)
    if match is None:
        return False
    built = int(match[1]), int(match[2])
    if match[3] == "a":
        return built == capability
    return built <= capability and (built[0] == capability[0] or (match[4] is not None and not match[3]))
