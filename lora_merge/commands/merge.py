"""`lora-merge merge`."""

from __future__ import annotations

import argparse
import ctypes
import sys

import torch

from ..errors import InvalidInput
from .output import add_json, progress, tell

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of mallopt(3)."""
DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
}


def add(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("base", metavar="BASE", help="folder of the base model, or its name on the hub (owner/name)")
    parser.add_argument(
        "adapters", metavar="ADAPTER", nargs="+", help="folders that PEFT has saved, or names; several are summed"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder that is made")
    parser.add_argument("--each", action="store_true", help="DIR/<name> for each adapter instead of their sum")
    parser.add_argument(
        "--scale",
        action="append",
        default=[],
        metavar="NAME=FACTOR",
        help="factor of what an adapter adds; NAME is that of its folder; may come several times",
    )
    parser.add_argument("--device", default="cpu", help="on which is merged (default: cpu)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="dtype of the result; default: the base's")
    parser.add_argument(
        "--rounding",
        default="nearest",
        choices=("nearest", "stochastic"),
        help="rounding to that dtype; stochastic: --seed",
    )
    parser.add_argument("--seed", type=int, help="of stochastic rounding")
    parser.add_argument("--shard-size", metavar="SIZE", help="of a weight file, 5GB; default: the base's files")
    parser.add_argument("--force", action="store_true", help="replace what is in DIR")
    parser.add_argument("--verify", action="store_true", help="read everything back and compare checksums")
    add_json(parser)


def merge(options: argparse.Namespace) -> int:
    """Run it."""
    from ..saving import merge_checkpoint

    _give_back_memory()
    with progress("merging") as told:
        saved = merge_checkpoint(
            options.base,
            options.adapters,
            options.out,
            each=options.each,
            scales=_scales(options.scale),
            device=options.device,
            dtype=DTYPES[options.dtype] if options.dtype else None,
            rounding=options.rounding,
            seed=options.seed,
            shard_size=options.shard_size,
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


def _scales(said: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in said:
        name, _, factor = one.rpartition("=")
        try:
            found[name] = float(factor)
        except ValueError:
            raise InvalidInput(f"--scale must be NAME=FACTOR, like --scale style=0.7; got {one!r}") from None
        if not name:
            raise InvalidInput(f"--scale must be NAME=FACTOR, like --scale style=0.7; got {one!r}")
    return found
