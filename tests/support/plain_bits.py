"""`weight_bits.Bits` where linear layers on a CPU keep their weights as they were loaded, as on a GPU."""

from __future__ import annotations

import weight_bits
from torch import nn
from vllm.model_executor.layers import utils


def _plain(layer: nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = nn.functional.linear  # type: ignore[assignment]


utils.dispatch_cpu_unquantized_gemm = _plain


class PlainBits(weight_bits.Bits):
    """Methods for `collective_rpc`."""
