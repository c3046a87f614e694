"""Extends vLLM's workers: what a pull takes in one of them, by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


class Timed:
    """Methods for `collective_rpc`."""

    device: torch.device

    def pull_ms(self, repeats: int) -> tuple[float, float]:
        """Median milliseconds, without any call: of the merge out of the trainer's memory into this worker's, and of
        what brings the adapters here before it (nothing where they lie on this worker's GPU)."""
        side: Any = self.get_model().__dict__["_lora_merge"]  # type: ignore[attr-defined]
        (pulled,) = side.pulls.values()
        factored, plan = pulled._made

        def bring() -> None:
            if factored._bring is not None:
                factored._bring.run()
            factored._operands.refresh()

        return self._median(plan.run, repeats), self._median(bring, repeats)

    def _median(self, work: Callable[[], object], repeats: int) -> float:
        spent = []
        for _ in range(repeats + 1):
            self._wait()
            begin = time.perf_counter()
            work()
            self._wait()
            spent.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(spent[1:])

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
