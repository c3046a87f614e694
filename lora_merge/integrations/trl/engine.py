"""Options of the engine that TRL starts, for which TRL has no flags."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from ..sharing import then_waiting
from .release import GENERATION


@contextmanager
def engine_options(*, share: bool = False, **options: Any) -> Iterator[None]:
    """Start the engines of trainers that are made inside the block with these options of `vllm.LLM`, added to TRL's own
    or replacing them.

    Args:
        share: the trainer's weights wait in the host's memory while its engine starts, for `attach(trainer,
            share=True)`, which lets them lie in the engine: the GPU then never holds them twice.
        options: of `vllm.LLM`: `enable_lora=True, max_lora_rank=32` for adapter mode, `dtype="float32"`.
    """
    module: Any = import_module(GENERATION)
    plain, init = module.LLM, module.VLLMGeneration._init_vllm
    if share:
        module.VLLMGeneration._init_vllm = then_waiting(init)

    def start(**theirs: Any) -> Any:
        return plain(**theirs | options)

    module.LLM = start
    try:
        yield
    finally:
        module.LLM, module.VLLMGeneration._init_vllm = plain, init
