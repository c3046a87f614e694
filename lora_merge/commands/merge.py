"""`lora-merge merge`."""

from __future__ import annotations

import argparse
import ctypes
import sys
import warnings
from typing import get_args

import torch

from ..bench.options import device
from ..choices import DTYPES, Rounding, Tokenizer
from ..errors import InvalidInput
from .output import add_json, progress, tell

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of mallopt(3)."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", metavar="BASE", help="folder of the base model, or its name on the hub (owner/name)")
    parser.add_argument(
        "adapters",
        metavar="ADAPTER",
        nargs="+",
        help="folder that PEFT has saved, or its name on the hub; several are merged together, as their sum",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write the merged checkpoint into")
    parser.add_argument(
        "--each", action="store_true", help="write a checkpoint for each adapter, DIR/NAME, instead of their sum"
    )
    parser.add_argument(
        "--scale",
        action="append",
        default=[],
        metavar="NAME=FACTOR",
        help="multiply what one adapter adds by FACTOR; NAME is the name of its folder; give it once for each adapter",
    )
    parser.add_argument(
        "--device", type=device, default=torch.device("cpu"), help="device to merge on: cpu or cuda (default: cpu)"
    )
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), help="dtype of the merged weights (default: that of the base)"
    )
    parser.add_argument(
        "--rounding",
        default="nearest",
        choices=get_args(Rounding),
        help="how sums are rounded to that dtype; stochastic needs --seed (default: nearest)",
    )
    parser.add_argument("--seed", type=int, help="seed of stochastic rounding, a whole number")
    parser.add_argument(
        "--max-shard-size",
        "--shard-size",  # its older name
        type=_size,
        metavar="SIZE",
        help="largest size of one weight file, such as 5GB or 500MiB (default: the same files as the base)",
    )
    parser.add_argument(
        "--tokenizer",
        choices=get_args(Tokenizer),
        help="whose tokenizer, chat template and processor go along (default: the adapter's where it has one that "
        "differs from the base's, and a note says in what)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse an adapter that, by what it says of its base, was trained on another one (default: a note)",
    )
    parser.add_argument("--force", action="store_true", help="replace everything that is in DIR")
    parser.add_argument("--verify", action="store_true", help="read the result back from disk and compare checksums")
    add_json(parser)


def merge(options: argparse.Namespace) -> int:
    from ..saving import merge_checkpoint
    from ..saving.origin import DoubtfulBase

    _give_back_memory()
    with progress("merging") as told, warnings.catch_warnings():
        warnings.simplefilter("ignore", DoubtfulBase)  # a note says it below
        saved = merge_checkpoint(
            options.base,
            options.adapters,
            options.out,
            each=options.each,
            scales=_scales(options.scale),
            device=options.device,
            dtype=options.dtype,
            rounding=options.rounding,
            seed=options.seed,
            max_shard_size=options.max_shard_size,
            tokenizer=options.tokenizer,
            strict=options.strict,
            force=options.force,
            verify=options.verify,
            progress=told,
        )
    for note in (note for one in saved for note in one.notes):
        sys.stderr.write(f"note: {note}\n")
    tell(options, "\n".join(map(str, saved)), {"outputs": saved})
    return 0


def _give_back_memory() -> None:
    """Let glibc give large tensors' memory back as they go. By itself it keeps some of it in a heap that grows with
    what comes and goes: some 700 MB were seen where PEFT reads a DoRA adapter onto a base of 400 MB."""
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)


def _size(said: str) -> int:
    from ..saving.writer import size_of

    try:
        return size_of(said)
    except InvalidInput as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _scales(said: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in said:
        name, _, factor = one.rpartition("=")
        try:
            found[name] = float(factor if name else "")
        except ValueError:
            raise InvalidInput(f"--scale must be NAME=FACTOR, like --scale style=0.7; got {one!r}") from None
    return found
