"""What an exact way back costs: memory by update size and format, and the time of TrackedPlan against a copy.

    python benchmarks/restore.py [--device cuda] [--rows 4096] [--cols 4096] [--matrices 1] [--rank 16]

Weights are normal, updates have the given size against them. "2 bits" is what TrackedPlan holds; "3 bits" is what codes
from -3 to 3 with an escape would hold on the same weights, by count.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from timing import milliseconds

from lora_merge import Plan, Segment
from lora_merge.restore import TrackedPlan


def beyond(base: torch.Tensor, s: Segment, merged: torch.Tensor) -> list[float]:
    """Shares of elements whose estimate is further than 0, 1, 3 and 7 steps (of raw bits) from the base."""
    estimate = torch.empty_like(base)
    Plan([Segment("estimate", merged, estimate, s.lora_A, s.lora_B, -s.scaling)]).run()
    word = torch.int32 if base.element_size() == 4 else torch.int16
    away = (base.view(word).long() - estimate.view(word).long()).abs()
    return [(away > k).double().mean().item() for k in (0, 1, 3, 7)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    for name, default in (("rows", 4096), ("cols", 4096), ("matrices", 1), ("rank", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(0)
    print("| base | update | beyond 0 | beyond 1 | beyond 3 | beyond 7 | 2 bits | 3 bits | merge | unmerge |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for update in (1e-3, 1e-2, 0.1, 1.0, 10.0, 1e4):
            segments = []
            for index in range(args.matrices):
                w = torch.randn(args.rows, args.cols, device=device).mul_(0.02).to(dtype)
                a = torch.randn(args.rank, args.cols, device=device).mul_(0.5).bfloat16()
                b = torch.randn(args.rows, args.rank, device=device).mul_(0.04 * update / args.rank**0.5).bfloat16()
                segments.append(Segment(f"w{index}", w, w, a, b))
            first = segments[0]
            base, target = first.source.clone(), torch.empty_like(first.source)
            plan = TrackedPlan(segments)
            plan.merge()
            size = sum(s.source.nbytes for s in segments)
            share = plan.nbytes / size
            shares = beyond(base, first, first.source.clone())
            plan.unmerge()
            assert torch.equal(base.view(torch.uint8), first.source.view(torch.uint8)), "not restored"
            copy = milliseconds(partial(target.copy_, base), device) * args.matrices
            merge, unmerge = 0.0, 0.0
            for _ in range(3):
                merge = milliseconds(plan.merge, device)
                unmerge = milliseconds(plan.unmerge, device)
            three = 3 / (8 * dtype.itemsize) + shares[2]
            print(
                f"| {str(dtype)[6:]} | {update:g} | "
                + " | ".join(f"{100 * x:.2f} %" for x in shares)
                + f" | {share:.4f} | {three:.4f} | {merge / copy:.1f} | {unmerge / copy:.1f} |"
            )


main()
