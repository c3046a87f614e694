"""Every rank and dtype: how long a merge takes beside one large copy of the same weights.

    python benchmarks/ranks.py
    python benchmarks/ranks.py --shape qwen2.5-7b --device cuda --json ranks.json --plot ranks.png

In place, out of place, and there and exactly back (`TrackedPlan`), in multiples of the copy in the same run; `addmm_`
beside them where it takes such adapters. Values are checked by merge.py and the tests, not here.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measured import add_arguments
from torch import Tensor

from lora_merge import Plan, Segment
from lora_merge.bench import report, shapes, timing
from lora_merge.restore import TrackedPlan

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KINDS = {"bf16": ("bf16", "bf16"), "bf16, fp32 adapters": ("bf16", "fp32"), "fp16": ("fp16", "fp16")}
"""Name -> dtypes of weights and adapters."""
RANKS = (1, 2, 4, 8, 12, 16, 20, 32, 64, 128, 256)
METHODS = ("in place", "out of place", "there and back", "addmm_")
COLOURS = {"bf16": "#1f6feb", "bf16, fp32 adapters": "#8250df", "fp16": "#1a7f37"}


def normal(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(rows, cols, dtype=dtype, device=device).normal_(std=0.02)


def calls(
    weights: list[Tensor], results: list[Tensor], adapters: list[tuple[Tensor, Tensor]], methods: list[str]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each method as a call; a plan is built when its turn comes."""

    def segments(to: list[Tensor]) -> list[Segment]:
        parts = zip(weights, to, adapters, strict=True)
        return [Segment(f"w{i}", w, out, a, b, 1e-3) for i, (w, out, (a, b)) in enumerate(parts)]

    if "in place" in methods:
        yield "in place", Plan(segments(weights)).run
    if "out of place" in methods:
        yield "out of place", Plan(segments(results)).run
    if "there and back" in methods:
        tracked = TrackedPlan(segments(weights))

        def both() -> None:
            tracked.merge()
            tracked.unmerge()

        yield "there and back", both
    if "addmm_" in methods:
        cut = [(a.to(weights[0].dtype), b.to(weights[0].dtype)) for a, b in adapters]

        def addmm() -> None:
            for w, (a, b) in zip(weights, cut, strict=True):
                w.addmm_(b, a, alpha=1e-3)

        yield "addmm_", addmm


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The record of a run."""
    device, repeat = args.device, args.repeat
    matrices = shapes.SHAPES[args.shape].matrices()
    points: list[dict[str, Any]] = []

    def ms(call: Callable[[], object]) -> float:
        call()
        return timing.typical(device)([timing.milliseconds(call, device) for _ in range(repeat)])

    with report.Progress(steps=len(args.kinds) * len(args.ranks)) as progress:
        for kind in args.kinds:
            base, adapter = (DTYPES[name] for name in KINDS[kind])
            weights = [normal(rows, cols, base, device) for _, rows, cols in matrices]
            results = [torch.empty_like(w) for w in weights]
            nbytes = sum(w.nbytes for w in weights)
            copy = statistics.median(timing.copies(nbytes, device, repeat))
            for rank in args.ranks:
                progress.say(f"{kind}, rank {rank}")
                adapters = [
                    (normal(rank, cols, adapter, device), normal(rows, rank, adapter, device))
                    for _, rows, cols in matrices
                ]
                times = {name: ms(call) for name, call in calls(weights, results, adapters, args.methods)}
                points.append({"kind": kind, "rank": rank, "bytes": nbytes, "own_copy_ms": copy, "ms": times})
                progress.advance()
            del weights, results
    for (
        p
    ) in points:  # how fast a copy is depends on where its buffers happen to lie: the fastest of the same bytes counts
        p["copy_ms"] = min(other["own_copy_ms"] for other in points if other["bytes"] == p["bytes"])
        p["x_copy"] = {name: time / p["copy_ms"] for name, time in p["ms"].items()}
    return report.provenance(device) | {"shape": args.shape, "torch": torch.__version__, "points": points}


def table(record: dict[str, Any]) -> None:
    """A line a point."""
    out = report.console()
    out.print(f"{record['shape']}, multiples of one large copy")
    names = [name for name in METHODS if any(name in p["x_copy"] for p in record["points"])]
    out.print(f"{'':24}" + "".join(f"{name:>16}" for name in names))
    for p in record["points"]:
        figures = "".join(f"{p['x_copy'][n]:16.2f}" if n in p["x_copy"] else f"{'':16}" for n in names)
        out.print(f"{p['kind'] + ', rank ' + str(p['rank']):24}" + figures)


def draw(record: dict[str, Any], file: Path) -> None:
    """Multiples of the copy over the rank: solid in place, dotted `addmm_`."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise SystemExit("pictures need matplotlib: pip install matplotlib") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({"font.size": 9}):
        fig, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
        for kind in {p["kind"]: None for p in record["points"]}:
            points = [p for p in record["points"] if p["kind"] == kind]
            for name, style in (("in place", "-o"), ("out of place", "--s"), ("addmm_", ":x")):
                there = [(p["rank"], p["x_copy"][name]) for p in points if name in p["x_copy"]]
                if there:
                    x, y = zip(*there, strict=True)
                    ax.plot(x, y, style, color=COLOURS[kind], label=f"{kind}, {name}", markersize=4, linewidth=1.4)
        ax.axhline(1, color="#d1242f", linestyle="--", linewidth=1)
        ax.set_xscale("log", base=2)
        ranks = sorted({p["rank"] for p in record["points"]})
        ax.set_xticks(ranks, [str(r) for r in ranks])
        ax.minorticks_off()
        ax.set_xlabel("rank")
        ax.set_ylabel("multiples of one large copy")
        ax.set_title(f"{record['device_name']}: {record['shape']}", loc="left")
        ax.legend(fontsize=7, frameon=False)
        file.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(file, dpi=130)
        plt.close(fig)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="default %(default)s")
    parser.add_argument("--shape", choices=shapes.SHAPES, default="small", help="default %(default)s")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS, metavar="RANK")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    add_arguments(parser, repeat=7)
    args = parser.parse_args()
    record = measure(args)
    table(record)
    report.save(record, args.json)
    if args.plot:
        draw(record, args.plot)
        report.console().print(f"picture: {args.plot}")


if __name__ == "__main__":
    main()
