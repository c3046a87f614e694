"""Pictures of how it works, for the documentation: a merge, a push, its ways, the states of an engine.

Text has 16 points of a width of 7.2 inches, so that a phone, which shows it all at a third of its size, can be read.

Drawn by `python benchmarks/pictures.py`, with the pictures of figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BLUE, LIGHT, GREY, RED, PINK, INK = "#1f6feb", "#dbe9ff", "#f0f2f5", "#d1242f", "#ffe3e3", "#1f2328"


@contextmanager
def canvas(file: Path, title: str, width: float, height: float) -> Iterator[Any]:
    """Axes in inches without a frame, as PNG at the end."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({"font.size": 16, "text.color": INK}):
        fig, ax = plt.subplots(figsize=(width, height + 0.5))
        fig.subplots_adjust(0, 0, 1, 1 - 0.5 / (height + 0.5))
        fig.suptitle(title, x=0.02, y=0.985, ha="left", va="top", fontsize=18, fontweight="bold")
        ax.set_xlim(0, width)
        ax.set_ylim(0, height)
        ax.axis("off")
        yield ax
        fig.savefig(file, dpi=150, facecolor="white")
        plt.close(fig)


def box(ax: Any, x: float, y: float, w: float, h: float, text: str, fill: str = GREY, **style: Any) -> None:
    """A rounded box with its text in the middle; (x, y) is the lower left corner."""
    from matplotlib.patches import FancyBboxPatch

    shape = FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0,rounding_size=0.08", facecolor=fill, edgecolor="none")
    ax.add_patch(shape)
    ax.text(x + w / 2, y + h / 2, text, ha="center", va="center", linespacing=1.35, **style)


def arrow(
    ax: Any, start: tuple[float, float], end: tuple[float, float], *, bend: float = 0.0, color: str = INK
) -> None:
    """An arrow between two points."""
    style = {"arrowstyle": "-|>", "color": color, "linewidth": 1.6, "shrinkA": 2, "shrinkB": 2, "mutation_scale": 14}
    ax.annotate("", xy=end, xytext=start, arrowprops=style | {"connectionstyle": f"arc3,rad={bend}"})


def row(ax: Any, y: float, height: float, cells: tuple[str, ...], fill: str, **style: Any) -> None:
    """Three boxes side by side, over the whole width."""
    for i, text in enumerate(cells):
        box(ax, 0.15 + 2.35 * i, y, 2.2, height, text, fill, **style)


def merge_diagram(file: Path) -> None:
    """One pass over the weights."""
    with canvas(file, "A merge is one pass over the weights", 7.2, 5.55) as ax:
        ax.text(0.15, 5.3, "each byte is read once:", va="center")
        row(ax, 4.05, 0.95, ("weight W\n[out, in]", "lora_A\n[r, in]", "lora_B\n[out, r]"), LIGHT)
        box(
            ax,
            0.15,
            2.2,
            6.9,
            1.2,
            "in float32:  W + scaling · lora_B @ lora_A\nrounded once",
            BLUE,
            color="white",
            fontweight="bold",
        )
        ax.text(0.15, 1.87, "each byte is written once, to one of:", va="center")
        row(ax, 0.15, 0.95, ("W itself\n(in place)", "a bucket\nthat is sent", "the engine's\nparameter"), GREY)
        for i in range(3):
            x = 1.25 + 2.35 * i
            arrow(ax, (x, 4.05), (x, 3.4))
            arrow(ax, (x, 1.65), (x, 1.1))


