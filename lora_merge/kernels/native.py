"""Loads the compiled extension, if it was built, and says what is in it."""

from __future__ import annotations

import re
from functools import cache
from importlib import machinery
from pathlib import Path

import torch

from . import layout

BUILD_HINT = "build it with `pip install --no-build-isolation --no-deps -e .` (needs a C++ compiler)"


@cache
def load_error() -> str | None:
    """Loads the extension once; returns why it cannot be used, or None."""
    if not hasattr(torch.ops.lora_merge_native, "launch_cpu"):  # another copy of this package may have loaded it
        folder = Path(__file__).resolve().parent.parent
        found = [path for suffix in machinery.EXTENSION_SUFFIXES for path in folder.glob(f"_C{suffix}")]
        if not found:
            return f"the compiled extension is missing; {BUILD_HINT}"
        try:
            torch.ops.load_library(str(found[0]))
        except OSError as error:
            return f"the compiled extension does not load ({error}); re-{BUILD_HINT}"
    return stale()


def stale() -> str | None:
    """Why the extension that is loaded does not speak with this Python code; None if it does."""
    native = torch.ops.lora_merge_native
    built = native.layout_hash() if hasattr(native, "layout_hash") else "none"
    if built == layout.HASH:
        return None
    return (
        f"the compiled extension is of another version than lora_merge's Python files (layout {built}, not "
        f"{layout.HASH}): the files changed since it was built, or this process loaded another copy of lora_merge "
        f"first; re-{BUILD_HINT}, and start Python again"
    )


def has_cuda() -> bool:
    """Whether the extension was built with nvcc."""
    return load_error() is None and hasattr(torch.ops.lora_merge_native, "launch_cuda")


def no_image(capability: tuple[int, int]) -> str | None:
    """Why the extension has no code for a GPU of this compute capability; None if it has."""
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
    """What the extension was built for, as nvcc calls it: "80", "90a", "120+PTX"."""
    return tuple(torch.ops.lora_merge_native.cuda_architectures())


def runs(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether a GPU runs code of an architecture.

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
