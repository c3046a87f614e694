"""Pictures of how it works, for the documentation: a merge, a push, the states of an engine.

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

    with plt.rc_context({"font.size": 11, "text.color": INK}):
        fig, ax = plt.subplots(figsize=(width, height + 0.4))
        fig.subplots_adjust(0, 0, 1, 1 - 0.4 / (height + 0.4))
        fig.suptitle(title, x=0.02, y=0.985, ha="left", va="top", fontsize=13, fontweight="bold")
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


def merge_diagram(file: Path) -> None:
    """One pass over the weights."""
    with canvas(file, "A merge is one pass over the weights", 7.2, 3.3) as ax:
        box(ax, 0.15, 1.9, 1.75, 1.0, "weight W\n[out, in]\neach byte read once")
        box(ax, 0.15, 0.95, 1.75, 0.6, "lora_A  [r, in]", LIGHT)
        box(ax, 0.15, 0.15, 1.75, 0.6, "lora_B  [out, r]", LIGHT)
        box(ax, 2.55, 0.7, 2.0, 1.9, "in float32:\nW + scaling ·\nlora_B @ lora_A\n\nrounded once", BLUE, color="white")
        for y in (2.4, 1.25, 0.45):
            arrow(ax, (1.9, y), (2.55, 1.65 + (y - 1.65) * 0.6))
        for y, text in (
            (2.35, "W itself\n(in place)"),
            (1.25, "a bucket that\nis sent"),
            (0.15, "the engine's\nparameter"),
        ):
            box(ax, 5.2, y, 1.85, 0.8, text)
            arrow(ax, (4.55, 1.65 + (y - 1.25) * 0.5), (5.2, y + 0.4))
        ax.text(5.2, 3.2, "each byte written once, to:", va="bottom", fontsize=10)


def push_diagram(file: Path) -> None:
    """The steps of a push, and what a failure in each of them means."""
    steps = (
        ("check", "every name, shape,\ndtype and element\nagainst each worker"),
        ("pause", "requests are kept,\nwaited for or\naborted"),
        ("transfer", "merge and write,\nor buckets that\nworkers load"),
        ("finish", "layers processed,\nfingerprint and\nversion noted"),
        ("resume", "caches are new,\nrequests go on"),
    )
    with canvas(file, "A push: nothing is written before all of it has been checked", 7.2, 2.55) as ax:
        for i, (name, what) in enumerate(steps):
            x = 0.15 + 1.4 * i
            ours = name in ("transfer", "finish")
            box(ax, x, 1.85, 1.2, 0.6, name, BLUE if ours else LIGHT, color="white" if ours else INK, fontweight="bold")
            ax.text(x + 0.6, 1.72, what, ha="center", va="top", fontsize=9.5, linespacing=1.35)
            if i:
                arrow(ax, (x - 0.2, 2.15), (x, 2.15))
        box(ax, 0.15, 0.2, 2.6, 0.7, "fails here: PushRefused,\nthe engine is as before", GREY, fontsize=10)
        box(
            ax,
            2.95,
            0.2,
            4.1,
            0.7,
            "fails here: PushFailed, the engine is dirty and\nserves nothing until the next push heals it",
            PINK,
            fontsize=10,
        )


def state_diagram(file: Path) -> None:
    """What an engine can hold, and what changes it."""
    small: dict[str, Any] = {"fontsize": 9.5, "va": "center", "ha": "center", "linespacing": 1.35}
    with canvas(file, "What an engine holds, as it says itself", 7.2, 3.6) as ax:
        box(ax, 2.15, 0.1, 2.35, 3.35, "")
        box(ax, 0.1, 1.35, 1.2, 0.8, "nothing\n(as started)")
        box(ax, 2.4, 2.5, 1.85, 0.75, "merged@n", BLUE, color="white", fontweight="bold")
        box(ax, 2.4, 1.35, 1.85, 0.8, "adapter@n\nbeside its base", BLUE, color="white", fontweight="bold")
        box(ax, 2.4, 0.3, 1.85, 0.7, "base@n", BLUE, color="white", fontweight="bold")
        box(ax, 6.0, 1.35, 1.1, 0.8, "dirty", PINK, color=RED, fontweight="bold")
        arrow(ax, (1.3, 1.75), (2.15, 1.75))
        ax.text(1.72, 1.92, "push", **small)
        arrow(ax, (3.15, 2.5), (3.15, 2.15))
        arrow(ax, (3.5, 2.15), (3.5, 2.5))
        arrow(ax, (3.32, 1.35), (3.32, 1.0))
        arrow(ax, (4.5, 2.05), (6.0, 2.05), color=RED)
        ax.text(
            5.25, 2.55, "a push fails half-way,\nthe weights are lost, or\nothers write to them", color=RED, **small
        )
        arrow(ax, (6.0, 1.45), (4.5, 1.45))
        ax.text(5.25, 1.05, "the next push\nheals it", **small)
