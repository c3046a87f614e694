"""What a launch costs: a small matrix alone, many in a row, in a CUDA graph; a small model, fitted over its layers.

    python benchmarks/latency.py --json FILE

The fit says `microseconds = fixed + x_copy * (those of a copy of the same bytes)`.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measured import random_segments

from lora_merge import Plan
from lora_merge.bench import report, shapes
from lora_merge.bench.timing import milliseconds

LAYERS = (6, 24, 96)
IN_A_ROW = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"), help="default %(default)s")
    parser.add_argument("--shape", choices=shapes.SHAPES, default="qwen2.5-0.5b", help="default %(default)s")
    parser.add_argument("--repeat", type=int, default=100, help="timed runs; the median counts (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    device = args.device

    def us(call: Callable[[], object]) -> float:
        call()
        return 1e3 * statistics.median(milliseconds(call, device) for _ in range(args.repeat))

    one = Plan(random_segments([("w", 64, 256)], 8, torch.bfloat16, device))

    def row() -> None:
        for _ in range(IN_A_ROW):
            one.run()

    record: dict[str, Any] = report.provenance(device) | {"shape": args.shape, "layers": []}
    record["us"] = {"alone": us(one.run), "in a row": us(row) / IN_A_ROW}
    if device.type == "cuda":
        for name, calls, body in (("in a graph, alone", 1, one.run), ("in a graph, in a row", IN_A_ROW, row)):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                body()
            record["us"][name] = us(graph.replay) / calls
    for name, value in record["us"].items():
        print(f"one matrix of 64 x 256, {name}: {value:.1f} us")

    for layers in LAYERS:
        matrices = dataclasses.replace(shapes.SHAPES[args.shape], layers=layers).matrices()
        plan = Plan(random_segments(matrices, 32, torch.bfloat16, device))
        size = 2 * sum(rows * cols for _, rows, cols in matrices)
        source, target = torch.zeros(2, size, dtype=torch.uint8, device=device)
        point = {"layers": layers, "us": us(plan.run), "copy_us": us(partial(target.copy_, source))}
        record["layers"].append(point)
        print(f"{args.shape}, {layers} layers: {point['us']:.0f} us, a copy {point['copy_us']:.0f} us")
    x, y = ([p[key] for p in record["layers"]] for key in ("copy_us", "us"))
    record["x_copy"], record["fixed_us"] = statistics.linear_regression(x, y)
    print(f"so {record['fixed_us']:.0f} us and {record['x_copy']:.2f} copies")
    report.save(record, args.json)


if __name__ == "__main__":
    main()
