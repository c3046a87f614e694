"""Which control plane a handle of vLLM's has."""

from __future__ import annotations

import asyncio
from typing import Any

from ...errors import InvalidInput
from ..control.base import Control
from .control import AsyncControl, LlmControl, RayControl
from .url import HttpControl


def control_of(engine: Any) -> Control:
    """Return the control plane of a handle: an LLM, an AsyncLLM, a Ray actor, or a server's URL. A `Control` (made by a
    trainer's integration) is returned as it is.

    Raises:
        InvalidInput: it is none of them.
    """
    if isinstance(engine, Control):
        return engine
    if isinstance(engine, str):
        return HttpControl(engine)
    if type(engine).__module__.startswith("ray."):
        return RayControl(engine)
    if asyncio.iscoroutinefunction(getattr(engine, "collective_rpc", None)):
        return AsyncControl(engine)
    if hasattr(engine, "llm_engine") or hasattr(engine, "collective_rpc"):
        return LlmControl(engine)
    raise InvalidInput(
        f"engine must be a vllm.LLM, an LLMEngine, an AsyncLLM, a Ray actor or a URL, got {type(engine).__name__}"
    )
