"""`lora-merge inspect`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .output import REFUSED, add_json, tell

_MANY = 12
if TYPE_CHECKING:
    from ..saving.inspect import Inspected


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "adapter", metavar="ADAPTER", help="folder that PEFT has saved, or its name on the hub (owner/name)"
    )
    parser.add_argument(
        "base",
        metavar="BASE",
        nargs="?",
        help="folder or hub name of its base model, to see whether the adapter fits and how much it changes",
    )
    add_json(parser)


def inspect(options: argparse.Namespace) -> int:
    from ..saving.inspect import inspect_adapter

    found = inspect_adapter(options.adapter, options.base)
    tell(options, _words(found), found)
    return REFUSED if found.problems else 0


def _words(found: Inspected) -> str:
    ranks = f"{found.ranks[0]} to {found.ranks[-1]}" if len(found.ranks) > 1 else str(found.rank)
    targets = ", ".join(_targets(found.targets)) if isinstance(found.targets, list) else str(found.targets)
    rows = [
        ("adapter", f"{found.folder}, {found.kind}"),
        ("trained on", found.trained_on or "it does not say"),
        ("rank, alpha", f"{ranks}, {found.alpha:g}"),
        ("targets", f"{targets} ({len(found.modules)} modules)"),
        ("size", f"{found.parameters:,} parameters, {found.nbytes / 1e6:.1f} MB, {', '.join(found.dtypes)}"),
        *((key, str(value)) for key, value in found.options.items()),
    ]
    if found.whole:
        rows.append(("whole", f"{len(found.whole)} tensors, {found.whole[0]} for one"))
    rows += [("replaces", f"{many} rows of {name}") for name, many in found.replaced.items()]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    if found.base is not None and not found.problems:
        lines += ["", f"it fits {found.base} ({found.dtype}):", *_table(found)]
    lines += [line for note in found.notes for line in ("", f"note: {note}")]
    if found.problems:
        lines += ["", f"it does not fit {found.base}:", *(f"  {problem}" for problem in found.problems)]
    return "\n".join(lines)


def _targets(names: list[str]) -> list[str]:
    """Shorten targets: PEFT saves "all-linear" as the name of each module; of many, the last parts of their names."""
    return sorted(names if len(names) <= _MANY else {name.rpartition(".")[2] for name in names})


def _table(found: Inspected) -> list[str]:
    """Return the updates, a line each. Of `update / weight` Frobenius norms are meant."""
    head = ("parameter", "shape", "update / weight", f"lost by rounding to {found.dtype}")
    rows = [
        (one.name, " x ".join(map(str, one.shape)), f"{one.relative:.3g}", f"{one.loss:.2%}") for one in found.updates
    ]
    weight = sum(one.weight**2 for one in found.updates) ** 0.5
    update = sum(one.update**2 for one in found.updates) ** 0.5
    lost = sum((one.loss * one.update) ** 2 for one in found.updates) ** 0.5
    together = f"{update / weight:.3g}" if weight else ""
    rows.append((f"all {len(found.updates)}", "", together, f"{lost / update:.2%}" if update else ""))
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(4)]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]
