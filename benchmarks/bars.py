"""Bars with their labels, for pictures that a phone shows whole: of each other, of a limit, of the parts of a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLUE, GREEN, GREY, RED, INK = "#1f6feb", "#1a7f37", "#aab2bf", "#d1242f", "#1f2328"
LIGHT = "#dfe3e8"


@dataclass(frozen=True)
class Bar:
    """One bar: its name on the left, its length, what stands at its end, and whether it is this package's."""

    name: str
    value: float
    label: str
    ours: bool = False


@contextmanager
def figure(file: Path, height: float) -> Iterator[Any]:
    """The axes of a picture that a phone shows whole, written to `file` at the end."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    file.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({"font.size": 12, "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK}):
        fig, ax = plt.subplots(figsize=(6.4, height), layout="constrained")
        ax.spines[["top", "right"]].set_visible(False)
        yield ax
        fig.savefig(file, dpi=150, facecolor="white")
        plt.close(fig)


@contextmanager
def panels(file: Path, title: str, count: int) -> Iterator[Any]:
    """The axes of several curves over the same steps, one below the other, as `figure`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    file.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({"font.size": 12, "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK}):
        fig, axes = plt.subplots(count, 1, figsize=(6.4, 2.4 * count), sharex=True, layout="constrained")
        fig.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        for ax in axes:
            ax.spines[["top", "right"]].set_visible(False)
        yield axes
        fig.savefig(file, dpi=150, facecolor="white")
        plt.close(fig)


def bars(
    file: Path,
    title: str,
    groups: Sequence[Sequence[Bar]],
    *,
    limit: tuple[float, str],
    start: float,
    end: float,
    log: bool = False,
    beyond: bool = False,
    note: str = "",
) -> None:
    """Groups of bars with their labels, and the limit as a dashed line; the axis has no numbers, the bars have.

    Args:
        file: PNG.
        title: of the picture.
        groups: of bars, from above.
        limit: where the line is, and what it is.
        start: of the axis.
        end: of the axis, with room for labels.
        log: whether the axis is logarithmic.
        beyond: whether labels of bars that do not reach the limit stand behind it.
        note: below, in small letters.
    """
    count = sum(map(len, groups)) + 0.6 * (len(groups) - 1)
    with figure(file, 1.3 + 0.42 * count + 0.24 * (note.count("\n") + bool(note))) as ax:
        place, ticks, names = 0.0, [], []
        for group in groups:
            for bar in group:
                ax.barh(place, bar.value - start, left=start, height=0.76, color=BLUE if bar.ours else GREY)
                weight = "bold" if bar.ours else "normal"
                spot = {"textcoords": "offset points", "xytext": (6, 0), "va": "center", "fontweight": weight}
                ax.annotate(bar.label, (max(bar.value, limit[0] if beyond else start), place), **spot)
                ticks.append(place)
                names.append(bar.name)
                place += 1
            place += 0.6
        if log:
            ax.set_xscale("log")
        ax.set_xlim(start, end)
        ax.set_ylim(place - 1.0, -1.35)
        ax.set_yticks(ticks, names)
        ax.set_xticks([])
        ax.minorticks_off()
        ax.tick_params(axis="y", length=0)
        ax.spines["bottom"].set_visible(False)
        ax.axvline(limit[0], color=RED, linewidth=1.6, linestyle=(0, (4, 2)), zorder=3)
        ax.annotate(
            limit[1], (limit[0], -1.0), textcoords="offset points", xytext=(5, 0), color=RED, va="center", fontsize=11
        )
        ax.figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        if note:
            ax.figure.supxlabel(note, x=0.01, ha="left", fontsize=10, color="#57606a")


def stacked(
    file: Path, title: str, rows: Sequence[tuple[Bar, Mapping[str, float]]], *, thin: str, unit: str, note: str = ""
) -> None:
    """A bar a row, made of its parts, which are labelled inside; the bar's own label stands at its end.

    Args:
        file: PNG.
        title: of the picture.
        rows: a bar, whose value is the sum, and its parts in order; each row has the same ones.
        thin: the part that is drawn in red, and too thin for a label inside.
        unit: of the values.
        note: below, in small letters.
    """
    fills = iter((GREY, LIGHT))
    colours = {name: RED if name == thin else next(fills) for name in rows[0][1]}
    longest = max(bar.value for bar, _ in rows)
    with figure(file, 1.2 + 0.62 * len(rows) + 0.24 * (note.count("\n") + bool(note))) as ax:
        for place, (bar, parts) in enumerate(rows):
            start = 0.0
            for name, value in parts.items():
                ax.barh(place, value, left=start, height=0.72, color=colours[name])
                if name != thin and value > 0.16 * longest:
                    text = f"{name}\n{value:.3g} {unit}"
                    ax.text(start + value / 2, place, text, ha="center", va="center", fontsize=10, linespacing=1.1)
                start += value
            spot = {"textcoords": "offset points", "xytext": (6, 0), "va": "center", "linespacing": 1.2}
            ax.annotate(bar.label, (start, place), fontweight="bold" if bar.ours else "normal", fontsize=11, **spot)
        ax.set_xlim(0, 1.55 * longest)
        ax.set_ylim(len(rows) - 0.5, -0.55)
        ax.set_yticks(range(len(rows)), [bar.name for bar, _ in rows])
        for tick, (bar, _) in zip(ax.get_yticklabels(), rows, strict=True):
            tick.set(color=BLUE if bar.ours else INK, fontweight="bold" if bar.ours else "normal")
        ax.set_xticks([])
        ax.tick_params(axis="y", length=0)
        ax.spines["bottom"].set_visible(False)
        ax.figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        if note:
            ax.figure.supxlabel(note, x=0.01, ha="left", fontsize=10, color="#57606a")
