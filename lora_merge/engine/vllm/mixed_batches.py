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
    if config.lora_config is None or not on_cpu or not all(map(internals.has, ("lora_ops", "PunicaWrapperCPU"))):
        return
    kernels, caller = internals.lora_ops, sys.modules[internals.PunicaWrapperCPU.__module__]
    for name in KERNELS:
        kernel = getattr(kernels, name)
        if not hasattr(kernel, _MENDED):
            kernel = _leaving(kernel)
            for module in (kernels, caller):
                setattr(module, name, kernel)


def own(kernel: Callable[..., None]) -> Callable[..., None]:
    """Return vLLM's kernel behind a mended one."""
    found: Callable[..., None] = getattr(kernel, _MENDED, kernel)
    return found


def _leaving(kernel: Callable[..., None]) -> Callable[..., None]:
    """Return a kernel that leaves the output of rows without a slot alone. (Zeros in their place would do, but for an
    adapter in the last slot that has become infinite or NaN.)"""

    @functools.wraps(kernel)
    def mended(inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, *args: Any, **kwargs: Any) -> None:
        rows = slots >= 0
        if rows.all():
            kernel(inputs, weights, output, slots, *args, **kwargs)
        elif rows.any():
            part = output[rows]
            kernel(inputs[rows], weights, part, slots[rows], *args, **kwargs)
            output[rows] = part

    setattr(mended, _MENDED, kernel)
    return mended
