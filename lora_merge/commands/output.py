"""What all commands share: exit statuses, results in words or as JSON, a progress bar."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch

from ..choices import Cache, Pause
from ..errors import LoraMergeError, PushFailed

REFUSED, DIRTY, INTERRUPTED = 1, 3, 130
"""Exit statuses: nothing was changed; an engine is dirty, as a push broke off; Ctrl-C. (argparse takes 2.)"""
Command = Callable[[argparse.Namespace], int]


def add_url(parser: argparse.ArgumentParser) -> None:
    """Add the argument of commands that reach a server."""
    parser.add_argument(
        "url",
        metavar="URL",
        help="URL of a vllm serve that was started with VLLM_SERVER_DEV_MODE=1, such as http://localhost:8000",
    )


def add_pause(parser: argparse.ArgumentParser) -> None:
    """Add the option `--pause`."""
    parser.add_argument(
        "--pause",
        default="keep",
        choices=get_args(Pause),
        help="requests in flight go on with the new weights, finish first, or are aborted (default: keep)",
    )


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Add the option `--cache`."""
    parser.add_argument(
        "--cache",
        default="reset",
        choices=get_args(Cache),
        help="the KV cache of requests in flight is dropped and computed again, or kept as the old weights have "
        "computed it (default: reset)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option that every command has."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text, also for an error")


def tell(options: argparse.Namespace, words: str, result: Any) -> None:
    """Print a result on standard output, in the form that was asked for."""
    sys.stdout.write((json.dumps(plain(result)) if options.json else words) + "\n")


def plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path | torch.device) else value


def run(command: Command, options: argparse.Namespace) -> int:
    """Run a command; what this package raises on purpose is said without a trace."""
    try:
        return command(options)
    except LoraMergeError as error:
        _tell_error(options, error)
        if not options.json:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return DIRTY if isinstance(error, PushFailed) else REFUSED
    except KeyboardInterrupt:
        _tell_error(options, KeyboardInterrupt("interrupted"))
        sys.stderr.write("interrupted; nothing is left of what was being written\n")
        return INTERRUPTED
    except Exception as error:  # a bug, whose trace says where
        _tell_error(options, error)
        raise


def _tell_error(options: argparse.Namespace, error: BaseException) -> None:
    if options.json:
        sys.stdout.write(json.dumps({"error": str(error), "kind": type(error).__name__}) + "\n")
        sys.stdout.flush()


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar with bytes and time left, where standard error is a terminal and rich is installed."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        from rich import progress as rich
        from rich.console import Console
    except ImportError:  # no bar is no reason to stop
        yield None
        return
    bar = rich.Progress(
        "{task.description}",
        rich.BarColumn(),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
