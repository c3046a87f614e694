"""`local`: a worker in the trainer's own process, which takes buckets from the `Sender` at its own pace. Tensors
that have a place in the engine are merged to there, with no bucket."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

from ...stream.direct_targets import DirectTargets
from .base import Expected, Received, TrainerEnd, WorkerEnd
from .liveness import TransferAborted


class Offering(Protocol):
    """What a worker of this process asks of a `Sender`."""

    def pull(self, targets: DirectTargets, compare: bool) -> Iterator[Received]: ...


SENDERS: weakref.WeakValueDictionary[str, Offering] = weakref.WeakValueDictionary()
"""The senders of this process, by session."""


class LocalSender(TrainerEnd):
    shares_memory, in_process, needs_buffers = True, True, False

    @staticmethod
    def reaches(trainer: Mapping[str, Any], worker: Mapping[str, Any], group: Collection[str]) -> bool:
        return bool(trainer["pid"] == worker["pid"])


class LocalReceiver(WorkerEnd):
    def _received(self, expected: Expected) -> Iterator[Received]:
        sender = SENDERS.get(self.session)
        if sender is None:
            raise TransferAborted("the trainer of this process is gone; push again")
        yield from sender.pull(expected.targets or DirectTargets({}), expected.compare)
