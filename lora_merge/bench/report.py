"""What a run shows: progress, a table, a picture, and where the figures come from."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import peft
import rich.progress
import torch
from rich import box
from rich.console import Console
from rich.table import Table

import lora_merge

Record = dict[str, Any]
"""The JSON of a run."""
LONGEST = 30
"""Copies that a bar of the picture can show."""
BLUE, GREY = "#1f6feb", "#aab2bf"


def is_ours(method: str) -> bool:
    """Return True if a method is this package's."""
    return method.startswith(("lora_merge", "merged()"))


def console() -> Console:
    """Return a console as wide as the terminal; wide enough for the table where the output goes to a file."""
    return Console(width=None if sys.stdout.isatty() else 110, highlight=False)


class Progress:
    """A bar on a terminal; elsewhere a line a step."""

    def __init__(self, steps: int, quiet: bool = False) -> None:
        self.console = Console(quiet=True) if quiet else console()
        self.bar = rich.progress.Progress(
            rich.progress.SpinnerColumn(),
            "{task.description}",
            rich.progress.BarColumn(),
            rich.progress.TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("", total=steps)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def say(self, text: str) -> None:
        """Tell what runs now."""
        self.bar.update(self.task, description=text)
        if self.bar.disable:
            self.console.print(text)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(text)

    def advance(self) -> None:
        """Count one of the steps as done."""
        self.bar.advance(self.task)


def provenance(device: torch.device) -> Record:
    """Return what the figures were made with."""
    root, commit = Path(__file__).resolve().parents[2], ""
    if (root / ".git").exists():  # not where a wheel lies in somebody's repository
        git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "threads": torch.get_num_threads(),
        "versions": {m.__name__: m.__version__ for m in (lora_merge, peft, torch)}
        | {"python": platform.python_version()},
        "commit": commit or None,
        # Records are kept: folders of the machine that made them tell nobody anything.
        "command": ["python", *(Path(part).name if Path(part).is_absolute() else part for part in sys.argv)],
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {torch.get_num_threads()} threads"


def title(record: Record) -> str:
    return (
        f"{record['shape']}: {record['matrices']} matrices, {record['bytes'] / 1e9:.3g} GB of {record['dtype']}, "
        f"rank {record['rank']} in {record['adapter_dtype']}"
    )


COLUMNS: dict[str, Callable[[Record], str]] = {
    "ms": lambda m: f"{m['ms']:.2f}",
    "back\nms": lambda m: "" if m["back_ms"] < 0.1 else f"{m['back_ms']:.2f}",
    "x copy": lambda m: "" if m["x_copy"] is None else f"{m['x_copy']:.2f}",
    "copy\nlimit": lambda m: "" if m["of_copy"] is None else f"{m['of_copy']:.0%}",
    "product\nlimit": lambda m: "" if m["of_products"] is None else f"{m['of_products']:.0%}",
    "extra\nMiB": lambda m: f"{m['extra_bytes'] / 2**20:.1f}",
    "host\nMiB": lambda m: f"{m['host_bytes'] / 2**20:.0f}" if m["host_bytes"] else "",
    "launch-\nes": lambda m: str(m["launches"]),
    "mis-\nrounded": lambda m: f"{m['misrounded']:.4%}",
    "error": lambda m: f"{m['x_rounding']:.4f}",
    "re-\nstored": lambda m: "yes" if m["restored"] else "no",
}
"""Heading -> one figure of a method, as text."""
MERGE = ("ms", "x copy", "copy\nlimit", "product\nlimit", "extra\nMiB", "error", "mis-\nrounded", "re-\nstored")
"""Columns that 80 characters hold."""
OF_LIMITS = ("x copy", "copy\nlimit", "product\nlimit")
"""Columns that compare with the machine's limits."""
LEGEND = {
    "ms": "milliseconds of one merge of all matrices; of merged() and what is called there and back, both ways",
    "back\nms": "milliseconds of the method's own way back",
    "x copy": "the same in large copies of as many bytes: 1 is as fast as a plain copy",
    "copy\nlimit": "share of the speed at which this machine copies; 100% is as fast as a plain copy",
    "product\nlimit": "share of the speed at which this machine multiplies large matrices",
    "extra\nMiB": "peak memory beside weights, adapters and a destination that was given",
    "host\nMiB": "memory of the host that a step takes while the weights are on a GPU",
    "launch-\nes": "kernels that one merge starts on a GPU; on a CPU, operators that it calls",
    "error": "size of the errors (RMS) against float64; 1.0000 is as exact as the dtype can be",
    "mis-\nrounded": "elements that are not the exact sum, rounded once",
    "re-\nstored": "whether the method's own way back brings back every bit of the base",
}
"""Heading -> what the column says."""
ROWS = {
    "lora_merge in place": "one Plan over all weights; back by subtraction",
    "lora_merge out of place": "one Plan into other tensors; the base is only read",
    "lora_merge into bf16": "the same, rounded to bf16 once",
    "merged() enter+exit": "the context manager, there and back",
    "peft": "PEFT's merge_adapter, and unmerge_adapter back",
    "addmm_": "torch.addmm_ for each matrix, adapters cut to the weights' dtype before",
}
"""Method of the main job -> what it does."""


def limited(record: Record) -> bool:
    """Return True if the job is large enough for the machine's limits to say something of it."""
    return all(m["x_copy"] is not None for m in record["methods"].values())


def sheet_of(title: str, first: str, columns: Sequence[str]) -> Table:
    """Return an empty table: a column of names, and columns of figures."""
    sheet = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
    )
    sheet.add_column(first, no_wrap=True)
    for heading in columns:
        sheet.add_column(heading, justify="right")
    return sheet


