"""Extends vLLM's workers on a CPU: linear layers keep their weights as they were loaded, as on a GPU, and parameters
can be moved into memory that other processes map. So a trainer writes to them there as it does over CUDA IPC."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import first_calls  # noqa: F401 - each worker imports this before it makes its model
import torch
from faulty import Faulty
from torch import Tensor, nn
from vllm.model_executor.layers import utils

from lora_merge.engine.state import State
from lora_merge.engine.vllm.loading.loader import Loader


def _plain(layer: nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = nn.functional.linear  # type: ignore[assignment]


utils.dispatch_cpu_unquantized_gemm = _plain
_anew = Loader._laid_anew
Loader._laid_anew = lambda self: [  # type: ignore[method-assign]
    layer for layer in _anew(self) if type(layer.quant_method).__name__ == "UnquantizedFusedMoEMethod"
]


class Shared(Faulty):
    """Methods for `collective_rpc`."""

    def _parameters(self) -> list[Tensor]:
        return list(self.get_model().parameters())  # type: ignore[attr-defined]

    def share(self) -> int:
        """Move all parameters into shared memory; how many there are."""
        for parameter in self._parameters():
            parameter.share_memory_()
        return len(self._parameters())

    def move(self, share: bool) -> int:
        """All parameters to other addresses, in shared memory or not."""
        for parameter in self._parameters():
            moved = parameter.detach().clone()
            parameter.data = moved.share_memory_() if share else moved
        return len(self._parameters())

    def scale(self) -> int:
        """Something else writes to the weights."""
        for parameter in self._parameters():
            parameter.data.mul_(1.5)
        return len(self._parameters())

    def forget(self) -> int:
        """What the engine's workers know of updates and their base, and of tables."""
        side = self.get_model().__dict__.get("_lora_merge")  # type: ignore[attr-defined]
        side.updates.clear()
        side.tables.clear()
        side.drop_pulls()
        side.merger, side.held = None, State()
        return 0

    def plans(self) -> int:
        """How many plans are kept that load buckets."""
        return len(self.get_model().__dict__["_lora_merge"].loader._plans)  # type: ignore[attr-defined]

    def mapped(self, pid: int, offered: bool = False) -> int:
        """How much of a process's shared memory this one has mapped: files.

        Args:
            offered: instead, what was offered to be pulled, as this package counts it.
        """
        if offered:
            return len(self.get_model().__dict__["_lora_merge"].pulls)  # type: ignore[attr-defined]
        theirs = {line.split()[4] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/torch_" in line}
        return len({line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines()} & theirs - {"0"})

    def resident(self) -> int:
        """Bytes of memory that this process has in use."""
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def bits(self) -> dict[str, int]:
        """A number for each parameter that depends on all its bits."""
        named = self.get_model().named_parameters()  # type: ignore[attr-defined]
        return {name: hash(p.detach().contiguous().view(torch.uint8).numpy().tobytes()) for name, p in named}
