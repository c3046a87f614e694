"""Transports without an engine: shared memory between real processes, and who gives up when."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_merge import InvalidInput
from lora_merge.buckets import Meta, Table, lay_out
from lora_merge.engine.transport import Receiver, Sender, TransferAborted, choose, host_id

CPU = torch.device("cpu")


class Counting:
    """Bucket k is full of k + 1."""

    def __init__(self, buckets: int = 7, breaks_at: int = -1) -> None:
        self.table: Table = lay_out([Meta(str(i), torch.uint8, (1000,)) for i in range(buckets)], 1024)
        self.device, self._breaks_at = CPU, breaks_at

    def fill(self, index: int, buffer: Tensor, run: Mapping[str, Any]) -> None:
        if index == self._breaks_at:
            raise RuntimeError("injected")
        buffer.fill_(index + 1)


def sender(workers: int) -> Sender:
    introductions = [{"host": host_id(), "pid": os.getpid() + 1 + w, "device": "cpu"} for w in range(workers)]
    return Sender([introductions], 1024, CPU)


def take(info: dict[str, Any], rank: int, stop_at: int, seen: Any) -> None:
    receiver = Receiver(info["session"], info["channels"][rank], CPU)
    try:
        with closing(receiver.receive([8] * 7)) as buckets:
            for index, data in buckets:
                if index == stop_at:
                    raise RuntimeError("consumer")
                seen.put((rank, index, bool((data[:1000] == index + 1).all())))
    except (RuntimeError, TransferAborted) as error:
        seen.put((rank, type(error).__name__, str(error)))
    receiver.close()


@pytest.mark.parametrize("stop_at", [-1, 3])
def test_workers_in_other_processes(stop_at: int) -> None:
    ours, context = sender(2), multiprocessing.get_context("spawn")
    seen, info = context.Queue(), ours.init_info(0)
    processes = [context.Process(target=take, args=(info, r, stop_at if r else -1, seen)) for r in range(2)]
    ours.begin()
    for process in processes:
        process.start()
    ours.serve(Counting(), {}, set)
    for process in processes:
        process.join(60)
    found = [seen.get(timeout=5) for _ in range(7 + (7 if stop_at < 0 else stop_at + 1))]
    assert [f for f in found if f[0] == 0] == [(0, i, True) for i in range(7)], "one worker's failure is its own"
    if stop_at >= 0:
        assert [f for f in found if f[0] == 1][-1] == (1, "RuntimeError", "consumer")
    ours.close()
    assert not list(Path("/dev/shm").glob(f"lora_merge-{ours.session}*"))


def test_a_trainer_that_breaks_tells_its_workers() -> None:
    ours = sender(1)
    info = ours.init_info(0)
    ours.begin()
    errors: list[BaseException] = []

    def worker() -> None:
        try:
            list(Receiver(info["session"], info["channels"][0], CPU).receive([8] * 7))
        except TransferAborted as error:
            errors.append(error)

    thread = threading.Thread(target=worker)
    thread.start()
    with pytest.raises(RuntimeError, match="injected"):
        ours.serve(Counting(breaks_at=2), {}, set)
    thread.join(10)
    assert "gave up" in str(errors[0])
    ours.close()


def test_a_trainer_that_dies_is_noticed() -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    ours = sender(1)
    channel = ours.init_info(0)["channels"][0] | {"pid": int(gone.stdout)}
    ours.begin()
    with pytest.raises(TransferAborted, match="died"):
        list(Receiver(ours.session, channel, CPU).receive([8]))
    ours.close()


def test_a_worker_whose_call_ended_is_not_waited_for() -> None:
    ours = sender(1)
    ours.begin()
    ours.serve(Counting(), {}, lambda: {0})
    ours.close()


@pytest.mark.parametrize(
    ("worker", "kind"),
    [
        ({"host": "h", "pid": 1, "device": "gpu-1"}, "local"),
        ({"host": "h", "pid": 2, "device": "gpu-1"}, "ipc"),
        ({"host": "h", "pid": 2, "device": "gpu-2"}, "nccl"),
        ({"host": "other", "pid": 1, "device": "gpu-1"}, "nccl"),
    ],
)
def test_ends_are_matched_by_host_process_and_uuid(worker: dict[str, Any], kind: str) -> None:
    assert choose({"host": "h", "pid": 1, "device": "gpu-1"}, worker) == kind


def test_what_cannot_be_connected_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no transport"):
        choose({"host": "h", "pid": 1, "device": "cpu"}, {"host": "h", "pid": 2, "device": "gpu-1"})
    with pytest.raises(InvalidInput, match="not a buffer"):
        Receiver("s", {"kind": "shm", "nbytes": 1, "mailbox": "/dev/shm/../../etc/passwd", "words": 1, "index": 0,
                       "pid": 1}, CPU)  # fmt: skip
