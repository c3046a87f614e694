"""The command line: `lora-merge`, or `python -m lora_merge`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="lora-merge", description="LoRA adapters into base weights, at copy speed.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "doctor", help="what runs here, why nothing faster, and what to do; exit status 1 if there is something to do"
    )
    parser.parse_args(arguments)

    from .doctor import examine

    found = examine()
    sys.stdout.write(f"{found}\n")
    return 1 if found.todo else 0
