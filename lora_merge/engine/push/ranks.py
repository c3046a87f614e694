"""The trainer's ranks in a push: what they exchange, and which engines each of them calls."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from ...errors import LoraMergeError, PushRefused
from ...shards.ranks import Ranks, talking
from ..control.base import Control
from ..control.calls import on_this_device, side_by_side, to_its_end
from ..transport.liveness import error_text, host_id
from .replica import Replica, fail_together

_K = TypeVar("_K")
_T = TypeVar("_T")
LOOK_S = 0.05
"""Seconds between two reads of which control calls of other ranks have ended."""


class Ended:
    """Replicas whose control call has ended: nobody waits for their workers any more. Ranks without their handles learn
    it from the store of the process group."""

    def __init__(self, world: Ranks, name: str, replicas: Sequence[Replica]) -> None:
        self._known: set[int] = set()
        self._theirs = [r.index for r in replicas if r.control is None]
        self._due = 0.0
        self._store = None
        if not world.alone:
            self._store = dist.PrefixStore(  # type: ignore[attr-defined]
                f"lora_merge/{name}", dist.distributed_c10d._get_default_store()
            )

    def add(self, index: int) -> None:
        """Note that the control call of a replica whose handle is here has ended."""
        self._known.add(index)
        if self._store is not None:
            with talking():
                self._store.set(str(index), "")

    def forget(self) -> None:
        """Delete what is in the store, when no rank reads it any more."""
        if self._store is not None:
            with talking():
                for index in self._known.difference(self._theirs):
                    self._store.delete_key(str(index))

    def __call__(self) -> set[int]:
        """Return the indices of the replicas."""
        if self._theirs and self._store is not None and time.monotonic() > self._due:
            self._due = time.monotonic() + LOOK_S
            with talking():
                self._known |= {index for index in self._theirs if self._store.check([str(index)])}
        return self._known


class TrainerRanks:
    """The ranks that push together, and the engines whose handles each of them holds. `gather`, `everywhere`, `spread`
    and `share` are collective.

    Args:
        controls: of the engines whose handles this rank holds.
        world: all ranks that push.

    Attributes:
        hosts: on which they run.
    """

    def __init__(self, controls: Sequence[Control], world: Ranks) -> None:
        self.controls, self.world = list(controls), world
        self._name = world.gather(secrets.token_hex(8))[0]  # the store is shared with other pushers of these ranks
        self._process = os.getpid()
        self.hosts = frozenset(world.gather(host_id()))
        self._begun = 0
        self._ended_before = Ended(world, f"{self.name}/0", ())

    @property
    def name(self) -> str:
        """The name under which engines know these ranks. A process that was forked from one is another trainer."""
        here = os.getpid()
        return self._name if here == self._process else f"{self._name}/{here}"

    async def blocking(self, work: Callable[[], _T]) -> _T:
        """Run something that may wait for other ranks, without holding up an event loop that an engine lives in."""
        if not any(control.suspends for control in self.controls):
            return work()
        return await to_its_end(asyncio.ensure_future(asyncio.to_thread(on_this_device(work))))

    async def gather(self, value: _T) -> list[_T]:
        """Return the values of all ranks, in order."""
        return [value] if self.world.alone else await self.blocking(lambda: self.world.gather(value))

    async def everywhere(self, call: Coroutine[Any, Any, _T]) -> list[_T]:
        """Run a call on every rank; if it fails on one, it fails on all, before anything is sent.

        Raises:
            its own error where there is one, else `PushRefused` with that of another rank. An error that is none of
            this package's becomes a `PushRefused`.
        """
        error: Exception | None = None
        value: Any = None
        try:
            value = await call
        except Exception as raised:
            error = raised
        answers = await self.gather((None if error is None else error_text(error), value))
        if isinstance(error, LoraMergeError):
            raise error
        if error is not None:
            raise PushRefused(error_text(error)) from error
        for rank, (other, _) in enumerate(answers):
            if other is not None:
                raise PushRefused(f"trainer rank {rank}: {other}")
        return [value for _, value in answers]

    async def keep_and_gather(self, call: Coroutine[Any, Any, tuple[_K, _T]]) -> tuple[_K, list[_T]]:
        """Run a call as `everywhere` does. Of the two things that it returns, the first stays on its rank."""
        kept: list[_K] = []

        async def keep() -> _T:
            own, shared = await call
            kept.append(own)
            return shared

        values = await self.everywhere(keep())
        return kept[0], values

    async def each(
        self, replicas: Sequence[Replica], step: Callable[[Replica], Coroutine[Any, Any, Any]], *, failed: bool = False
    ) -> None:
        """Run a step of every replica whose handle is here, side by side, and note failures in the replicas.

        Args:
            failed: also of replicas that have failed.
        """
        for replica, error in await self._run([r for r in replicas if failed or not r.error], step):
            replica.error = replica.error or error_text(error)

    async def all_own(self, replicas: Sequence[Replica], step: Callable[[Replica], Coroutine[Any, Any, Any]]) -> None:
        """Run a step of every replica whose handle is here, side by side.

        Raises:
            the first one's error, when all have ended.
        """
        for replica, error in await self._run(replicas, step):
            if isinstance(error, LoraMergeError):
                raise error
            raise PushRefused(f"engine {replica.index}: {error_text(error)}") from error

    async def _run(
        self, replicas: Sequence[Replica], step: Callable[[Replica], Coroutine[Any, Any, Any]]
    ) -> list[tuple[Replica, BaseException]]:
        """Run a step of every replica whose handle is here; return the errors."""
        own = [r for r in replicas if r.control is not None]
        errors = await side_by_side([r.handle for r in own], step, own)
        return [(replica, error) for replica, error in zip(own, errors, strict=True) if error is not None]

    async def ask_own(
        self, replicas: Sequence[Replica], op: str, in_full: Callable[[], Mapping[str, Any]] = dict, **message: Any
    ) -> dict[int, list[dict[str, Any]]]:
        """Ask the workers of every replica whose handle is here, side by side.

        Args:
            in_full: makes further arguments, what a digest in the message stands for. Engines that have a worker which
                answers "unknown" are asked again with them.

        Returns:
            the answers of the workers, by index of the replica.

        Raises:
            as `all_own`.
        """
        answers: dict[int, list[dict[str, Any]]] = {}

        async def ask(replica: Replica) -> None:
            found = await replica.handle.rpc(op, **message)
            if any("unknown" in answer for answer in found):
                found = await replica.handle.rpc(op, **message, **in_full())
            answers[replica.index] = found

        await self.all_own(replicas, ask)
        return answers

    async def ask(
        self, replicas: Sequence[Replica], op: str, in_full: Callable[[], Mapping[str, Any]] = dict, **message: Any
    ) -> dict[int, list[dict[str, Any]]]:
        """Ask the workers of all replicas, and return the answers on every rank, as `ask_own` does; an error is one on
        every rank."""
        answers = await self.everywhere(self.ask_own(replicas, op, in_full, **message))
        return {index: found for some in answers for index, found in some.items()}

    async def spread(self, value: _T | None, rank: int) -> _T:
        """Return a rank's value on every rank."""
        return await self.blocking(lambda: self.world.spread(value, rank))

    async def share(self, replicas: Sequence[Replica], error: str = "") -> bool:
        """Exchange which replicas have failed, and what is known of them. Return True if a rank itself has failed:
        then all replicas have.

        Args:
            error: of this rank itself, in words; "" for none.
        """
        known = {r.index: (r.error, r.begun, r.lost, r.resumed, r.coverage) for r in replicas if r.error or r.begun}
        answers = await self.gather((known, error))
        for others, failed in answers:
            for replica in replicas:
                theirs, begun, lost, resumed, coverage = others.get(replica.index, ("", False, False, False, None))
                replica.error = failed or replica.error or theirs  # the cause comes first
                replica.begun, replica.resumed = replica.begun or begun, replica.resumed or resumed
                replica.lost = replica.lost or lost
                replica.coverage = coverage if replica.coverage is None else replica.coverage
        fail_together(replicas)
        return any(failed for _, failed in answers)

    def ended(self, replicas: Sequence[Replica]) -> Ended:
        """Begin to note whose control calls have ended, for channels or a transfer that begin now; on every rank."""
        # Ranks meet at the end of every transfer, so nobody reads the one before any more.
        self._ended_before.forget()
        self._begun += 1
        self._ended_before = Ended(self.world, f"{self.name}/{self._begun}", replicas)
        return self._ended_before
