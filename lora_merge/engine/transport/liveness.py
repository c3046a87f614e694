"""Waiting for another process, and giving up when that has died."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

SHARED = Path("/dev/shm")
CHECK_S = 0.02
"""Seconds between two checks whether the other side is still there."""
SPIN_S = 2e-3
"""Seconds of waiting without sleep: longer than a hand-over between processes of one GPU takes. The shortest sleep,
whose timer is 50 us late, would be a tenth of that."""


class TransferAborted(RuntimeError):
    """The other side ended a transfer before it was complete."""


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def wait_until(ready: Callable[[], bool], check: Callable[[], None]) -> None:
    """Wait until `ready` returns True: asked all the time at first, then every 0.2 ms. Call `check`, which may raise,
    every `CHECK_S`."""
    began = now = time.monotonic()
    due = began + CHECK_S
    while not ready():
        if now > due:
            check()
            due = now + CHECK_S
        time.sleep(0 if now - began < SPIN_S else 2e-4)
        now = time.monotonic()


def alive(pid: int, born: int = 0) -> bool:
    """Return True if a process of this host runs; a zombie does not.

    Args:
        born: its `born`, as another process may have been given its number since; 0 for any.
    """
    stat = _stat(pid)
    return bool(stat) and stat[0] not in "ZX" and born in (0, int(stat[_BORN]))


def born(pid: int) -> int:
    """Return when a process of this host began, in ticks since the host did; 0 if there is none."""
    stat = _stat(pid)
    return int(stat[_BORN]) if stat else 0


_BORN = 19
"""Where `_stat` has the time at which a process began."""


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; none if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


@cache
def process_id() -> str:
    """Return a string that no other process has, on this host or another one, now or later."""
    return f"{os.getpid()} of {socket.gethostname()}, {secrets.token_hex(8)}"


@cache
def host_id() -> str:
    """Return a string that is equal for processes that can share memory and look each other up by process id."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    mounts = SHARED.stat().st_dev if SHARED.exists() else 0
    processes = Path("/proc/self/ns/pid")
    names = [socket.gethostname(), boot.read_text().strip() if boot.exists() else "", str(mounts)]
    return "/".join([*names, str(processes.readlink()) if processes.exists() else ""])


os.register_at_fork(after_in_child=process_id.cache_clear)
os.register_at_fork(after_in_child=host_id.cache_clear)  # it may have other processes in sight
