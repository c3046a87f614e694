"""One transfer of a push: a payload, and the replicas that get it."""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import Any

from ...choices import Rounding
from ...errors import PushFailed
from ...stream.direct_targets import Sent
from ..payload.base import Terms
from ..payload.checksums import Verified
from ..transport.routing import Route
from .channels import Trainer
from .planner import Transfer
from .replica import Replica, SyncReport
from .sequence import EngineSequence


class TransferRun:
    """Sends the payload of a transfer to its replicas, or has workers do their part by themselves. Errors are noted in
    the replicas.

    Args:
        verify: compare checksums of every tensor on both sides.
        name: what engines call their weights from now on; caches of the old ones are reset. "" where another transfer
            of this push follows.
        through: engines for which the push ends with their last call of this transfer.
    """

    def __init__(
        self,
        trainer: Trainer,
        sequence: EngineSequence,
        transfer: Transfer,
        *,
        rounding: Rounding,
        verify: bool,
        name: str,
        through: Container[int],
    ) -> None:
        self._trainer, self._sequence, self._transfer, self._payload = trainer, sequence, transfer, transfer.payload
        self._name, self._through = name, through
        state = transfer.state
        run: dict[str, Any] = {"rounding": rounding if state.kind == "merged" else "nearest"}
        if run["rounding"] == "stochastic":
            run["seed"] = state.version
        self._terms = Terms(state, transfer.changed, run, verify)
        self._replicas = [replica for replica in transfer.replicas if not replica.error]
        self._committed: set[int] = set()
        self._staged: set[int] = set()  # the engines that have all of it, and are not paused yet
        self._verified: Verified | None = None  # what `_finish` compares

    async def __call__(self, report: SyncReport) -> None:
        sent = self._payload.sent
        with report.timed("transfer"):
            if sent is None:
                work = partial(self._work, route=self._transfer.route, whole=True)
                await self._trainer.each(self._replicas, work)
            else:
                with self._payload.passing():
                    await self._send(sent)
        with report.timed("finish"):
            await self._trainer.each(self._replicas, self._finish)

    async def _send(self, sent: Sent) -> None:
        payload, run = self._payload, self._terms.run
        if self._terms.verify:
            sent = self._verified = Verified(sent)
        steps = self._begin, partial(self._receive, sent), payload.settle
        await self._trainer.transfer(sent, run, self._replicas, self._transfer.route, *steps)
        if self._verified is not None and payload.compared is not None:
            # Also hand over, in buckets that workers only compare, what they have read by themselves.
            read, self._verified = self._verified, Verified(payload.compared)
            left = [replica for replica in self._replicas if not replica.error]
            every = range(len(payload.compared.table))
            route = Route(frozenset(every), tuple(every))
            await self._trainer.transfer(
                self._verified, run, left, route, partial(self._check_before, read), self._compare
            )

    async def _begin(self, replica: Replica, route: Route) -> None:
        """Have workers begin. A pause that is due goes with this message; where the payload is staged, it stays due."""
        if self._payload.announced and not self._payload.staged:
            op = self._payload.begin_op(self._terms, route)
            calls = [] if op is None else [self._sequence.make_call(op.op, **op.message)]
            await self._sequence.make(replica, calls, begins=op is not None)

    async def _receive(self, sent: Sent, replica: Replica, route: Route) -> None:
        """Have workers take what comes."""
        # What is placed may be on its way; and a rank that could not do its part of a bucket says so after it.
        whole = not route.placed and not (sent.collective and sent.table)
        await self._work(replica, route, whole, sessions=self._trainer.sessions, verify=self._terms.verify)

    async def _work(self, replica: Replica, route: Route, whole: bool, **message: Any) -> None:
        """Have workers do their part, and what comes after it, in one message.

        Args:
            whole: whether all has come when they have.
            message: arguments that all payloads with buckets have.
        """
        op = self._payload.transfer_op(self._terms, route, self._trainer.wire_specs(replica, route))
        call = None if op is None else self._sequence.make_call(op.op, **op.message, **message)
        if self._payload.staged and call is not None:
            await self._sequence.stage(replica, call)
            self._staged.add(replica.index)
            return
        commits = whole and not self._payload.merges and not self._terms.verify  # what is compared is so before
        ends = commits and replica.index in self._through
        await self._sequence.settle(
            replica, self._transfer, call, name=self._name, begins=self._payload.writes, commits=commits, ends=ends
        )
        if commits:
            self._committed.add(replica.index)

    async def _finish(self, replica: Replica) -> None:
        """Have workers merge or commit, as all of them have what has come."""
        if self._payload.finishes and replica.index not in self._committed:
            ends = replica.index in self._through
            resets = replica.index in self._staged
            await self._sequence.finish(replica, self._transfer, name=self._name, ends=ends, resets=resets)
        if self._verified is not None:
            await self._check_arrived(replica, self._verified)

    async def _check_before(self, read: Verified, replica: Replica, route: Route) -> None:
        await self._check_arrived(replica, read)

    async def _compare(self, replica: Replica, route: Route) -> None:
        message = {"sessions": self._trainer.sessions, "verify": True, "sent": route.sent, "placed": route.sent}
        await self._sequence.tell(replica, "receive", **message)

    async def _check_arrived(self, replica: Replica, sent: Verified) -> None:
        """Raise `PushFailed` unless what came last is what was sent."""
        route = Route.of_buckets(sent)
        for at, answer in enumerate(await self._sequence.tell(replica, "received_checksums")):
            taken = {slot.name for index in route.by({(replica.index, at)}) for slot in sent.table[index]}
            wrong = [name for name in taken if answer["checksums"].get(name) != sent.checksums[name]]
            wrong += answer["damaged"]
            if wrong:
                raise PushFailed(
                    f"these tensors did not arrive as they were sent: {', '.join(sorted(set(wrong)))}; push again, and "
                    "report it if that does not help"
                )
