"""Extends vLLM's workers: what a pull takes in one of them, by itself."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch


class Timed:
    """Methods for `collective_rpc`."""

    device: torch.device

    def pull_ms(self, repeats: int) -> float:
        """Median milliseconds of the merge, out of the trainer's memory into this worker's, without any call."""
        side: Any = self.get_model().__dict__["_lora_merge"]  # type: ignore[attr-defined]
        (pulled,) = side.pulls.values()
        _, plan = pulled._made
        spent = []
        for _ in range(repeats + 1):
            self._wait()
            begin = time.perf_counter()
            plan.run()
            self._wait()
            spent.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(spent[1:])

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
