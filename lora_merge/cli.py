"""The command line: `lora-merge`, or `python -m lora_merge`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

from . import __version__
from .commands import DIRTY, REFUSED, bench, doctor, inspect, merge, plan, publish, serving
from .commands.output import Command, run

__all__ = ["DIRTY", "REFUSED", "main", "parser"]


class _Named(NamedTuple):
    add: Callable[[argparse.ArgumentParser], None]
    run: Command
    help: str
    epilog: str = "Exit status 0: done; 1: refused, and nothing was changed."


_SERVER = (
    "Exit status 0: {}; 1: refused, and the server is as before; 3: it broke off half-way, and the server is paused."
)
COMMANDS = {
    "merge": _Named(
        merge.add,
        merge.merge,
        "merge adapters into a base on disk, and write the result as a checkpoint",
        "Exit status 0: the checkpoint is written; 1: refused, and nothing is left in DIR.",
    ),
    "inspect": _Named(
        inspect.add,
        inspect.inspect,
        "print what an adapter is; with a BASE, whether it fits and how much it changes each weight",
    ),
    "load": _Named(
        serving.add_load,
        serving.load,
        "merge an adapter into a running vllm serve, in place of one that was loaded before",
        _SERVER.format("the adapter is served"),
    ),
    "unload": _Named(
        serving.add_unload,
        serving.unload,
        "take the adapter out again: bit for bit, the weights are those that the server was started with",
        _SERVER.format("the base is served"),
    ),
    "follow": _Named(
        publish.add_follow,
        publish.follow,
        "keep a running vllm serve at the newest version of a store that a Publisher publishes into",
        "Exit status 0: interrupted, or with --once, the newest version is served; 1: refused, and the "
        "server is as before; 3: it broke off half-way, and the server is paused.",
    ),
    "status": _Named(
        publish.add_status,
        publish.status,
        "show the versions of a store, and which engine serves which of them",
        "Exit status 0: every engine that was heard of in the last minute serves the newest version; 1: some do not.",
    ),
    "rollback": _Named(
        publish.add_rollback,
        publish.rollback,
        "publish a kept version of a store once more, as the newest: engines then serve it, bit for bit",
    ),
    "pin": _Named(publish.add_pin, publish.pin, "keep a version of a store whatever comes after it"),
    "bench": _Named(
        bench.add,
        bench.bench,
        "measure merging on this machine: time, memory and exactness of lora_merge, PEFT and torch.addmm_",
    ),
    "plan": _Named(
        plan.add,
        plan.plan,
        "print how much GPU memory a trainer and an engine take, from a model's configuration alone",
        "Exit status 0: done; 1: refused, or it does not fit into --memory.",
    ),
    "doctor": _Named(
        doctor.add,
        doctor.doctor,
        "print which kernels run on this machine, why no faster ones do, and how to change that",
        "Exit status 0: nothing to change; 1: something can be changed, and the output says what.",
    ),
}


def parser() -> argparse.ArgumentParser:
    """Return all commands and their options."""
    parser = argparse.ArgumentParser(
        prog="lora-merge", description="Merge LoRA adapters into base weights: on disk, and in running servers."
    )
    parser.add_argument("--version", action="version", version=f"lora-merge {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        command.add(commands.add_parser(name, help=command.help, description=command.help, epilog=command.epilog))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = parser().parse_args(arguments)
    return run(COMMANDS[options.command].run, options)
