"""What a transfer of a push brings to engines, as the push sees it: `Payload`."""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch

from ...stream.bucket_writer import BucketWriter
from ...stream.buckets import Table
from ...stream.direct_targets import DirectTargets, Sent
from ..state import State
from ..transport.routing import Route, WorkerId

WireSpecs: TypeAlias = Mapping[str, Mapping[str, list[int]]]
"""`Route.wire_spec` of each worker of an engine, by rank."""


class WorkerOp(NamedTuple):
    """An operation of workers, and its arguments."""

    op: str
    message: Mapping[str, Any]


@dataclass(frozen=True)
class Terms:
    """How one transfer goes.

    Args:
        state: what engines hold after it.
        changed: of a base: names of the tensors that updates will change, which the engines merge onto it; None where
            none will come.
        run: arguments of `Plan.run`.
        verify: whether checksums of all tensors are compared.
    """

    state: State
    changed: frozenset[str] | None
    run: Mapping[str, Any]
    verify: bool

    @cached_property
    def begin(self) -> dict[str, Any]:
        """What workers are told when a transfer of all weights begins."""
        return {"state": self.state.to_json(), "changed": None if self.changed is None else sorted(self.changed)}


class Payload:
    """What a transfer brings. A push asks it, in this order:

    1. `serve`: each rank collects what it sends; where that fails, `forget`;
    2. `begin_op`: what workers do before the first bucket, each engine at its own time;
    3. `settle`: what each rank does before workers take anything;
    4. `transfer_op`: what workers do while the ranks send the buckets of `sent`;
    5. `compared`, under `verify=True` alone.

    Attributes:
        writes: whether `transfer_op` may change the engine.
        full: whether it brings the weights of the model, so that a full push ends when workers commit.
        merges: whether workers merge what they received, when all workers of the engine have it.
        finishes: whether workers merge or commit at the end of the transfer.
        announced: whether every engine gets a message before the transfer. Else nobody waits for one.
        staged: whether `transfer_op` only begins a transfer, which goes on beside the engine's work. The engine is
            paused when it has ended.
        separate: whether what single workers take is more than it costs to send each of them what all take.
        transport: name of what it takes beside the channels' transports, for reports.
    """

    writes = True
    full = True
    merges = False
    finishes = True
    announced = True
    staged = False
    separate = False
    transport = ""

    @property
    def sent(self) -> Sent | None:
        """The buckets that are sent; None for an operation that needs no channel."""
        return None

    @property
    def compared(self) -> Sent | None:
        """The buckets that hold what workers read by themselves, to be compared; None where `sent` is all."""
        return None

    @property
    def contents(self) -> Table:
        """The tensors that it brings."""
        return () if self.sent is None else self.sent.table

    def begin_op(self, terms: Terms, route: Route) -> WorkerOp | None:
        """Return what workers do before the transfer; None for nothing."""
        return None

    def transfer_op(self, terms: Terms, route: Route, comes: WireSpecs | None) -> WorkerOp | None:
        """Return what workers do in the transfer; None for nothing.

        Args:
            comes: what comes to each worker; None where every worker gets all buckets.
        """
        return None

    def settle(self) -> None:
        """Do what has to be done on every rank before workers take anything."""

    def passing(self) -> AbstractContextManager[None]:
        """Return what the transfer runs in; see `BucketWriter.passing`."""
        return nullcontext()

    def serves(self, served: Mapping[WorkerId, int] | None) -> bool:
        """Return True if `serve` was called with this last, or need not be; the same on every rank."""
        return True

    def serve(self, served: Mapping[WorkerId, int] | None, rank: int) -> None:
        """Bring to each rank what its workers take, from now on; collective over the ranks of the model.

        Args:
            served: each worker's rank of the trainer; None where every rank makes everything.
            rank: this one of them.
        """

    def forget(self) -> None:
        """Serve nobody until `serve` is called again."""


@dataclass(frozen=True)
class LocalOp(Payload):
    """An operation that workers run without receiving anything, such as going back to their own checkpoint.

    Args:
        op, message: the operation and its arguments.
        writes, merges: see `Payload`.
    """

    op: str
    message: Mapping[str, Any]
    writes: bool
    merges: bool = False

    def transfer_op(self, terms: Terms, route: Route, comes: WireSpecs | None) -> WorkerOp | None:
        return WorkerOp(self.op, self.message)


class WeightsPayload(Payload):
    """All weights of a stream, merged or the base: in buckets, or straight into the engines' tensors."""

    def __init__(self, writer: BucketWriter) -> None:
        self._writer = writer

    @property
    def sent(self) -> Sent:
        return self._writer

    def begin_op(self, terms: Terms, route: Route) -> WorkerOp | None:
        return WorkerOp("begin_full", {"digest": self._writer.digest, "sent": bool(route.sent), **terms.begin})

    def transfer_op(self, terms: Terms, route: Route, comes: WireSpecs | None) -> WorkerOp | None:
        if not route.sent:  # the trainer writes everything by itself
            return None
        return WorkerOp("receive", {"sent": route.sent, "placed": sorted(route.placed.intersection(route.sent))})

    def passing(self) -> AbstractContextManager[None]:
        return self._writer.passing()


class BucketPayload(Payload):
    """A payload that fills its own buckets, all of which are handed over: it is a `Sent`.

    Args:
        device: on which buckets are filled.
        collective: whether several ranks hold the model together.
    """

    table: Table
    capacity: int
    joins = False
    recipients: Mapping[int, frozenset[WorkerId]] = MappingProxyType({})

    def __init__(self, device: torch.device, collective: bool) -> None:
        self.device = device
        self.collective = self.shared = collective

    @property
    def sent(self) -> Any:
        return self

    def alone(self, index: int) -> bool:
        return not self.collective

    def direct_buckets(self, names: Container[str]) -> frozenset[int]:
        """Return none: workers make their own tensors of what they get."""
        return frozenset()

    def write_direct(self, index: int, targets: DirectTargets, run: Mapping[str, Any]) -> None:
        raise NotImplementedError(f"{type(self).__name__} goes in buckets")
