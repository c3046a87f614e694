"""What the main job is told; without the libraries that it takes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from .shapes import SHAPES

NAMES = ("bf16", "fp16", "fp32")


def add_options(parser: argparse.ArgumentParser, work: Path) -> None:
    """Options of the main job, but for where its figures go.

    Args:
        work: folder for what it makes.
    """
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint in HF format; with --adapter")
    what.add_argument("--shape", choices=SHAPES, help="random weights of this model's linear layers")
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="a PEFT adapter of the --model")
    parser.add_argument("--rank", type=int, default=32, help="of an adapter that is made here (default %(default)s)")
    parser.add_argument("--dtype", choices=NAMES, default="bf16", help="of the weights (default %(default)s)")
    parser.add_argument("--adapter-dtype", choices=NAMES, default="fp32", help="default %(default)s, as PEFT's")
    parser.add_argument("--device", type=_device, default=torch.device("cpu"), help="default %(default)s")
    parser.add_argument("--work", type=Path, default=work, metavar="DIR", help="what is made lies there (%(default)s)")
    parser.add_argument("--repeat", type=int, default=9, help="timed runs (default %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures here, as PNG")


def _device(said: str) -> torch.device:
    try:
        return torch.device(said)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"expected cpu or cuda, got {said!r}") from None


def cache() -> Path:
    """Where a user's programs keep what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lora_merge"
