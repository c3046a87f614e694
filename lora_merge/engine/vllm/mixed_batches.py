"""Mends vLLM's LoRA kernels for CPUs, for batches in which some requests have an adapter and others none.

vLLM numbers the slot of a request without adapter -1. Its kernels for GPUs leave such rows alone; those for CPUs
(`vllm.lora.ops.torch_ops`) index with the number, so that the row gets the adapter in the last slot. Tenants, whose
merged one needs no adapter, would be answered by another's policy. Seen in vLLM 0.26 and 0.32.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import internals

KERNELS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
"""Each takes the rows first, and the number of each row's slot as the fourth argument; others call these."""
_MENDED = "_lora_merge_own"
"""Attribute of a mended kernel: vLLM's own."""


def mend(config: Any) -> None:
    """Mend the kernels in this process if its engine uses them; harmless when called twice.

    Args:
        config: vLLM's `VllmConfig`.
    """
    on_cpu = config.device_config.device_type == "cpu"
    if config.lora_config is None or not on_cpu or not all(map(internals.has, ("bgmv_shrink", "PunicaWrapperCPU"))):
        return
    # Where the kernels are, and where those that call them have them from.
    modules = [sys.modules[one.__module__] for one in (internals.bgmv_shrink, internals.PunicaWrapperCPU)]
    for name in KERNELS:
        kernel = getattr(modules[0], name)
        if not hasattr(kernel, _MENDED):
            kernel = _leaving(kernel)
            for module in modules:
                setattr(module, name, kernel)


def own(kernel: Callable[..., None]) -> Callable[..., None]:
    """Return vLLM's kernel behind a mended one."""
    found: Callable[..., None] = getattr(kernel, _MENDED, kernel)
    return found


def _leaving(kernel: Callable[..., None]) -> Callable[..., None]:
    """Return a kernel to which rows without a slot are zeros, of which it makes zeros."""

    @functools.wraps(kernel)
    def mended(inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, *args: Any, **kwargs: Any) -> None:
        kernel(inputs.masked_fill((slots < 0)[:, None], 0), weights, output, slots, *args, **kwargs)

    setattr(mended, _MENDED, kernel)
    return mended
