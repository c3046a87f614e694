"""Processes that stay: each case joins some of them anew over gloo. Starting them is the slow part (megatron-core)."""

from __future__ import annotations

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
    """Workers out of a server that has imported torch and megatron-core once; replaced if one of them hangs or dies."""

    def __init__(self, size: int) -> None:
        self._size = size
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
                pipe.send((rank, world, f"{folder}/store", fn, args))
            try:
                for rank, pipe in enumerate(self._pipes[:world]):
                    assert pipe.poll(2 * PATIENCE.seconds), f"rank {rank} of {world} does not answer"
                answers = [pipe.recv() for pipe in self._pipes[:world]]
            except BaseException:
                self.close()
                raise
        failed = [f"rank {rank} of {world}:\n{value}" for rank, (ok, value) in enumerate(answers) if not ok]
        # A rank that fails breaks its peers' connections: the error that started it is the one without that.
        assert not failed, min(failed, key=lambda text: "gloo" in text)
        return [torch.load(io.BytesIO(value), weights_only=False) for _, value in answers]

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["megatron_preload"])
        # The server has the path of its environment only, and passes over what it cannot import.
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
            for _ in range(self._size):
                here, there = context.Pipe()
                worker = context.Process(target=_serve, args=(there,), daemon=True)
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


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    pipe.send("megatron_preload" in sys.modules)
    while True:
        try:
            rank, world, store, fn, args = pipe.recv()
        except EOFError:
            return
        pipe.send(_answer(rank, world, store, fn, args))


def _answer(rank: int, world: int, store: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    from megatron.core import parallel_state

    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=PATIENCE)
        buffer = io.BytesIO()
        torch.save(fn(*args), buffer)
        dist.barrier()
        return True, buffer.getvalue()
    except Exception:
        return False, traceback.format_exc()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


POOL = Pool(4)
"""Started by the first case; its processes end with this one."""
