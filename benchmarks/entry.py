"""What the host does for an entry into `merged(model)` and the exit: layers so small that their kernels take next to
nothing, so it is measured without a GPU. A GPU waits for what comes before the launch on either way; the rest is done
while it works.

    python benchmarks/entry.py --json FILE
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lora_merge import merged
from lora_merge.bench import report, shapes
from lora_merge.kernels import cpu

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
        times = [entry_and_exit(model) for _ in range(args.repeat + 3)][3:]
        wall, used, before = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
        matrices = len(shape.matrices())
        point = {"name": name, "matrices": matrices, "ms": wall, "cpu_ms": used, "before_launches_ms": before}
        record["points"].append(point)
        print(
            f"{name}, {matrices} matrices: {wall:.2f} ms, of the CPU {used:.2f} ({1e3 * used / matrices:.1f} us a "
            f"matrix), {before:.2f} of them before the launches ({1e3 * before / matrices:.1f})"
        )
    report.save(record, args.json)


def entry_and_exit(model: torch.nn.Module) -> tuple[float, float, float]:
    """Seconds by the clock, of this process on its CPUs, and of these before the launches there and back."""
    launched: list[float] = []

    def noted(launch: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            launched.append(time.process_time())
            launch(*arguments)

        return call

    track, untrack = cpu._Tracked.track, cpu._Tracked.untrack
    cpu._Tracked.track, cpu._Tracked.untrack = noted(track), noted(untrack)  # type: ignore[method-assign]
    try:
        wall, begin = time.perf_counter(), time.process_time()
        with merged(model):
            inside = time.process_time()
        end, done = time.perf_counter(), time.process_time()
    finally:
        cpu._Tracked.track, cpu._Tracked.untrack = track, untrack  # type: ignore[method-assign]
    return end - wall, done - begin, launched[0] - begin + launched[-1] - inside


if __name__ == "__main__":
    main()
