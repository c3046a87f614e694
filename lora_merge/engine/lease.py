"""The trainer's half of a lease: what a push says of its process, so that workers can tell whether it still lives."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from .transport.liveness import born, host_id

SILENT_S = 60.0
"""Seconds without a call after which workers take a trainer on another host, which they cannot look up, for dead."""

_under_way: set[str] = set()
"""Trainers of this process that are in a push."""
os.register_at_fork(after_in_child=_under_way.clear)


_born = cache(born)
os.register_at_fork(after_in_child=_born.cache_clear)  # the number may be another process's there


@contextmanager
def under_way(owner: str) -> Iterator[None]:
    """Note that a push of this trainer goes on in this process while the block runs."""
    _under_way.add(owner)
    try:
        yield
    finally:
        _under_way.discard(owner)


def lease_of(owner: str, push: str) -> dict[str, Any]:
    """Return the arguments of `Lease.take` for a push of this process."""
    pid = os.getpid()
    return {
        "owner": owner,
        "host": host_id(),
        "pid": pid,
        "born": _born(pid),
        "push": push,
        "at": time.monotonic_ns(),
        "living": sorted(_under_way),
    }
