"""The options of the main job, and the checks of numbers and devices on a command line; imports none of the extras."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from .shapes import SHAPES

NAMES = ("bf16", "fp16", "fp32")


def add_options(parser: argparse.ArgumentParser, work: Path) -> None:
    """Add the options of the main job, but for where its figures go.

    Args:
        work: folder for what it makes.
    """
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--model", type=Path, metavar="DIR", help="measure on this checkpoint in HF format; needs --adapter"
    )
    what.add_argument(
        "--shape",
        choices=SHAPES,
        metavar="NAME",
        help="measure on random weights of the sizes of this model's linear layers: "
        + ", ".join(SHAPES)
        + " (default, without --model: a Qwen2 of 128M parameters that is made here, with an adapter that is trained)",
    )
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="folder of a PEFT adapter for the --model")
    parser.add_argument(
        "--rank",
        type=positive,
        default=32,
        help="rank of the adapter, unless --adapter is given (default: %(default)s)",
    )
    parser.add_argument("--dtype", choices=NAMES, default="bf16", help="dtype of the weights (default: %(default)s)")
    parser.add_argument(
        "--adapter-dtype",
        choices=NAMES,
        default="fp32",
        help="dtype of lora_A and lora_B (default: %(default)s, which PEFT uses)",
    )
    parser.add_argument(
        "--device",
        type=device,
        default=torch.device("cpu"),
        help="device to measure: cpu or cuda (default: %(default)s)",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=work,
        metavar="DIR",
        help="folder for the model and adapter that are made here; later runs use them again (default: %(default)s)",
    )
    parser.add_argument(
        "--repeat", type=positive, default=9, help="number of timed runs of each method (default: %(default)s)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures into this PNG file")


def device(text: str) -> torch.device:
    """Return the device that an option names; raise `argparse.ArgumentTypeError` where it names none."""
    try:
        return torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"expected cpu or cuda, got {text!r}") from None


def positive(text: str) -> int:
    """Return the number that an option gives; raise `argparse.ArgumentTypeError` unless it is whole and 1 or more."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, got {text!r}")
    return number


def cache() -> Path:
    """Return where a user's programs keep what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lora_merge"
