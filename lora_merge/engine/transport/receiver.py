"""A worker's end of a transfer."""

from __future__ import annotations

import base64
import os
from collections.abc import Container, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...stream.direct_targets import DirectTargets
from .liveness import TransferAborted, alive, wait_until
from .memory import CudaMemory, SharedMemory
from .nccl import Done, Group
from .rendezvous import reach_store
from .routing import ABORTED, BUCKETS_TOGETHER, DONE, FILLED, LEFT, PID, Received, hands_over
from .sender import SENDERS
from .tcp_receiver import TcpReceiver


class Receiver:
    """A worker's end.

    Args:
        channel: this worker's `Sender.channel`.
        device: of the worker.

    Attributes:
        over: whether no other transfer can follow: over a network who leaves one has left the channel.

    Raises:
        TransferAborted: another worker of the engine, or the trainer, failed at the same time.
        InvalidInput: the channel is not one of ours.
    """

    def __init__(self, channel: Mapping[str, Any], device: torch.device) -> None:
        self.session, self.kind = channel["session"], channel["kind"]
        self._nbytes, self._device = channel["nbytes"], device
        self.over = False
        self._group: Group | None = None
        self._inbox: TcpReceiver | None = None
        self._memory: CudaMemory | None = None
        self._box: Any = None
        self._buffers: list[Tensor] = []
        if self.kind in ("shm", "ipc"):
            self._box = SharedMemory(channel["mailbox"], 8 * channel["words"]).tensor.view(torch.int64).numpy()
            self._at, self._trainer = channel["at"], channel["pid"]
            self._box[self._at + PID] = os.getpid()
        if self.kind == "shm":
            self._buffers = list(SharedMemory(channel["data"], 2 * self._nbytes).tensor.split(self._nbytes))
        elif self.kind == "ipc":
            self._memory = CudaMemory(2 * self._nbytes, device, base64.b64decode(channel["handle"]))
            self._buffers = list(self._memory.tensor.split(self._nbytes))
        elif self.kind == "tcp":
            self._inbox = TcpReceiver(channel, self._nbytes, device)
        elif self.kind == "nccl":
            store = reach_store(channel["store"])
            self._group = Group(store, channel["group"], channel["rank"], channel["world"], device)
            try:
                self._buffers = [torch.empty(self._nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
                self._group.open()
            except BaseException:
                self.left()
                raise

    def receive(
        self,
        sizes: Mapping[int, int],
        placed: Container[int] = (),
        targets: DirectTargets | None = None,
        compare: bool = False,
        apart: Container[int] = (),
    ) -> Generator[Received, None, None]:
        """Buckets. One may be read until the next one is asked for; work on the current stream counts.

        Args:
            sizes: bytes of each bucket that comes, by its number, in order.
            placed: those of them that the trainer writes to their places by itself.
            targets: of this worker's tensors, for a trainer in this process, which decides what it places.
            compare: get the bucket of what was placed, too.
            apart: those of them that not all workers of an NCCL group take.

        Raises:
            TransferAborted: the trainer gave up, or is gone.
        """
        try:
            if self.kind == "local":
                sender = SENDERS.get(self.session)
                if sender is None:
                    raise TransferAborted("the trainer of this process is gone; push again")
                yield from sender.pull(targets or DirectTargets({}), compare)
            else:
                every = list(sizes.values())
                if self._inbox is not None:
                    came = self._inbox.take(every)
                elif self._group is not None:
                    came = self._broadcast(self._group, [(size, index in apart) for index, size in sizes.items()])
                else:
                    came = self._mapped(len(every))
                for index, data in zip(sizes, came, strict=True):
                    yield Received(index, data, index in placed)
        except BaseException:
            self.left()
            raise

    def left(self) -> None:
        """Report that this worker failed, so that nobody waits for it."""
        self.over = self._group is not None or self._inbox is not None
        if self._box is not None:
            self._box[self._at + LEFT] = 1
        if self._group is not None:
            self._group.leave("a worker of the engine failed in the middle of a push")
        if self._inbox is not None:
            self._inbox.leave()

    def _mapped(self, count: int) -> Iterator[Tensor]:
        box = self._box

        def look() -> None:
            if not alive(self._trainer):
                raise TransferAborted("the trainer died in the middle of a push")

        for index in range(count):
            wait_until(lambda: box[FILLED] > index or box[ABORTED], look)  # noqa: B023, it is called at once
            if box[FILLED] <= index:
                raise TransferAborted("the trainer gave up in the middle of a push")
            yield self._buffers[index % 2]
            if hands_over(index, BUCKETS_TOGETHER[self.kind], count):
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()
                box[self._at + DONE] = index + 1

    def _broadcast(self, group: Group, due: Sequence[tuple[int, bool]]) -> Iterator[Tensor]:
        """Buckets of these sizes, and whether each comes apart."""
        group.join()
        group.watch()

        def take(index: int) -> Done | None:
            size, apart = due[index]
            return group.take(self._buffers[index % 2][:size], apart)

        try:
            # One bucket comes in while the one before is loaded.
            sent = [take(0)] if due else []
            for index in range(len(due)):
                if index + 1 < len(due):
                    sent.append(take(index + 1))
                if not group.wait(sent[index]):
                    raise TransferAborted(group.lost)
                yield self._buffers[index % 2]
        finally:
            group.rest()

    def close(self) -> None:
        """Let go of the other side's memory."""
        if self._group is not None:
            self._group.close()
        if self._inbox is not None:
            self._inbox.close()
            self._inbox = None
        staged = self._group is not None and self._device.type == "cuda"
        self._buffers, self._box, self._group = [], None, None
        if staged:
            torch.cuda.empty_cache()  # or torch keeps what the buffers took
        if self._memory is not None:
            self._memory.close()
            self._memory = None
