"""Processes that stay: each case joins some of them anew. Starting them is the slow part (megatron-core)."""

from __future__ import annotations

import importlib
import io
import multiprocessing as mp
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=60)
"""A rank that waits for nobody fails after this."""


class Pool:
    """Workers that are replaced if one of them hangs or dies.

    Args:
        size: the most ranks that a case has.
        backend: of torch.distributed. With NCCL in it, each rank has the GPU of its number.
        method: how workers start: "forkserver", out of a server that has imported torch and megatron-core once;
            "spawn", each for itself, as GPUs want it.
    """

    def __init__(self, size: int, backend: str = "gloo", method: str = "forkserver") -> None:
        self._size, self._backend, self._method = size, backend, method
        self._workers: list[Any] = []
        self._pipes: list[Any] = []

    def run(self, world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """`fn(*args)` on each of `world` ranks; what each returned, by rank. A rank's failure is raised here.

        The answers come through memory, so tensors in them are copies of what the rank had when it answered.
        """
        if not self._workers:
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            for rank, pipe in enumerate(self._pipes[:world]):
                pipe.send((self._backend, rank, world, f"{folder}/store", fn, args))
            try:
                for rank, pipe in enumerate(self._pipes[:world]):
                    assert pipe.poll(2 * PATIENCE.seconds), f"rank {rank} of {world} does not answer"
                answers = [pipe.recv() for pipe in self._pipes[:world]]
            except BaseException:
                self.close()
                raise
        failed = [f"rank {rank} of {world}:\n{value}" for rank, (ok, value) in enumerate(answers) if not ok]
        # A rank that fails breaks its peers' connections: the error that started it is the one without that.
        assert not failed, min(failed, key=lambda text: "gloo" in text or "NCCL" in text)
        return [torch.load(io.BytesIO(value), weights_only=False, map_location="cpu") for _, value in answers]

    def _start(self) -> None:
        context: Any = mp.get_context(self._method)
        forked = self._method == "forkserver"
        if forked:
            context.set_forkserver_preload(["megatron_preload"])
        # The server has the path of its environment only, and passes over what it cannot import.
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), TORCHDYNAMO_DISABLE="1"):
            for _ in range(self._size):
                here, there = context.Pipe()
                worker = context.Process(target=_serve, args=(there, forked), daemon=True)
                worker.start()
                there.close()
                self._workers.append(worker)
                self._pipes.append(here)
        assert all(pipe.poll(5 * PATIENCE.seconds) and pipe.recv() for pipe in self._pipes), "a worker did not start"

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.join()
        self._workers, self._pipes = [], []


def call(module: str, function: str, *args: Any) -> Any:
    """For `Pool.run`: a function of a module that workers import and this process does not."""
    return getattr(importlib.import_module(module), function)(*args)


def _serve(pipe: Any, forked: bool) -> None:
    torch.set_num_threads(1)
    pipe.send("megatron_preload" in sys.modules or not forked)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(_answer(*job))


def _answer(
    backend: str, rank: int, world: int, store: str, fn: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[bool, Any]:
    try:
        if "nccl" in backend:
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=PATIENCE)
        buffer = io.BytesIO()
        torch.save(fn(*args), buffer)
        dist.barrier()
        return True, buffer.getvalue()
    except Exception:
        return False, traceback.format_exc()
    finally:
        from megatron.core import parallel_state  # a case may bring what it is to be imported with

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


POOL = Pool(4)
"""Started by the first case; its processes end with this one."""
