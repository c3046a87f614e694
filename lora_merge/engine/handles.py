"""Which kind of engine a handle is of."""

from __future__ import annotations

from typing import Any

from .control.base import Control


def control_of(engine: Any) -> Control:
    """The control plane of a handle: of an `sglang.Engine`, or whatever `VllmSync` takes (URLs, too).

    Raises:
        InvalidInput: it is none of them.
    """
    from .sglang.control import control_of as of_sglang
    from .vllm.control import control_of as of_vllm

    return (of_sglang if hasattr(engine, "tokenizer_manager") else of_vllm)(engine)
