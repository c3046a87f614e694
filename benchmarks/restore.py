"""What an exact way back costs: memory by update size, rank and format, and the time of TrackedPlan against a copy.

    python benchmarks/restore.py [--rows 4096] [--cols 4096] [--matrices 1] [--ranks 16] [--updates 0.001 0.1 1]
    python benchmarks/restore.py --device cuda --rows 8192 --cols 8192 --matrices 20 --ranks 32 --json FILE

Weights are normal, updates have the given size against them. "held" is what TrackedPlan holds, of the weights' bytes;
"3 bits" is what codes from -3 to 3 with an escape would hold on the same weights, by count. Merge, unmerge and re-merge
(an update in the place of another one of the same size, by two plans in turn) are whole calls, the memory they take and
the wait for the device included, in multiples of one copy of the weights.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lora_merge import Plan, Segment
from lora_merge.bench import report
from lora_merge.bench.job import DTYPES
from lora_merge.bench.timing import milliseconds, typical
from lora_merge.restore import TrackedPlan


def beyond(base: torch.Tensor, s: Segment, merged: torch.Tensor) -> list[float]:
    """Shares of elements whose estimate is further than 0, 1, 3 and 7 steps (of raw bits) from the base."""
    estimate = torch.empty_like(base)
    Plan([Segment("estimate", merged, estimate, s.lora_A, s.lora_B, -s.scaling)]).run()
    word = torch.int32 if base.element_size() == 4 else torch.int16
    away = (base.view(word).long() - estimate.view(word).long()).abs()
    return [(away > k).double().mean().item() for k in (0, 1, 3, 7)]


def measure(args: argparse.Namespace, base: str, adapters: str, rank: int, update: float) -> dict[str, Any]:
    device, segments, others = torch.device(args.device), [], []
    for index in range(args.matrices):
        w = torch.randn(args.rows, args.cols, device=device).mul_(0.02).to(DTYPES[base])
        a = torch.randn(rank, args.cols, device=device).mul_(0.5).to(DTYPES[adapters])
        b = torch.randn(args.rows, rank, device=device).mul_(0.04 * update / rank**0.5).to(DTYPES[adapters])
        segments.append(Segment(f"w{index}", w, w, a, b))
        others.append(Segment(f"w{index}", w, w, torch.randn_like(a).mul_(0.5), b.flip(0).clone()))
    first, size = segments[0], sum(s.source.nbytes for s in segments)
    before = first.source.clone()
    plan, keeping, other = TrackedPlan(segments), TrackedPlan(segments, keep=True), TrackedPlan(others, keep=True)
    plan.merge()
    held = plan.nbytes / size
    shares = beyond(before, first, first.source.clone())
    plan.unmerge()
    assert torch.equal(before.view(torch.uint8), first.source.view(torch.uint8)), "not restored"
    source, target = torch.zeros(2, size, dtype=torch.uint8, device=device)
    times: dict[str, list[float]] = {"copy": [], "merge": [], "unmerge": [], "remerge": []}
    for _ in range(args.repeat):
        times["copy"].append(milliseconds(partial(target.copy_, source), device))
        times["merge"].append(milliseconds(plan.merge, device))
        times["unmerge"].append(milliseconds(plan.unmerge, device))
    keeping.merge()
    for turn in range(2 * args.repeat + 2):
        new, old = (keeping, other) if turn % 2 else (other, keeping)
        ms = milliseconds(partial(new.remerge, old), device)
        times["remerge"] += [ms] if turn > 1 else []  # both have their memory then
    keeping.unmerge()
    assert torch.equal(before.view(torch.uint8), first.source.view(torch.uint8)), "not restored"
    took = {f"{name}_ms": typical(device)(values) for name, values in times.items()}
    record: dict[str, Any] = {"base": base, "adapters": adapters, "rank": rank, "update": update, "held": held}
    record |= {"three_bits": 3 / (8 * DTYPES[base].itemsize) + shares[2], "beyond_0_1_3_7_steps": shares} | took
    return record | {f"x_copy_{name}": took[f"{name}_ms"] / took["copy_ms"] for name in ("merge", "unmerge", "remerge")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    for name, default in (("rows", 4096), ("cols", 4096), ("matrices", 1), ("repeat", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    parser.add_argument("--updates", type=float, nargs="+", default=[1e-3, 1e-2, 0.1, 1.0, 10.0, 1e4])
    parser.add_argument("--bases", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--adapters", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    torch.manual_seed(0)
    record = report.provenance(torch.device(args.device))
    record |= {name: getattr(args, name) for name in ("rows", "cols", "matrices")} | {"runs": []}
    print("| base | adapters | rank | update | beyond 0 | 1 | 3 | 7 | held | 3 bits | merge | unmerge | re-merge |")
    print("|" + "---|" * 13)
    cases = [(*kind, u) for kind in ((b, a, r) for b in args.bases for a in args.adapters for r in args.ranks)
             for u in args.updates]  # fmt: skip
    for case in cases:
        run = measure(args, *case)
        record["runs"].append(run)
        print(
            f"| {run['base']} | {run['adapters']} | {run['rank']} | {run['update']:g} | "
            + " | ".join(f"{100 * x:.2f} %" for x in run["beyond_0_1_3_7_steps"])
            + f" | {run['held']:.4f} | {run['three_bits']:.4f}"
            + f" | {run['x_copy_merge']:.2f} | {run['x_copy_unmerge']:.2f} | {run['x_copy_remerge']:.2f} |",
            flush=True,
        )
    report.save(record, args.json)


main()