def table(record: Record, columns: Sequence[str] = MERGE) -> None:
    """Print the figures."""
    out = console()
    if not limited(record):
        columns = [heading for heading in columns if heading not in OF_LIMITS]
    sheet = sheet_of(title(record), "method", columns)
    copy_ms, products_ms = record["copy_ms"], record["products_ms"]
    if limited(record):
        for limit, ms in (("limit: one large copy", copy_ms), ("limit: the products", products_ms)):
            sheet.add_row(limit, *({"ms": f"{ms:.2f}", "x copy": f"{ms / copy_ms:.2f}"}.get(c, "") for c in columns))
    for name, m in record["methods"].items():
        sheet.add_row(name, *(COLUMNS[heading](m) for heading in columns))
    out.print()
    out.print(sheet)
    for name, reason in record["skipped"].items():
        out.print(f"{name}: left out, {reason}")
    which = "least" if record["device"] == "cpu" else "median"
    out.print(
        f"\n{record['device_name']}, torch {record['torch']}, backend {record['backend']}, {which} of up to "
        f"{record['repeat']} runs"
        + (
            f"; a copy moves {2 * record['bytes'] / copy_ms / 1e6:.1f} GB/s, products run at "
            f"{record['operations_s'] / 1e9:.0f} Gop/s"
            if limited(record)
            else f". A copy of {_bytes(record['bytes'])} stays in the cache, or is over before threads have begun: "
            "these times are mostly those of calls, and no limit is shown. Larger shapes have limits"
        )
    )
    told = {_flat(heading): LEGEND[heading] for heading in columns}
    told |= {name: ROWS[name] for name in record["methods"] if name in ROWS}
    width = max(map(len, told))
    out.print("", *(f"{name:<{width}}  {what}" for name, what in told.items()), sep="\n", soft_wrap=True)


def _flat(heading: str) -> str:
    """Return a heading in one line."""
    return heading.replace("-\n", "").replace("\n", " ")


def words_of(seconds: float) -> str:
    """Return a time that is not known better than by a half: "about 40 s", "about 3 minutes"."""
    if seconds < 90:
        return f"about {max(5, 5 * round(seconds / 5)):d} s"
    return f"about {max(2, round(seconds / 60)):d} minutes"


def _bytes(n: int) -> str:
    return f"{n / 2**20:.1f} MiB" if n < 2**30 else f"{n / 2**30:.2f} GiB"


def publish(
    record: Record, json_file: Path | None, plot_file: Path | None, columns: Sequence[str] = MERGE, quiet: bool = False
) -> None:
    """Print the figures, unless told not to; write and draw them where that was asked for."""
    if not quiet:
        table(record, columns)
    save(record, json_file)
    if plot_file:
        plot(record, plot_file)
        if not quiet:
            console().print(f"picture: {plot_file}")


