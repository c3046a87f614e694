"""Loads the compiled extension, if it was built."""

from __future__ import annotations

from functools import cache
from importlib import machinery
from pathlib import Path

import torch

BUILD_HINT = "build it with `pip install --no-build-isolation --no-deps -e .` (needs a C++ compiler)"


@cache
def load_error() -> str | None:
    """Loads the extension once; returns why it cannot be used, or None."""
    folder = Path(__file__).resolve().parent.parent
    found = [path for suffix in machinery.EXTENSION_SUFFIXES for path in folder.glob(f"_C{suffix}")]
    if not found:
        return f"the compiled extension is missing; {BUILD_HINT}"
    try:
        torch.ops.load_library(str(found[0]))
    except OSError as error:
        return f"the compiled extension does not load ({error}); re-{BUILD_HINT}"
    return None


def has_cuda() -> bool:
    """Whether the extension was built with nvcc."""
    return load_error() is None and hasattr(torch.ops.lora_merge_native, "launch_cuda")
