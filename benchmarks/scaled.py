"""Merging into 8 bits: how long it takes beside one large copy of what is read and written.

    python benchmarks/scaled.py
    python benchmarks/scaled.py --layers 28 --device cuda --json scaled.json

Linear layers of Qwen2.5-7B, in bf16, fused as an engine holds them (q, k and v in one weight, gate and up in one), into
e4m3 with scales for each tensor, channel and block, at several ranks. A copy is one of 3 bytes an element, two read and
one written. Where weights are merged to 16 bits first, these merges, and what makes 8 of them, are timed by themselves,
too; `--first` has all of them merged so. Bits are checked by the tests, not here.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_merge import Plan, Segment
from lora_merge.bench import report, timing
from lora_merge.kernels.cuda import backend as cuda
from lora_merge.kernels.scaled.two_step import TwoStepScaled
from lora_merge.kernels.scaled.weights import Group, Scaled

FUSED = [((3584, 512, 512), 3584), ((3584,), 3584), ((18944, 18944), 3584), ((3584,), 18944)]
"""Of a layer's weights: rows of their parts, and columns."""
GROUPS: tuple[Group, ...] = ("block", "channel", "tensor")
RUNS = ((0, torch.bfloat16), (1, torch.bfloat16), (32, torch.bfloat16), (32, torch.float32), (128, torch.bfloat16))
"""Ranks and dtypes of adapters."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--first", action="store_true", help="in two steps, also where a kernel does it in one")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.first:
        setattr(cuda, "separate", lambda placed, device: ([], list(placed)))  # noqa: B010
    device = torch.device(args.device)
    weights = [(normal(sum(rows), cols, device), rows) for _ in range(args.layers) for rows, cols in FUSED]
    copy = copied(sum(3 * weight.numel() for weight, _ in weights) // 2, args)
    record = report.provenance(device) | {"layers": args.layers, "copy_ms": copy, "runs": []}
    for group in GROUPS:
        for rank, dtype in RUNS:
            plan = planned(weights, group, rank, dtype)
            spent = measure(plan.run, args)
            found: dict[str, Any] = {"group": group, "rank": rank, "adapters": str(dtype).removeprefix("torch.")}
            if isinstance(plan._scaled, TwoStepScaled):
                for number, what in enumerate(("merge_ms", "scale_ms")):
                    found[what] = measure(partial(each, plan, number), args)
            record["runs"].append(found | {"ms": spent, "x_copy": spent / copy})
            print(json.dumps(record["runs"][-1]), flush=True)
            if args.json:
                args.json.write_text(json.dumps(record, indent=1) + "\n")


def each(plan: Plan, number: int) -> None:
    """One half of each step of a plan; what needs no merge is scaled alone."""
    launch: Any = plan._scaled
    if number and launch._ready is not None:
        launch._ready(False, 0)
    for step in launch._steps:
        step[number](False, 0)


def normal(rows: int, cols: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(rows, cols, dtype=dtype, device=device).normal_(std=0.02)


def copied(nbytes: int, args: argparse.Namespace) -> float:
    """Time of one large copy."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=args.device)
    target = torch.empty_like(source)
    return measure(lambda: target.copy_(source), args)


def measure(run: Any, args: argparse.Namespace) -> float:
    """In ms: the median on a GPU, the least on a CPU."""
    device = torch.device(args.device)
    run()
    return timing.typical(device)([timing.milliseconds(run, device) for _ in range(args.repeats)])


def planned(weights: list[tuple[Tensor, tuple[int, ...]]], group: Group, rank: int, dtype: torch.dtype) -> Plan:
    """Each part of each weight with an adapter of its own."""
    segments, scaled = [], []
    for weight, parts in weights:
        rows, cols = weight.shape
        groups = {"tensor": 1, "channel": rows}.get(group, -(-rows // 128) * -(-cols // 128))
        values = torch.empty(rows, cols, dtype=torch.float8_e4m3fn, device=weight.device)
        scaled.append(Scaled(values, torch.empty(groups, device=weight.device), group, weight.dtype))
        for source, to in zip(weight.split(parts), values.split(parts), strict=True):
            pair = normal(rank, cols, weight.device, dtype), normal(len(source), rank, weight.device, dtype)
            segments.append(Segment("w", source, to, *(pair if rank else (None, None))))
    return Plan(segments, scaled)


if __name__ == "__main__":
    main()
