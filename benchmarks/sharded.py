"""What merging on shards costs on one rank: the merge, the collective of adapters, and the limits of both."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from lora_merge.bench.timing import copies, launches, milliseconds
from lora_merge.models.live import Live
from lora_merge.models.operands import Operands, Turn, merge_plan

COPY_TARGET, GATHER_TARGET = 1.25, 1.2
"""A merge may take this many copies of its bytes; with the collectives, that and this many gathers of theirs."""
BEGAN = time.monotonic()


def tell(what: str) -> None:
    """Progress, on rank 0: making a model, or starting an engine, takes a minute."""
    if dist.get_rank() == 0:
        print(f"{time.monotonic() - BEGAN:6.1f} s: {what}", file=sys.stderr, flush=True)


def clocked(calls: Mapping[str, Callable[[], object]], device: torch.device, repeat: int) -> dict[str, Any]:
    """Median milliseconds of calls that all ranks make, after one to warm up; on a GPU the allocator's peak too, above
    what was in use before the first of them."""
    record: dict[str, Any] = {}
    for name, call in calls.items():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            used = torch.cuda.memory_allocated()
        call()
        dist.barrier()
        record[f"{name}_ms"] = statistics.median(milliseconds(call, device) for _ in range(repeat))
        if device.type == "cuda":
            record[f"{name}_peak_bytes"] = torch.cuda.max_memory_allocated() - used
    return record


def all_gather(nbytes: int, device: torch.device, group: Any = None) -> Callable[[], object]:
    """A call to be timed: one all-gather after which every rank holds so many bytes, parts of one size."""
    size = dist.get_world_size(group)
    mine = torch.empty(max(nbytes // size, 1), dtype=torch.uint8, device=device)
    everybodys = torch.empty(mine.numel() * size, dtype=torch.uint8, device=device)
    return lambda: dist.all_gather_into_tensor(everybodys, mine, group=group)


def merge_on_shards(model: Live, device: torch.device, repeat: int) -> dict[str, Any]:
    """This rank's figures of a merge in place, as `merged` runs it but for the way back. Collective.

    The weights drift while the clock runs: merges pile up.

    Returns:
        Bytes of this rank's adapted weights; bytes of adapters that one refresh receives from other ranks (it sends as
        many: parts are even); milliseconds of the merge without and with the collectives, of one large copy of the
        weights' bytes, and of one all-gather of the adapters' bytes; the merge in copies, and in what it may take.
    """
    _, deltas = model.adapters()
    with model.jobs(deltas, model.weights(deltas).__getitem__) as jobs:  # nothing is held apart on shards
        nbytes = sum(job.source.nbytes for job in jobs)
        operands = Operands([Turn(model.everyones(deltas), jobs)], model.merging, device)
        plan = merge_plan(jobs, operands)

    def step() -> None:
        operands.refresh()
        plan.run()

    ranks = model.merging
    adapters = operands.nbytes * ranks.size // max(ranks.size - 1, 1)
    record: dict[str, Any] = {"local_bytes": nbytes, "adapter_bytes_received": operands.nbytes}
    record["copy_ms"] = statistics.median(copies(nbytes, device, repeat))
    calls: dict[str, Callable[[], object]] = {
        "merge": plan.run,
        "merge_with_gather": step,
        "gather_of_adapter_bytes": all_gather(adapters, device, ranks.group),
    }
    record |= clocked(calls, device, repeat)
    record["merge_launches"] = launches(plan.run, device)
    allowed = COPY_TARGET * record["copy_ms"] + GATHER_TARGET * record["gather_of_adapter_bytes_ms"]
    record["x_copy"] = record["merge_ms"] / record["copy_ms"]
    record["x_allowed_with_gather"] = record["merge_with_gather_ms"] / allowed
    return record