def push_diagram(file: Path) -> None:
    """The steps of a push, and what a failure in each of them means."""
    steps = (
        ("check", "names, shapes, dtypes, elements,\nagainst each worker"),
        ("pause", "requests are kept, waited for\nor aborted"),
        ("transfer", "merge and write, or buckets\nthat workers load"),
        ("finish", "layers processed; fingerprint\nand version are noted"),
        ("resume", "with empty caches; requests go on"),
    )
    with canvas(file, "A push: all is checked before a byte is written", 7.2, 6.65) as ax:
        box(ax, 0.05, 3.9, 7.1, 2.7, "")
        box(ax, 0.05, 0.05, 7.1, 3.75, "", PINK)
        for i, (name, what) in enumerate(steps):
            y = 5.85 - 0.95 * i - (1.0 if i > 1 else 0)
            ours = name in ("transfer", "finish")
            box(
                ax, 0.2, y, 1.75, 0.65, name, BLUE if ours else LIGHT, color="white" if ours else INK, fontweight="bold"
            )
            ax.text(2.2, y + 0.32, what, ha="left", va="center", linespacing=1.3)
            if i and i != 2:
                arrow(ax, (1.07, y + 0.95), (1.07, y + 0.65))
        arrow(ax, (0.35, 4.9), (0.35, 3.6))
        ax.text(0.65, 4.38, "fails here: PushRefused;\nthe engine is as before", va="center", fontweight="bold")
        ax.text(
            0.65,
            0.52,
            "fails here: PushFailed; the engine is dirty\nand serves nothing until the next push",
            va="center",
            color=RED,
            fontweight="bold",
        )


def state_diagram(file: Path) -> None:
    """What an engine can hold, and what changes it."""
    with canvas(file, "What an engine holds, as it says itself", 7.2, 6.6) as ax:
        box(ax, 2.35, 5.6, 2.5, 0.9, "nothing\n(as started)", LIGHT)
        box(ax, 0.05, 3.0, 7.1, 1.75, "")
        white: dict[str, Any] = {"color": "white", "fontweight": "bold"}
        box(ax, 0.25, 3.3, 1.95, 1.15, "merged@n", BLUE, **white)
        box(ax, 2.7, 3.3, 1.95, 1.15, "adapter@n\n+ its base", BLUE, **white)
        box(ax, 5.15, 3.3, 1.8, 1.15, "base@n", BLUE, **white)
        arrow(ax, (2.2, 4.1), (2.7, 4.1))
        arrow(ax, (2.7, 3.65), (2.2, 3.65))
        arrow(ax, (4.65, 3.87), (5.15, 3.87))
        arrow(ax, (3.6, 5.6), (3.6, 4.75))
        ax.text(3.8, 5.17, "push", va="center")
        box(ax, 2.35, 0.1, 2.5, 0.8, "dirty", PINK, color=RED, fontweight="bold")
        arrow(ax, (3.0, 3.0), (3.0, 0.9), color=RED)
        arrow(ax, (4.2, 0.9), (4.2, 3.0))
        ax.text(
            2.8,
            1.95,
            "a push fails\nhalf-way, weights\nare lost, or others\nwrite to them",
            color=RED,
            ha="right",
            va="center",
            linespacing=1.3,
        )
        ax.text(4.4, 1.95, "the next push\nheals it", va="center", linespacing=1.3)


WAYS = (
    ("write", "same host: the engine's memory is mapped", "trainer\nmerges", "merged\nweights", "engine's\nparameters"),
    ("pull", "same host: the trainer's memory is mapped", "trainer's\nweights", "worker\nreads", "engine\nmerges"),
    ("buckets", "elsewhere, and where nothing is mapped", "trainer\nmerges", "merged\nbuckets", "engine\nloads them"),
    ("engine merges", 'merge="engine": other hosts', "trainer's\nadapters", "lora_A,\nlora_B", "base here,\nmerges"),
)
"""How a push goes: its name, when, what the trainer does, what crosses, what the engine does."""


def ways_diagram(file: Path) -> None:
    """Where a push can go."""
    with canvas(file, "Where a push can go: four ways", 7.2, 7.6) as ax:
        for i, (name, when, here, crosses, there) in enumerate(WAYS):
            y = 5.75 - 1.9 * i
            ax.text(0.1, y + 1.6, name, va="center", fontweight="bold", color=BLUE)
            ax.text(0.1 + 0.155 * len(name) + 0.2, y + 1.6, when, va="center", fontsize=14)
            merges = [("merges" in here, here, 0.1), ("merges" in there, there, 5.1)]
            for ours, text, x in merges:
                style: dict[str, Any] = {"color": "white", "fontweight": "bold"} if ours else {}
                box(ax, x, y + 0.2, 2.0, 1.05, text, BLUE if ours else GREY, **style)
            arrow(ax, (2.1, y + 0.3), (5.1, y + 0.3))
            ax.text(3.6, y + 0.85, crosses, ha="center", va="center", linespacing=1.2)
