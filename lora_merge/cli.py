"""The command line: `lora-merge`, or `python -m lora_merge`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

from . import __version__
from .commands import DIRTY, REFUSED, bench, doctor, inspect, merge, serving
from .commands.output import Command, run

__all__ = ["DIRTY", "REFUSED", "main", "parser"]


class _Named(NamedTuple):
    add: Callable[[argparse.ArgumentParser], None]
    run: Command
    help: str
    epilog: str = "Exit status 0: done; 1: refused, and nothing was changed."


_SERVER = "Exit status 0: {}; 1: refused, the server is as before; 3: it broke off half-way."
COMMANDS = {
    "merge": _Named(
        merge.add,
        merge.merge,
        "merge adapters into a base on disk, and write the result as a checkpoint",
        "Exit status 0: it is written; 1: refused, and nothing is left there.",
    ),
    "inspect": _Named(
        inspect.add, inspect.inspect, "what an adapter is; with a BASE, how much it changes, and whether it fits"
    ),
    "load": _Named(
        serving.add_load,
        serving.load,
        "serve an adapter folder from a running vllm serve, at base-model speed; one loaded before goes",
        _SERVER.format("it is served"),
    ),
    "unload": _Named(
        serving.add_unload,
        serving.unload,
        "take the adapter off again: every bit is what the server was started with",
        _SERVER.format("it is gone"),
    ),
    "bench": _Named(bench.add, bench.bench, "time ways to merge on this machine: lora_merge, PEFT, addmm_"),
    "doctor": _Named(
        doctor.add,
        doctor.doctor,
        "what runs here, why nothing faster, and what to do",
        "Exit status 0: nothing to do; 1: there is something to do.",
    ),
}


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(prog="lora-merge", description="LoRA adapters into base weights, at copy speed.")
    parser.add_argument("--version", action="version", version=f"lora-merge {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        command.add(commands.add_parser(name, help=command.help, description=command.help, epilog=command.epilog))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = parser().parse_args(arguments)
    return run(COMMANDS[options.command].run, options)
