"""Milliseconds, peak memory and kernel launches of one call, on a CPU and on a GPU."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .room import free

Call = Callable[[], object]


def typical(device: torch.device) -> Callable[[Sequence[float]], float]:
    """Return what counts of several times: the median on a GPU; the least on a CPU, as other work only adds to it."""
    return min if device.type == "cpu" else statistics.median


@dataclass(frozen=True)
class Run:
    """One call: milliseconds, and bytes of memory above what was in use before it: at the peak, and still after."""

    ms: float
    peak_bytes: int
    kept_bytes: int


def observe(call: Call, device: torch.device) -> Run:
    """Run a call once, watched.

    Memory on a GPU is the allocator's own peak. On a CPU it is the peak of the process's resident memory, which Linux
    keeps and resets on request (proc_pid_clear_refs(5), value 5): exact, where a sampling thread would miss short
    peaks. Memory that malloc holds back is returned first, or it would hide what the call takes.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        ms = milliseconds(call, device)
        peak, after = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        return Run(ms, peak - before, after - before)
    gc.collect()
    if not Path("/proc/self/clear_refs").exists():  # no Linux: memory is not known
        return Run(milliseconds(call, device), 0, 0)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    ms = milliseconds(call, device)
    return Run(ms, max(_status("VmHWM") - before, 0), _status("VmRSS") - before)


def _status(field: str) -> int:
    """Return a line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def milliseconds(call: Call, device: torch.device) -> float:
    """Return how long a call takes; on a GPU from its first kernel to its last, with gaps where the host was late."""
    if device.type == "cpu":
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def copies(nbytes: int, device: torch.device, repeat: int) -> list[float]:
    """Return the limit: milliseconds of one large copy that reads and writes `nbytes` once each.

    Where two such buffers do not fit next to the model, a smaller copy, its time scaled up.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    left = free(device)
    size = nbytes if left is None else min(nbytes, left // 3)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    destination = torch.zeros_like(source)
    times = [milliseconds(lambda: destination.copy_(source), device) for _ in range(repeat + 1)]
    return [ms * nbytes / size for ms in times[1:]]


def cache_bytes(device: torch.device) -> int:
    """Return the size of the largest cache: of a CPU as Linux tells, 0 elsewhere."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    files = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [file.read_text().strip() for file in files]
    return max((int(size[:-1]) << {"K": 10, "M": 20}[size[-1]] for size in sizes if size[-1:] in ("K", "M")), default=0)


def operations(device: torch.device, repeat: int) -> float:
    """Return the other limit: additions and multiplications a second, two a product, of torch's best matrix product.

    float32 on a CPU, where the kernels compute in it; bf16 on a GPU, whose matrix units they feed with bf16. The best
    run counts: it is a limit.
    """
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    times = [milliseconds(lambda: torch.mm(a, b, out=out), device) for _ in range(repeat + 1)]
    return 2 * n**3 / min(times[1:]) * 1e3


def launches(call: Call, device: torch.device) -> int:
    """Count the kernels, copies and fills that a call starts on a GPU; on a CPU, the operators of torch and compiled
    functions of lora_merge that it calls."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would print lines of its own into the table
    activity = torch.profiler.ProfilerActivity
    compiled = 0

    def count(frame: object, event: str, function: Any) -> None:
        nonlocal compiled
        compiled += event == "c_call" and getattr(function, "__module__", "") == "lora_merge._C"

    with torch.profiler.profile(activities=[activity.CUDA if device.type == "cuda" else activity.CPU]) as profile:
        sys.setprofile(None if device.type == "cuda" else count)
        try:
            call()
        finally:
            sys.setprofile(None)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    events = profile.events() or []
    if device.type == "cuda":
        return sum(event.device_type.name == "CUDA" for event in events)
    return compiled + sum("::" in event.name and not _inside_operator(event) for event in events)


def _inside_operator(event: Any) -> bool:
    parent = event.cpu_parent
    return parent is not None and ("::" in parent.name or _inside_operator(parent))
