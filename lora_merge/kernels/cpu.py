"""The compiled CPU kernels (`csrc/cpu`): multi-threaded, AVX2 or AVX-512 chosen at run time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..segments import Segment, pack
from . import native


def unavailable(device: torch.device) -> str | None:
    """Why the CPU kernels cannot run on `device`; None if they can."""
    return "it needs CPU tensors" if device.type != "cpu" else native.load_error()


class _Launch:
    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(self, stochastic: bool, seed: int) -> None:
        torch.ops.lora_merge_native.launch_cpu(self.table, stochastic, seed)

    def row_norms(self, out: Tensor) -> None:
        torch.ops.lora_merge_native.row_norms_cpu(self.table, out)


def prepare(segments: Sequence[Segment], device: torch.device) -> _Launch:
    """Units of work are cut in C++, at each launch."""
    return _Launch(torch.from_numpy(pack(segments)))
