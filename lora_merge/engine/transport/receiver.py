"""A worker's end of a transfer."""

from __future__ import annotations

from collections.abc import Container, Generator, Mapping
from typing import Any

import torch

from ...stream.direct_targets import DirectTargets
from .base import Received
from .routing import TRANSPORTS


class Receiver:
    """A worker's end.

    Args:
        channel: this worker's `Sender.channel`.

    Attributes:
        over: whether no other transfer can follow: over a network, who leaves one has left the channel.

    Raises:
        TransferAborted: another worker of the engine, or the trainer, failed at the same time.
        InvalidInput: the channel is not one of ours.
    """

    def __init__(self, channel: Mapping[str, Any], device: torch.device) -> None:
        self.session, self.over = channel["session"], False
        self.end = TRANSPORTS[channel["kind"]].worker(channel, device)

    def receive(
        self,
        sizes: Mapping[int, int],
        placed: Container[int] = (),
        targets: DirectTargets | None = None,
        compare: bool = False,
        apart: Container[int] = (),
    ) -> Generator[Received, None, None]:
        """Yield buckets. One may be read until the next one is asked for; work on the current stream counts.

        Args:
            sizes: bytes of each bucket that comes, by its number, in order.
            placed: those of them that the trainer writes to the engine's tensors by itself.
            targets: of this worker's tensors, for a trainer in this process, which decides what it places.
            compare: get the bucket of what was placed, too.
            apart: those of them that not all workers of an NCCL group take.

        Raises:
            TransferAborted: the trainer gave up, or is gone.
        """
        try:
            yield from self.end.receive(sizes, placed, targets, compare, apart)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Report that this worker failed, so that nobody waits for it."""
        self.over = self.end.once
        self.end.leave()

    def close(self) -> None:
        """Free buffers, and unmap the other side's memory."""
        self.end.close()
