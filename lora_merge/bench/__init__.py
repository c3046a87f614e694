"""How fast, in how much memory and how exactly adapters are merged on this machine: `lora-merge bench`, and what all
benchmarks measure with."""

from __future__ import annotations

from importlib.util import find_spec

from ..errors import MissingExtra

_NEEDED = ("peft", "transformers", "safetensors", "rich")


def check_extra(plot: bool) -> None:
    """Raise `MissingExtra` unless everything is installed that the main job takes.

    Args:
        plot: it draws a picture, too.
    """
    missing = [name for name in (*_NEEDED, *(("matplotlib",) if plot else ())) if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"bench takes {', '.join(missing)}: pip install 'lora-merge[bench]'")
