"""What merges cost in energy, and what the chip's power limit allows: NVML's energy counter over a second of each.

    python benchmarks/energy.py --shape qwen2.5-7b --ranks 16 32 64 128 256 --json FILE

A GPU that does not do anything draws so many watts; what a copy draws beyond that is what bytes cost, what products of
large matrices draw beyond it is what operations cost. A merge whose bytes and operations need more joules than the
limit gives in the time of a copy takes longer than a copy when many follow each other, whatever its kernel is: `floor`.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measured import random_segments

from lora_merge import Plan
from lora_merge.bench import report, shapes
from lora_merge.bench.job import DTYPES


class Meter:
    """NVML's counters of the current device, which need no package."""

    def __init__(self) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._call("nvmlInit_v2")
        self._device = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
        self._call("nvmlDeviceGetHandleByUUID", uuid, ctypes.byref(self._device))

    def _call(self, name: str, *arguments: object) -> None:
        error = getattr(self._nvml, name)(*arguments)
        if error:
            raise RuntimeError(f"{name} failed with NVML's error {error}")

    def _read(self, name: str, kind: type[Any] = ctypes.c_uint, *arguments: object) -> int:
        value = kind()
        self._call(name, self._device, *arguments, ctypes.byref(value))
        return int(value.value)

    @property
    def joules(self) -> float:
        return self._read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong) / 1e3

    @property
    def limit_watts(self) -> float:
        return self._read("nvmlDeviceGetEnforcedPowerLimit") / 1e3

    @property
    def sm_mhz(self) -> int:
        return self._read("nvmlDeviceGetClockInfo", ctypes.c_uint, 1)


def sustained(meter: Meter, call: Callable[[], object], seconds: float) -> dict[str, float]:
    """Watts, ms and joules of a call of which many follow each other, after as many to warm up."""

    def run() -> tuple[int, float]:
        calls, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            for _ in range(8):
                call()
            calls += 8
            torch.cuda.synchronize()
        return calls, time.perf_counter() - begin

    run()
    before = meter.joules
    calls, took = run()
    used = meter.joules - before
    return {"watts": used / took, "ms": took / calls * 1e3, "joules": used / calls, "sm_mhz": meter.sm_mhz}


def floor_ms(nbytes: float, operations: float, record: dict[str, Any]) -> float:
    """The least that a call takes when many follow each other, by its energy."""
    joules = nbytes * record["joules_per_byte"] + operations * record["joules_per_operation"]
    return 1e3 * joules / (record["limit_watts"] - record["watts_awake"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes.SHAPES, default="qwen2.5-7b", help="default %(default)s")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--adapter-dtype", choices=DTYPES, default="bf16", help="default %(default)s")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("energy.py: an NVIDIA GPU is needed, whose driver counts its energy")
    meter, dtype = Meter(), DTYPES[args.adapter_dtype]
    record = report.provenance(torch.device("cuda"))
    record |= {"shape": args.shape, "adapter_dtype": args.adapter_dtype, "limit_watts": meter.limit_watts, "rows": []}
    print("| | W | ms | J | copies | floor | MHz |\n|" + "---|" * 7)

    def measure(label: str, call: Callable[[], object], **more: float) -> dict[str, Any]:
        row: dict[str, Any] = {"label": label} | sustained(meter, call, args.seconds) | more
        if "operations" in row and "nbytes" in row:
            row["x_copy"] = row["ms"] / record["copy_ms"]
            row["floor_copies"] = max(1.0, floor_ms(row["nbytes"], row["operations"], record) / record["copy_ms"])
        record["rows"].append(row)
        figures = "".join(f" | {row[key]:.2f}" if key in row else " | " for key in ("x_copy", "floor_copies"))
        print(f"| {label} | {row['watts']:.0f} | {row['ms']:.2f} | {row['joules']:.2f}{figures} | {row['sm_mhz']} |")
        return row

    awake = measure("awake, no work", lambda: torch.cuda._sleep(1_000_000))
    record["watts_awake"] = awake["watts"]
    matrices = shapes.SHAPES[args.shape].matrices()
    elements = sum(rows * cols for _, rows, cols in matrices)
    # Values as those of weights: bits that do not change cost less.
    buffers = torch.empty(2, elements, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)
    copy = measure("copy", partial(buffers[0].copy_, buffers[1]))
    del buffers
    record["copy_ms"] = copy["ms"]
    record["joules_per_byte"] = (copy["watts"] - awake["watts"]) * copy["ms"] / 1e3 / (4 * elements)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    products = measure("products of 8192 x 8192", lambda: torch.mm(a, b))
    record["joules_per_operation"] = (products["watts"] - awake["watts"]) * products["ms"] / 1e3 / (2 * 8192**3)
    for rank in args.ranks:
        plan = Plan(random_segments(matrices, rank, dtype, torch.device("cuda")))
        work = 2.0 * rank * elements * (6 if dtype == torch.float32 else 1)
        measure(f"merges of rank {rank}", plan.run, nbytes=4.0 * elements, operations=work)
        del plan
    report.save(record, args.json)


if __name__ == "__main__":
    main()
