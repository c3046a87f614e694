"""verl's update of an engine whose checkpoint is FP8 in blocks, as its rollout worker makes it (verl 0.9), for
quantised_engines.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import no_ray  # noqa: F401 - before verl
from torch import Tensor


@contextmanager
def patched() -> Iterator[None]:
    """An engine that starts in here has the methods that verl puts in the place of vLLM's."""
    from verl.utils.vllm import vllm_quant_utils as verl

    verl.apply_vllm_quant_patches()
    try:
        yield
    finally:
        while verl.fp8_state.vllm_patches:
            verl.fp8_state.vllm_patches.pop().stop()


def update(merged: Mapping[str, Tensor], runner: Any) -> None:
    """Whole bf16 tensors in checkpoint names, quantised and loaded.

    Args:
        runner: vLLM's `model_runner`, in this process.
    """
    from verl.utils.vllm import vllm_quant_utils as verl

    staged = verl.prepare_quanted_weights_for_loading(runner.model)
    verl.load_quanted_weights(merged.items(), runner)
    verl.process_quanted_weights_after_loading(runner.model, staged)
