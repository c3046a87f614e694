"""The command line: `lora-merge`, or `python -m lora_merge`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from .errors import LoraMergeError, PushFailed

if TYPE_CHECKING:
    from .engine.replica import SyncReport

REFUSED, DIRTY = 1, 3
"""Exit statuses: the engine is as before; it broke off half-way. (argparse takes 2.)"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.command == "doctor":
        return _doctor()
    return _pushed(options, _load if options.command == "load" else _unload)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lora-merge", description="LoRA adapters into base weights, at copy speed.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "doctor", help="what runs here, why nothing faster, and what to do; exit status 1 if there is something to do"
    )
    load = commands.add_parser(
        "load",
        help="serve an adapter folder from a running vllm serve, at base-model speed; one loaded before goes",
        epilog="Exit status 0: it is served; 1: refused, the server is as before; 3: it broke off half-way.",
    )
    unload = commands.add_parser(
        "unload",
        help="take the adapter off again: every bit is what the server was started with",
        epilog="Exit status 0: it is gone; 1: refused, the server is as before; 3: it broke off half-way.",
    )
    for command in (load, unload):
        command.add_argument(
            "url", metavar="URL", help="of the server, http://host:8000, started with VLLM_SERVER_DEV_MODE=1"
        )
    load.add_argument("adapter", metavar="ADAPTER", help="a folder that PEFT has saved: adapter_config.json, ...")
    load.add_argument("--base", help="folder or name of the adapter's base model; default: as adapter_config.json says")
    load.add_argument("--name", help="that the server tells with its answers; default: the folder's")
    load.add_argument("--device", default="cpu", help="on which the adapter is laid out for its way (default: cpu)")
    load.add_argument("--verify", action="store_true", help="compare checksums of what came")
    for command in (load, unload):
        command.add_argument(
            "--pause", default="keep", choices=("keep", "wait", "abort"), help="requests in flight (default: keep)"
        )
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _doctor() -> int:
    from .doctor import examine

    found = examine()
    sys.stdout.write(f"{found}\n")
    return REFUSED if found.todo else 0


def _load(options: argparse.Namespace) -> tuple[SyncReport, str]:
    from .serve import load_adapter

    report = load_adapter(
        options.url,
        options.adapter,
        base=options.base,
        name=options.name,
        device=options.device,
        pause=options.pause,
        verify=options.verify,
    )
    return report, f"{options.url} serves {options.name or options.adapter}"


def _unload(options: argparse.Namespace) -> tuple[SyncReport, str]:
    from .serve import unload_adapter

    return unload_adapter(options.url, pause=options.pause), f"{options.url} serves its base"


def _pushed(options: argparse.Namespace, push: Callable[[argparse.Namespace], tuple[SyncReport, str]]) -> int:
    """Load or unload, and say what happened."""
    try:
        report, told = push(options)
    except LoraMergeError as error:
        if options.json:
            sys.stdout.write(json.dumps({"error": str(error), "kind": type(error).__name__}) + "\n")
        else:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return DIRTY if isinstance(error, PushFailed) else REFUSED
    seconds = sum(report.seconds.values())
    if options.json:
        sys.stdout.write(json.dumps(asdict(report)) + "\n")
    else:
        still = seconds - report.seconds.get("check", 0.0)
        crossed = f"{report.nbytes / 1e6:.1f} MB, " if report.nbytes else ""
        sys.stdout.write(
            f"{told} ({report.mode}@{report.version}): {crossed}{seconds:.2f} s, {still:.2f} of which requests waited\n"
        )
    return 0
