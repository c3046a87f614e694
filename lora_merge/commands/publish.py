"""`lora-merge follow`, `status`, `rollback` and `pin`: engines and the store that they follow."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InvalidInput, LoraMergeError
from ..logs import shown, words_of
from .output import REFUSED, add_cache, add_json, add_pause, add_url, tell

if TYPE_CHECKING:
    from ..publish.status import StoreStatus


def add_follow(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    _add_store(parser)
    parser.add_argument(
        "--base",
        help="folder or hub name of the model that the server serves; only its configuration is read, and for DoRA its "
        "weights (default: what each version names)",
    )
    parser.add_argument("--name", help="name of the engine in the store (default: host and port of its URL)")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between two looks at the store (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="bring the engine to the newest version, and end")
    add_pause(parser)
    add_cache(parser)
    add_json(parser)


def add_status(parser: argparse.ArgumentParser) -> None:
    _add_store(parser)
    add_json(parser)


def add_rollback(parser: argparse.ArgumentParser) -> None:
    _add_store(parser)
    parser.add_argument("version", type=int, metavar="VERSION", help="number of a version that the store still has")
    add_json(parser)


def add_pin(parser: argparse.ArgumentParser) -> None:
    _add_store(parser)
    parser.add_argument("version", type=int, metavar="VERSION", help="number of a version that the store still has")
    parser.add_argument("--undo", action="store_true", help="keep it no longer than others")
    add_json(parser)


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="path or fsspec URL that a Publisher publishes into")
    parser.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="file with the key that versions are signed with (default: LORA_MERGE_STORE_KEY of the environment)",
    )


def _key(options: argparse.Namespace) -> bytes | None:
    if options.key_file is None:
        return None
    try:
        return bytes(options.key_file.read_bytes())
    except OSError as error:
        raise InvalidInput(f"--key-file {options.key_file} cannot be read: {error.strerror}") from error


@contextmanager
def _asking(options: argparse.Namespace) -> Iterator[None]:
    """Turn what a store's library raises into an error that says which store; bugs keep their trace."""
    try:
        yield
    except LoraMergeError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__module__ == "builtins":
            raise
        words = words_of(error, options.store)
        raise InvalidInput(f"{shown(options.store)} cannot be read, or not be written to ({words})") from error


def follow(options: argparse.Namespace) -> int:
    from ..publish.follower import Follower, to_stderr

    if options.interval <= 0:
        raise InvalidInput(f"--interval must be more than 0, got {options.interval}")
    with _asking(options):
        follower = Follower(
            options.url,
            options.store,
            base=options.base,
            key=_key(options),
            pause=options.pause,
            cache=options.cache,
            name=options.name,
            told=to_stderr,
        )
    if options.once:
        try:
            with _asking(options):
                report = follower.step()
        finally:
            follower.close()
        tell(options, f"{options.url} serves {follower.serves}", {"serves": follower.serves, "report": report})
        return 0
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    follower.run(stop, interval=options.interval)
    return 0


def status(options: argparse.Namespace) -> int:
    from ..publish.status import status as status_of
    from ..publish.store import Store

    with _asking(options):
        found = status_of(Store(options.store, _key(options)))
    tell(options, _words(found), found)
    return 0 if found.converged else REFUSED


def rollback(options: argparse.Namespace) -> int:
    from ..publish.publisher import rollback as roll_back
    from ..publish.store import Store

    with _asking(options):
        made = roll_back(Store(options.store, _key(options)), options.version)
    words = f"{made.name} is version {options.version} once more, and the newest"
    tell(options, words, {"version": made.version, "name": made.name, "copy_of": made.copy_of})
    return 0


def pin(options: argparse.Namespace) -> int:
    from ..publish.store import Store

    with _asking(options):
        Store(options.store, _key(options)).pin(options.version, not options.undo)
    kept = "is kept no longer than others" if options.undo else "is kept whatever comes after it"
    tell(options, f"version {options.version} {kept}", {"version": options.version, "pinned": not options.undo})
    return 0


def _words(found: StoreStatus) -> str:
    from ..publish.status import SILENT_S

    lines = [f"{found.url}: {len(found.versions)} versions" + (f" on {found.base}" if found.base else "")]
    if not found.versions:
        lines[0] += ": nothing was published here, or the address is another"
    for v in found.versions:
        marks = [*(["pinned"] if v.pinned else []), *([f"version {v.copy_of} once more"] if v.copy_of else [])]
        marks += [f"not served: {v.problem}"] if v.problem else []
        name = v.name or f"version {v.version}"
        lines.append("  ".join([f"  {name}", v.created, f"{v.nbytes / 1e6:.1f} MB", *marks]).rstrip())
    lines.append(f"{len(found.engines)} engines")
    for e in found.engines:
        marks = [] if e.newest else ["not the newest"]
        marks += [f"silent for {e.silent:.0f} s"] if e.silent > SILENT_S else []
        marks += [e.error] if e.error else []
        serves = e.serves or "what is not known"
        lines.append("  ".join([f"  {e.engine}", f"serves {serves}", f"since {e.since}", *marks]))
    return "\n".join(lines)
