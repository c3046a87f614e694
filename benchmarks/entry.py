"""What the host does for an entry into `merged(model)` and the exit: layers so small that their kernels take next to
nothing, so it is measured without a GPU. A GPU waits for all of it but what is done while it works.

    python benchmarks/entry.py --json FILE
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import report
import shapes
import torch

from lora_merge import merged

SHAPES = {
    "dense, 28 layers": shapes.Shape(28, 8, 1, 1, 8, 8),
    "experts, 8 layers of 128": shapes.Shape(8, 8, 1, 1, 8, 8, experts=128, attention=False),
}
"""As many matrices as Qwen2.5-7B and as 8 layers of Qwen3-30B-A3B have."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=31, help="timed runs; the median counts (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = report.provenance(torch.device("cpu")) | {"points": []}
    for name, shape in SHAPES.items():
        device = torch.device("cpu")
        model, _ = shapes.random_model(shape, 1, torch.bfloat16, torch.float32, device)
        times = [entry_and_exit(model) for _ in range(args.repeat + 2)][2:]
        wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
        matrices = len(shape.matrices())
        record["points"].append({"name": name, "matrices": matrices, "ms": 1e3 * wall, "cpu_ms": 1e3 * cpu})
        each = 1e6 * cpu / matrices
        print(f"{name}, {matrices} matrices: {1e3 * wall:.2f} ms, of the CPU {1e3 * cpu:.2f}, {each:.1f} us a matrix")
    report.save(record, args.json)


def entry_and_exit(model: torch.nn.Module) -> tuple[float, float]:
    """Seconds by the clock, and of this process on its CPUs."""
    wall, cpu = time.perf_counter(), time.process_time()
    with merged(model):
        pass
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
