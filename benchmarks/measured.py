"""What several benchmarks need beside `lora_merge.bench`: options, segments without a model, peaks of all processes."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

import torch
from torch import Tensor

from lora_merge import Segment
from lora_merge.bench.timing import Call, observe


def add_arguments(parser: argparse.ArgumentParser, *, repeat: int) -> None:
    """Add the options that every benchmark of ways to merge has."""
    parser.add_argument(
        "--repeat", type=int, default=repeat, help="timed runs; timing.typical of them (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them here, as PNG")


def random_segments(
    matrices: list[tuple[str, int, int]], rank: int, adapter_dtype: torch.dtype, device: torch.device
) -> list[Segment]:
    """Return merges in place into bf16 weights of these sizes (name, out, in), all values normal; without a model."""

    def normal(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, cols, dtype=dtype, device=device).normal_(std=0.02)

    def one(name: str, rows: int, cols: int) -> Segment:
        w = normal(rows, cols, torch.bfloat16)
        return Segment(name, w, w, normal(rank, cols, adapter_dtype), normal(rows, rank, adapter_dtype), 1e-3)

    return [one(*matrix) for matrix in matrices]


def peak_of_everybody(call: Call, device: torch.device) -> int:
    """Return peak bytes above what was in use before a call; on a GPU those of all its processes, sampled each ms.

    Allocators keep what they once took, so a short peak is seen unless somebody gives memory back within that time.
    """
    if device.type == "cpu":
        return observe(call, device).peak_bytes
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = least = torch.cuda.mem_get_info(device)[0]
    done = threading.Event()

    def watch() -> None:
        nonlocal least
        while not done.wait(1e-3):
            least = min(least, torch.cuda.mem_get_info(device)[0])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        call()
        torch.cuda.synchronize(device)
    finally:
        done.set()
        watcher.join()
    return before - min(least, torch.cuda.mem_get_info(device)[0])
