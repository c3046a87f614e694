"""How fast, in how much memory and how exactly LoRA adapters are merged: lora_merge beside PEFT and torch.addmm_.

This is `lora-merge bench` (lora_merge/bench/job.py), with benchmarks/work for what it makes.

    python benchmarks/merge.py
    python benchmarks/merge.py --shape qwen2.5-7b --device cuda --json out.json --plot out.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lora_merge import InvalidInput
from lora_merge.bench import job
from lora_merge.bench.options import add_options

WORK = Path(__file__).resolve().parent / "work"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, WORK)
    parser.add_argument("--json", type=Path, metavar="FILE", dest="json_file", help="write all figures here")
    args = parser.parse_args()
    if (args.model is None) != (args.adapter is None):
        parser.error("--model and --adapter come together")
    try:
        job.run(args)
    except InvalidInput as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
