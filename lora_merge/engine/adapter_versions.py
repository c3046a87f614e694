"""Versions of an adapter that an engine keeps side by side: what they are called in requests and in answers.

Name and path are new for each version. vLLM's prefix cache, its cache of encoders' outputs and its LoRA slots tell
adapters apart by them, so that nothing that was computed with one version answers for another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .state import State

PREFIX = "/lora_merge/in-memory"
"""Begins the paths of this package's adapters, which name no files."""
CONSTANT_PATH = PREFIX
"""Path of the one adapter that each push without `keep` replaces."""
_PATH = re.compile(rf"{PREFIX}/.+/(\d+)")
_NAME = re.compile(r"lora_merge@(\d+)")


def name_of(version: int) -> str:
    """Return the name of a version: over HTTP what requests give as `model`, and answers say."""
    return f"lora_merge@{version}"


def path_of(state: State) -> str:
    """Return the path of the version that an engine holds in a state; no other push of any trainer has the same."""
    return f"{PREFIX}/{state.trainer}/{state.version}"


def label_of(path: str) -> str | None:
    """Return what a push would call an engine's weights that are the version of an adapter with a path; None where the
    path is that of no version."""
    found = _PATH.fullmatch(path)
    return None if found is None else f"adapter@{found[1]}"


def version_of(answer: Any) -> int | None:
    """Return the version with which an answer was computed, from its first token to its last.

    Args:
        answer: vLLM's `RequestOutput`; what an OpenAI-compatible server has answered, as an object or as JSON; or the
            name in it (`model`).

    Returns:
        None where it had none of this package's versions.
    """
    if isinstance(answer, Mapping):
        name = answer.get("model")
    elif isinstance(answer, str):
        name = answer
    else:
        lora = getattr(answer, "lora_request", None)
        name = getattr(answer, "model", None) if lora is None else lora.lora_name
    found = _NAME.fullmatch(name) if isinstance(name, str) else None
    return None if found is None else int(found[1])
