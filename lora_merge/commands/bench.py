"""`lora-merge bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ..bench import check_extra
from ..bench.options import add_options, cache
from ..errors import InvalidInput
from ..extras import needed
from .output import add_json, tell


def add(parser: argparse.ArgumentParser) -> None:
    add_options(parser, cache())
    parser.add_argument(
        "--save", type=Path, metavar="FILE", dest="json_file", help="write all figures into this file, as JSON"
    )
    add_json(parser)


def bench(options: argparse.Namespace) -> int:
    if (options.model is None) != (options.adapter is None):
        raise InvalidInput("--model and --adapter come together: give both, or neither")
    if options.device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("--device cuda: torch sees no GPU here; lora-merge doctor says more")
    check_extra(options.plot is not None)
    with needed("bench takes PEFT and transformers", "'lora-merge[bench]'", "peft", "transformers"):
        from ..bench.job import run

    record = run(options, quiet=options.json)
    if options.json:
        tell(options, "", record)
    return 0
