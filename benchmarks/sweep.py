"""Time and memory of each way to merge, over the rank, the size of the model and the number of experts.

    python benchmarks/sweep.py
    python benchmarks/sweep.py --device cuda --json sweep.json --plot sweep.png
    python benchmarks/sweep.py --draw benchmarks/results/sweep-h200.json --plot sweep.png

The grid of a GPU takes some minutes on an H200, that of a CPU is small. Values are checked by merge.py, not here.
How fast a copy is depends on where its buffers happen to lie: of all copies of the same bytes the fastest counts, and
`own_copy_ms` is the one that was taken beside a point. `--draw` takes the figures from a file and measures nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measured import add_arguments
from peft import PeftModel

from lora_merge import Segment
from lora_merge.bench import job, report, shapes, timing
from lora_merge.bench.job import Matrix, Method
from lora_merge.restore import TrackedPlan


@dataclass(frozen=True)
class Grid:
    """What is swept: ranks on one shape, shapes at one rank, experts in one layer of a shape."""

    ranks: tuple[int, ...]
    rank_shape: str
    sizes: tuple[str, ...]
    experts: tuple[int, ...]
    experts_shape: str
    rank: int = 32

    def points(self) -> Iterator[tuple[str, str, shapes.Shape, int]]:
        """(sweep, name, shape, rank), each job once in a sweep."""
        for rank in self.ranks:
            yield "rank", self.rank_shape, shapes.SHAPES[self.rank_shape], rank
        for name in self.sizes:
            yield "size", name, shapes.SHAPES[name], self.rank
        for n in self.experts:
            yield "experts", f"{n} experts", replace(shapes.SHAPES[self.experts_shape], experts=n), self.rank


GRIDS = {
    "cuda": Grid(
        (8, 16, 32, 64, 128, 256),
        "qwen2.5-7b",
        ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b"),
        (8, 32, 128, 512, 6144),
        "qwen3-30b-a3b-1layer",
    ),
    "cpu": Grid(
        (8, 16, 32, 64, 128),
        "small-1layer",
        ("small-moe", "small-1layer", "small"),
        (4, 16, 64),
        "small-moe",
    ),
    "tiny": Grid((2, 4), "tiny", ("tiny-moe", "tiny"), (2, 4), "tiny-moe", rank=2),
}


def tracked(model: PeftModel, matrices: Sequence[Matrix]) -> Method:
    """`TrackedPlan`: in place, there and exactly back, from about two bits an element."""
    plan = TrackedPlan([Segment(m.name, m.weight, m.weight, m.lora_A, m.lora_B, m.scaling) for m in matrices])
    return Method(plan.merge, plan.unmerge, lambda: [m.weight for m in matrices], round_trip=True)


METHODS: dict[str, Callable[[PeftModel, Sequence[Matrix]], Method]] = {
    "lora_merge in place": job.in_place,
    "lora_merge out of place": job.out_of_place,
    "lora_merge tracked, there and back": tracked,
    "merged() enter+exit": job.merged,
    "peft": job.peft,
    "addmm_": job.addmm_,
}
STYLES = {
    "lora_merge in place": ("#1f6feb", "o", "lora_merge in place, one way"),
    "lora_merge out of place": ("#54aeff", "s", "lora_merge out of place, one way"),
    "lora_merge tracked, there and back": ("#8250df", "D", "lora_merge tracked, there and back"),
    "merged() enter+exit": ("#1a7f37", "^", "merged(), there and back"),
    "peft": ("#6e7781", "v", "PEFT's merge_adapter, one way"),
    "addmm_": ("#bf8700", "x", "addmm_, one way"),
}
BUDGET_S = 3
"""Seconds of timed runs a method and point, after which no further one begins."""


def measure(method: Method, device: torch.device, repeat: int) -> dict[str, Any]:
    """Milliseconds (of a merge, or there and back) and peak extra memory, after one run to warm up."""
    method.merge()
    method.back()
    runs: list[tuple[timing.Run, timing.Run]] = []
    while not runs or (len(runs) < repeat and sum(m.ms + b.ms for m, b in runs) < 1e3 * BUDGET_S):
        runs.append((timing.observe(method.merge, device), timing.observe(method.back, device)))
    both = method.round_trip
    return {
        "ms": timing.typical(device)([m.ms + b.ms if both else m.ms for m, b in runs]),
        "extra_bytes": max(max(m.peak_bytes, m.kept_bytes + b.peak_bytes) if both else m.peak_bytes for m, b in runs),
        "runs": len(runs),
    }


def compare(points: Sequence[dict[str, Any]]) -> None:
    """Times in multiples of the fastest copy of the same bytes, of all that were taken."""
    for p in points:
        p["copy_ms"] = min(other["own_copy_ms"] for other in points if other["bytes"] == p["bytes"])
        for m in p["methods"].values():
            m["x_copy"] = m["ms"] / p["copy_ms"]


def point(shape: shapes.Shape, rank: int, args: argparse.Namespace) -> dict[str, Any]:
    """Every method on one job, with both limits of the machine taken beside it."""
    dtype, adapter_dtype = job.DTYPES[args.dtype], job.DTYPES[args.adapter_dtype]
    with torch.enable_grad():
        model, base = shapes.random_model(shape, rank, dtype, adapter_dtype, args.device)
    matrices = job.matrices_of(model, base)
    elements, nbytes = sum(m.weight.numel() for m in matrices), sum(m.weight.nbytes for m in matrices)
    copies = timing.copies(nbytes, args.device, args.repeat)
    operations = timing.operations(args.device, args.repeat)
    methods: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    for name in args.methods:
        try:
            methods[name] = measure(METHODS[name](model, matrices), args.device, args.repeat)
        except torch.OutOfMemoryError as error:
            skipped[name] = str(error).splitlines()[0]
    copies += timing.copies(nbytes, args.device, args.repeat)
    parts = job.product_parts(args.device, dtype, adapter_dtype, rank)
    return {
        "rank": rank,
        "matrices": len(matrices),
        "elements": elements,
        "bytes": nbytes,
        "own_copy_ms": timing.typical(args.device)(copies),
        "products_ms": 2e3 * parts * rank * elements / operations,
        "operations_s": operations,
        "methods": methods,
        "skipped": skipped,
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The record of a whole grid."""
    points: list[dict[str, Any]] = []
    jobs = list(GRIDS[args.grid or args.device.type].points())
    with report.Progress(steps=len(jobs)) as progress:
        for sweep, name, shape, rank in jobs:
            progress.say(f"{sweep}: {name}, rank {rank}")
            points.append({"sweep": sweep, "name": name, **point(shape, rank, args)})
            gc.collect()
            progress.advance()
    compare(points)
    return {
        "device": args.device.type,
        "dtype": args.dtype,
        "adapter_dtype": args.adapter_dtype,
        "torch": torch.__version__,
        "points": points,
        **report.provenance(args.device),
    }


