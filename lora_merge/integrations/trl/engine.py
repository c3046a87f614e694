"""Options of the engine that TRL starts, for which TRL has no flags."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from .release import GENERATION


@contextmanager
def engine_options(**options: Any) -> Iterator[None]:
    """Start the engines of trainers that are made inside the block with these options of `vllm.LLM`, added to TRL's own
    or replacing them.

    Args:
        options: of `vllm.LLM`: `enable_lora=True, max_lora_rank=32` for adapter mode, `dtype="float32"`.
    """
    module: Any = import_module(GENERATION)
    plain = module.LLM

    def start(**theirs: Any) -> Any:
        return plain(**theirs | options)

    module.LLM = start
    try:
        yield
    finally:
        module.LLM = plain
