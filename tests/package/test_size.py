"""Size: no memory of a weight's size beside the tensors, more than 2^31 elements, 20,000 segments at size."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from helpers import assert_accurate, assert_same_bits
from torch import Tensor

from lora_merge import Plan, Segment

MIB = 1 << 20
CPU_EXTRA, GPU_EXTRA = 64 * MIB, 1 * MIB
"""What a run may need beside the tensors and the table, see the README."""

ON_CPU = """
import torch
from pathlib import Path
from lora_merge import Plan, Segment

def resident(word):
    status = Path("/proc/self/status").read_text()
    return int(status.split(word + ":")[1].split()[0]) * 1024

def run(rows, cols):
    w, out = torch.ones(rows, cols), torch.ones(rows, cols, dtype=torch.bfloat16)
    a, b, c = torch.ones(16, cols), torch.ones(rows, 16), torch.ones(5, 3)
    half = cols // 2
    merge = Segment("merge", w[:, :half], out[:, :half], a[:, :half], b, 0.5)
    segments = [merge, Segment("convert", w[:, half:], out[:, half:]), Segment("in place", c, c)]
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    plan = Plan(segments)
    plan.run()
    plan.run(rounding="stochastic", seed=1)
    print(resident("VmHWM") - before, w.nbytes)

run(64, 256)  # loads code, starts threads
run(4096, 8192)
"""


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_extra_memory_on_cpu(name: str) -> None:
    """The process's peak rises by far less than the 128 MiB weight."""
    environment = {**os.environ, "LORA_MERGE_BACKEND": name}
    done = subprocess.run([sys.executable, "-c", ON_CPU], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    extra, weight = map(int, done.stdout.splitlines()[-1].split())
    assert weight == 128 * MIB
    assert extra < CPU_EXTRA, f"{extra / MIB:.1f} MiB for a weight of {weight / MIB:.0f} MiB"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "triton"])
@pytest.mark.parametrize("adapter", [torch.bfloat16, torch.float32])
def test_extra_memory_on_gpu(name: str, adapter: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the allocator and, once the kernels are loaded, by the driver."""
    monkeypatch.setenv("LORA_MERGE_BACKEND", name)
    w = torch.randn(8192, 16384, device="cuda").bfloat16()
    out = torch.empty_like(w)
    a, b = torch.randn(32, 16384, device="cuda").to(adapter), torch.randn(8192, 32, device="cuda").to(adapter)
    plan = Plan(
        [
            Segment("merge", w[:, :8192], out[:, :8192], a[:, :8192], b, 0.5),
            Segment("copy", w[:, 8192:], out[:, 8192:]),
            Segment("copy of columns", a[:, ::2], a[:, ::2].clone()),
        ]
    )
    for rounding, seed in (("nearest", None), ("stochastic", 1)):
        plan.run(rounding=rounding, seed=seed)
        torch.cuda.synchronize()
        allocated, (free, _) = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()
        torch.cuda.reset_peak_memory_stats()
        plan.run(rounding=rounding, seed=seed)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - allocated < GPU_EXTRA
        assert free - torch.cuda.mem_get_info()[0] < GPU_EXTRA


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "triton"])
@pytest.mark.parametrize("layout", ["contiguous", "every second column", "transposed"])
def test_more_than_2_to_31_elements(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One matrix whose elements lie beyond 2^31 of the first, adapters included; rows and columns far apart."""
    monkeypatch.setenv("LORA_MERGE_BACKEND", name)
    rows, cols, rank = 33_000, 66_000, 5
    assert rows * cols > 2**31

    def tensor() -> Tensor:
        match layout:
            case "transposed":
                return torch.empty(cols, rows, dtype=torch.bfloat16, device="cuda").t()
            case "every second column":
                return torch.empty(rows, 2 * cols, dtype=torch.bfloat16, device="cuda")[:, ::2]
        return torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda")

    w, out = tensor(), tensor()
    for part in w.split(1000):
        part.normal_()
    a, b = torch.randn(rank, cols, device="cuda"), torch.randn(rows, rank, device="cuda")
    whole = Segment("big", w, out, a, b, 0.1)
    Plan([whole]).run()
    for begin in [*range(0, rows, 4111), rows - 100]:
        part = slice(begin, begin + 100)
        assert_accurate(dataclasses.replace(whole, source=w[part], lora_B=b[part]), out[part])
    out.zero_()
    Plan([Segment("copy", w, out)]).run()
    assert torch.equal(out, w)
    Plan([whole]).run(rounding="stochastic", seed=1)
    last = dataclasses.replace(
        whole,
        source=w[-40:],
        lora_B=b[-40:],
        destination=torch.zeros(40, cols, dtype=torch.bfloat16, device="cuda"),
        first=(rows - 40) * cols,
    )
    Plan([last]).run(rounding="stochastic", seed=1)
    assert_same_bits(out[-40:], last.destination, "indices beyond 2^31")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_20000_segments_of_2_to_31_elements(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of many experts: one table, in place, every weight checked."""
    monkeypatch.setenv("LORA_MERGE_BACKEND", name)
    count, rows, cols, rank = 20_000, 264, 416, 4
    assert count * rows * cols > 2**31
    w = torch.empty(count, rows, cols, dtype=torch.bfloat16, device="cuda")
    for part in w.split(1000):
        part.normal_()
    before = w.clone()
    a = torch.randn(count, rank, cols, device="cuda")
    b = torch.randn(count, rows, rank, device="cuda").bfloat16()
    Plan([Segment(f"expert{i}", w[i], w[i], a[i], b[i], 0.1) for i in range(count)]).run()
    for part in torch.arange(count, device="cuda").split(500):
        experts = Segment("experts", before[part], w[part], a[part], b[part], 0.1)
        assert_accurate(experts, experts.destination)
