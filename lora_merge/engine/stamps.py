"""Detects that files were changed since they were read, by size and times, which every writer changes.

Not by inode: file systems over object stores give a file a new one at any time. The system alone sets the time of a
file's last change (`ctime`), so that a copy that keeps times (`cp -p`, `rsync -t`) shows, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TypeAlias


class Stamp(NamedTuple):
    """Size and times of a file.

    Args:
        written, changed: `mtime` and `ctime`, in ns.
    """

    nbytes: int
    written: int
    changed: int


Stamps: TypeAlias = Mapping[str, Stamp | None]
"""By path; None for a file that is not there."""


def stamp(file: str | Path | int) -> Stamp | None:
    """Return the stamp of a file, by path or descriptor; None where it is not there."""
    try:
        about = os.fstat(file) if isinstance(file, int) else Path(file).stat()
    except OSError:
        return None
    return Stamp(about.st_size, about.st_mtime_ns, about.st_ctime_ns)


def stamps(files: Iterable[str | Path]) -> dict[str, Stamp | None]:
    return {str(file): stamp(file) for file in files}


def difference(before: Stamps, now: Stamps) -> str:
    """Return in words how the first of the files differs, by name; "" where none does."""
    for path in sorted({*before, *now}):
        if differs := _difference(before.get(path), now.get(path)):
            return f"{path} {differs}"
    return ""


def _difference(before: Stamp | None, now: Stamp | None) -> str:
    if before == now:
        return ""
    if now is None:
        return "is gone"
    if before is None:
        return "is new"
    if before.nbytes != now.nbytes:
        return f"had {before.nbytes} bytes, and has {now.nbytes}"
    if before.written != now.written:
        return f"was written at {_time(before.written)}, and is of {_time(now.written)}"
    return f"was replaced, or got another name, link or owner, at {_time(now.changed)}"


def _time(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9, UTC).isoformat(sep=" ", timespec="milliseconds")
