"""Extends vLLM's workers: what this package does in one of them fails when a test says so."""

from __future__ import annotations

import itertools
import os
from typing import Any

import first_calls

from lora_merge.engine.vllm import worker as ours
from lora_merge.engine.vllm.loading.loader import Loader
from lora_merge.engine.worker.merger import _Products
from lora_merge.engine.worker.session import WorkerSession
from lora_merge.kernels.tracked.plan import TrackedPlan

_WHERE: dict[str, tuple[Any, str]] = {
    "bucket": (Loader, "load"),
    "finish": (Loader, "finish"),
    "checksums": (Loader, "arrived"),
    "connect": (WorkerSession, "connect"),
    "unmerge": (TrackedPlan, "unmerge"),
    "remerge": (TrackedPlan, "remerge"),
    "products": (_Products, "merge"),
}


class Faulty(first_calls.Settled):
    """Methods for `collective_rpc`; none of them raises."""

    def fail(self, where: str, ranks: list[int], after: int = 0) -> str:
        """From now on `where` raises in these workers, after it has worked `after` times: an operation of the worker
        method, or one of `_WHERE`."""
        self.mend()
        if self.parallel_config.rank not in ranks:  # type: ignore[attr-defined]
            return "well"
        count = itertools.count()

        def broken(works: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if next(count) >= after:
                    raise MemoryError(f"injected into {where}")
                return works(*args, **kwargs)

            return call

        if where in ours.OPERATIONS:
            self._mended = lambda works=ours.OPERATIONS[where]: ours.OPERATIONS.update({where: works})
            ours.OPERATIONS[where] = broken(ours.OPERATIONS[where])
        else:
            owner, name = _WHERE[where]
            works = getattr(owner, name)
            self._mended = lambda: setattr(owner, name, works)
            setattr(owner, name, broken(works))
        return "broken"

    def mend(self) -> str:
        self.__dict__.pop("_mended", lambda: None)()
        return "well"

    def process(self) -> int:
        return os.getpid()

    def mapped(self) -> int:
        """How many buffers of trainers this process has mapped."""
        with open("/proc/self/maps") as maps:  # noqa: PTH123
            return sum("/dev/shm/lora_merge-" in line for line in maps)
