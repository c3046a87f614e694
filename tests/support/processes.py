"""Tests over several real processes that talk over gloo."""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import warm

# Read as a Python starts: a rank, or an engine's process, that crashes while it imports says where, too.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")

TIMEOUT = timedelta(minutes=5)
"""A rank that waits for nobody fails after this: before pytest's own limit, but no sooner than has to be. Ranks whose
machine is busy may begin, and compute, far apart; and when one fails, `spawn` ends the others at once."""


def shared() -> set[Path]:
    """Files of this package in shared memory."""
    return set(Path("/dev/shm").glob("lora_merge-*"))


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Nothing of ours stays in shared memory. Another program's of this machine may be there: from before, or for the
    moment in which it connects."""
    before = shared()
    yield
    end = time.monotonic() + TIMEOUT.total_seconds()
    while shared() - before and time.monotonic() < end:
        time.sleep(0.1)
    assert not shared() - before


def spawn(
    world: int, work: Callable[..., None], *args: Any, backend: str = "gloo", timeout: timedelta = TIMEOUT
) -> None:
    """Run `work(rank, *args)` on `world` ranks; the first failure is raised here, with its rank's traceback.

    With a backend that has NCCL in it, each rank has the GPU of its number."""
    with tempfile.TemporaryDirectory() as folder:  # a port could be another's by the time rank 0 listens on it
        # A process imports all by itself where there is a GPU, and where LORA_MERGE=1 is to switch its trainer over.
        method = "spawn" if torch.cuda.is_available() or "LORA_MERGE" in os.environ else warm.METHOD
        arguments = (world, f"{folder}/store", work, args, backend, timeout)
        mp.start_processes(_main, arguments, nprocs=world, join=True, start_method=method)


def _main(
    rank: int,
    world: int,
    store: str,
    work: Callable[..., None],
    args: tuple[Any, ...],
    backend: str,
    timeout: timedelta,
) -> None:
    # Anew: what vLLM imports (tvm_ffi) puts a handler of its own in the place of Python's, and `enable` alone does
    # nothing where it was called before.
    faulthandler.disable()
    faulthandler.enable()
    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    try:
        work(rank, *args)
        dist.barrier()
    except BaseException:
        # The group stays: the others, which fail when it closes, would be heard first.
        traceback.print_exc()
        raise
    dist.destroy_process_group()
    # A mesh that torch caches (fully_shard) keeps gloo's threads alive after this, while the interpreter is taken down.
    # One rank in CI ended in "terminate called without an active exception", which nothing else here explains. All that
    # a test checks has been checked: the process ends here. A crash before this shows its Python stack.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def until(what: Callable[[], Any], seconds: float = 60) -> None:
    """Wait for something, and fail after some seconds."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.1)