def save(record: Record, file: Path | None) -> None:
    """Write figures, if a file was asked for."""
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=2) + "\n")


def plot(record: Record, file: Path) -> None:
    """Draw time, extra memory and wrong roundings of every method, side by side, as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figures = list(record["methods"].values())
    restored = ["restored bit for bit" if m["restored"] else "not restored exactly" for m in figures]
    copies = limited(record)
    cut = [copies and m["x_copy"] > LONGEST for m in figures]  # a bar that would dwarf all others is cut and says so
    panels = (
        (
            f"time in large copies of the same bytes\n(one is {record['copy_ms']:.2f} ms, dashed)",
            [min(m["x_copy"], LONGEST) for m in figures],
            [f"{m['x_copy']:.2f}x, {m['ms']:.1f} ms{' (cut)' * one}" for m, one in zip(figures, cut, strict=True)],
        )
        if copies
        else (
            "time in ms\n(too small a job to compare with a copy)",
            [m["ms"] for m in figures],
            [f"{m['ms']:.2f} ms" for m in figures],
        ),
        (
            "peak extra memory\nas a share of the weights",
            [m["extra_bytes"] / record["bytes"] for m in figures],
            [_bytes(m["extra_bytes"]) for m in figures],
        ),
        (
            "elements not correctly rounded,\nand the weights after the way back",
            [m["misrounded"] for m in figures],
            [f"{100 * m['misrounded']:.3g}%, {text}" for m, text in zip(figures, restored, strict=True)],
        ),
    )
    colours = [BLUE if is_ours(name) else GREY for name in record["methods"]]
    with plt.rc_context({"font.size": 10, "axes.titlesize": 10, "axes.titlelocation": "left"}):
        size = (14, 1.5 + len(figures) / 2)
        fig, axes = plt.subplots(1, 3, figsize=size, sharey=True, layout="constrained")
        heading = f"{title(record)}\n{record['device_name']}, torch {record['torch']}"
        fig.suptitle(heading, x=0.01, ha="left", fontsize=11)
        for ax, (caption, widths, labels) in zip(axes, panels, strict=True):
            drawn = ax.barh(list(record["methods"]), widths, color=colours, height=0.6)
            # The label of the longest bar needs room on the right.
            ax.set_xlim(0, max([*widths, 1e-4]) * 1.9)
            ax.xaxis.set_major_locator(mpl.ticker.MaxNLocator(5))
            for row, (width, label) in enumerate(zip(widths, labels, strict=True)):
                ax.annotate(label, (width, row), (5, 0), textcoords="offset points", va="center", fontsize=9)
            ax.set_title(caption)
            ax.spines[["top", "right", "left"]].set_visible(False)
            ax.tick_params(axis="y", length=0)
            ax.grid(axis="x", color="#e6e8ec", linewidth=0.8)
            ax.set_axisbelow(True)
            if ax is axes[0]:
                _mark_cuts(ax, [bar for bar, one in zip(drawn, cut, strict=True) if one])
        for ax in axes[1:]:
            ax.xaxis.set_major_formatter(mpl.ticker.PercentFormatter(1, decimals=None))
        if copies:
            axes[0].axvline(1, color="#d1242f", linewidth=1.5, linestyle=(0, (4, 2)))
        axes[0].invert_yaxis()
        file.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(file, dpi=150)
        plt.close(fig)


def _mark_cuts(ax: Any, bars: Sequence[Any]) -> None:
    """Draw a gap of two slanted lines through each bar that is longer than it is drawn."""
    for bar in bars:
        begin, low, high = 0.8 * bar.get_width(), bar.get_y() - 0.06, bar.get_y() + bar.get_height() + 0.06
        slant, gap = 0.03 * bar.get_width(), 0.025 * bar.get_width()
        ax.fill(
            [begin, begin + slant, begin + slant + gap, begin + gap], [high, low, low, high], color="white", zorder=3
        )
        for at in (begin, begin + gap):
            ax.plot([at, at + slant], [high, low], color="#57606a", linewidth=1, zorder=4)