def series(record: dict[str, Any], sweep: str) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    """The points of a sweep, and for each method its figures at each of them (None where it was left out)."""
    points = [p for p in record["points"] if p["sweep"] == sweep]
    names = [name for name in METHODS if any(name in p["methods"] for p in points)]
    return points, {name: [p["methods"].get(name) for p in points] for name in names}


def draw(record: dict[str, Any], file: Path) -> None:
    """Four pictures: time over the rank, over the size of the model, over the number of experts; extra memory."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise SystemExit("pictures need matplotlib: pip install matplotlib") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    nan = float("nan")
    panels = (
        ("rank", "rank", lambda p: p["rank"], lambda m, p: m["x_copy"], "multiples of one large copy"),
        ("size", "billion weights", lambda p: p["elements"] / 1e9, lambda m, p: m["ms"], "milliseconds"),
        ("experts", "matrices of experts", lambda p: p["matrices"], lambda m, p: m["x_copy"],
         "multiples of one large copy"),
        ("size", "billion weights", lambda p: p["elements"] / 1e9, lambda m, p: m["extra_bytes"] / p["bytes"],
         "extra memory as a share of the weights"),
    )  # fmt: skip
    titles = ("Time and rank", "Time and size of the model", "Time and number of experts", "Extra memory at the peak")
    with plt.rc_context({"font.size": 9, "axes.titlesize": 10, "axes.titlelocation": "left"}):
        fig, axes = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
        for ax, title, (sweep, xlabel, x_of, y_of, ylabel) in zip(axes.flat, titles, panels, strict=True):
            points, lines = series(record, sweep)
            x = [x_of(p) for p in points]
            for name, figures in lines.items():
                colour, marker, label = STYLES[name]
                y = [nan if m is None else y_of(m, p) for m, p in zip(figures, points, strict=True)]
                ax.plot(x, y, marker=marker, color=colour, label=label, linewidth=1.6, markersize=5)
            if ylabel.startswith("extra"):
                ax.set_ylim(bottom=-0.02)
            else:
                unit = [1.0 if ylabel.startswith("mult") else p["copy_ms"] for p in points]
                ax.plot(x, unit, color="#d1242f", linestyle="--", label="limit: one large copy of the weights")
                limit = [u * p["products_ms"] / p["copy_ms"] for u, p in zip(unit, points, strict=True)]
                ax.plot(x, limit, color="#d1242f", linestyle=":", label="limit: the products")
                ax.set_yscale("log")
                lines_ms = [m["x_copy"] * u for p, u in zip(points, unit, strict=True) for m in p["methods"].values()]
                ax.set_ylim(bottom=0.4 * min(lines_ms + unit))  # the products may lie far below
            ax.set_xscale("log", base=2 if sweep != "size" else 10)
            ax.set_xticks(x, [f"{v:g}" if sweep != "size" else f"{v:.2g}" for v in x])
            ax.minorticks_off()
            held = points[0]["name"] if sweep == "rank" else f"rank {points[0]['rank']}"
            ax.set_title(f"{title} ({held})")
            ax.set_xlabel(xlabel)
            ax.set_ylabel(ylabel)
            ax.grid(color="#e6e8ec", linewidth=0.8)
            ax.spines[["top", "right"]].set_visible(False)
        handles, labels = axes[0][0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        heading = f"{record['device_name']}: weights in {record['dtype']}, adapters in {record['adapter_dtype']}"
        fig.suptitle(heading, x=0.01, ha="left", fontsize=11)
        file.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(file, dpi=130)
        plt.close(fig)


def table(record: dict[str, Any]) -> None:
    """A line a point: its limits, then the multiple of the copy and the share of extra memory of each method."""
    out = report.console()
    for p in record["points"]:
        out.print(
            f"{p['sweep']} {p['name']}, rank {p['rank']}: {p['bytes'] / 1e9:.3g} GB in {p['matrices']} matrices, copy "
            f"{p['copy_ms']:.2f} ms, products {p['products_ms']:.2f} ms"
        )
        for name, m in p["methods"].items():
            out.print(
                f"    {name:36} {m['ms']:9.2f} ms {m['x_copy']:7.2f} copies, extra {m['extra_bytes'] / p['bytes']:.3f}"
            )
        for name, reason in p["skipped"].items():
            out.print(f"    {name:36} left out, {reason}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="default %(default)s")
    parser.add_argument("--grid", choices=GRIDS, help="default: that of the device")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--dtype", choices=job.DTYPES, default="bf16", help="of the weights (default %(default)s)")
    parser.add_argument("--adapter-dtype", choices=job.DTYPES, default="bf16", help="default %(default)s")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="take the figures from here, measure nothing")
    add_arguments(parser, repeat=5)
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    args = parse()
    record = json.loads(args.draw.read_text()) if args.draw else run(args)
    table(record)
    report.save(record, args.json)
    if args.plot:
        draw(record, args.plot)
        report.console().print(f"picture: {args.plot}")


if __name__ == "__main__":
    main()
