"""Folders that are removed by whoever comes next where their process was killed: it holds a lock while it lives."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows: leftovers stay
    fcntl = None  # type: ignore[assignment]

LOCK = ".lora-merge-lock"
_PREFIX = "lora_merge-"


class Scratch:
    """A folder for copies on this machine. What killed processes of this user have left of theirs is removed first.

    Attributes:
        path: of the folder; it is removed with this object, at the latest.
    """

    def __init__(self) -> None:
        remove_leftovers(filter(_is_mine, Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.close = weakref.finalize(self, _remove, self.path, locked(self.path))


def _remove(folder: Path, lock: IO[bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()


def _is_mine(path: Path) -> bool:
    """Return True for a folder of this user: others may make some here, too, with links in them."""
    with suppress(OSError):  # it was removed
        return path.lstat().st_uid == getattr(os, "geteuid", int)() and not path.is_symlink()
    return False


def remove_leftovers(folders: Iterable[Path]) -> None:
    """Remove those of some folders whose locks are free: they have been left by processes that were killed."""
    if fcntl is None:
        return
    for path in folders:
        with suppress(OSError):
            if not (path / LOCK).is_file():
                continue
            with (path / LOCK).open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)


def locked(folder: Path) -> IO[bytes]:
    """Hold the lock of a folder from the moment on at which it is there."""
    made = folder / f"{LOCK}-made"
    opened = made.open("wb")
    if fcntl is not None:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    made.rename(folder / LOCK)
    return opened
