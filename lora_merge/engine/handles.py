"""The control plane of any handle."""

from __future__ import annotations

from typing import Any

from .control.base import Control


def control_of(engine: Any) -> Control:
    """Return the control plane of a handle: an `sglang.Engine`, or what `VllmSync` takes.

    Raises:
        InvalidInput: it is none of them.
    """
    from .sglang.control import control_of as of_sglang
    from .vllm.handles import control_of as of_vllm

    return (of_sglang if hasattr(engine, "tokenizer_manager") else of_vllm)(engine)
