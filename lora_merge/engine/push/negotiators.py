"""Adapters, updates and pulls: made as the engines can take them, after every engine was asked whether it can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...errors import PushRefused
from ...stream.bucket_writer import BucketWriter
from ...stream.buckets import dtype_of
from ...stream.weights import MergedWeights
from ..messages import WorkerInfo
from ..payload.adapter import AdapterBuilder, AdapterSource
from ..payload.pull import MOVED, PullBuilder, PullSource, Unmoved, readable, unreadable
from ..payload.recipients import Recipients
from ..payload.update import UpdateBuilder, UpdatePayload
from ..state import State
from .channels import Trainer
from .replica import Replica

_INSTEAD = '; push with mode="merged" instead'


def _numbers(kept: Sequence[State]) -> str:
    return ", ".join(str(one.version) for one in kept)


class AdapterNegotiator:
    """Makes the adapter of a model; kept while it stays what it was.

    Args:
        weights: the stream of the model.
    """

    def __init__(self, trainer: Trainer, weights: MergedWeights) -> None:
        self._trainer, self._build = trainer, AdapterBuilder(weights.beside())

    def release(self) -> None:
        self._build.release()

    async def __call__(self, replicas: Sequence[Replica], renames: Sequence[Sequence[str]] = ()) -> AdapterSource:
        """Return the adapter, after `check`.

        Args:
            renames: with which the stream of its base fits the engines.

        Raises:
            PushRefused: some engine cannot serve it, as merged mode can.
        """
        adapter, _ = await self._trainer.keep_and_gather(self._try(replicas, renames))
        return adapter

    async def check(self, replicas: Sequence[Replica], keep: int) -> None:
        """Raise `PushRefused` if some engine serves no adapters, or not in this way.

        Args:
            keep: see `Planner`.
        """
        for replica in replicas:
            self._check(replica, keep)
        if keep:
            trainer = self._trainer
            await trainer.everywhere(trainer.all_own(replicas, lambda replica: replica.handle.check_versions()))

    @staticmethod
    def _check(replica: Replica, keep: int) -> None:
        constant = replica.state.kind == "adapter" and replica.state not in replica.kept
        if keep and replica.workers[0].no_versions:
            raise PushRefused(
                f"engine {replica.index} cannot keep versions of an adapter (keep={keep}): "
                f'{replica.workers[0].no_versions}; push without keep, or with mode="merged"'
            )
        if keep and constant:
            raise PushRefused(
                f"engine {replica.index} holds {replica.state}, one adapter that each push replaces, and requests in "
                f'flight may use it: leave keep out, or push with mode="merged" once before keep={keep}'
            )
        if not keep and replica.kept:
            raise PushRefused(
                f"engine {replica.index} keeps versions of an adapter ({_numbers(replica.kept)}) and cannot also serve "
                'one adapter that each push replaces: go on with keep=, or push with mode="merged" once before'
            )
        if not keep and replica.workers[0].no_adapters:
            raise PushRefused(
                f"engine {replica.index} cannot take an adapter: {replica.workers[0].no_adapters}{_INSTEAD}"
            )
        if any(worker.lora is None for worker in replica.workers):
            raise PushRefused(f"engine {replica.index} was started without enable_lora=True{_INSTEAD}")

    async def _try(self, replicas: Sequence[Replica], renames: Sequence[Sequence[str]]) -> tuple[AdapterSource, None]:
        dtype, limit = lora_limits(replicas)
        source = await self._trainer.blocking(lambda: self._build(dtype, renames))
        if not source.modules:
            raise PushRefused(
                "the model has no active adapter to send: activate one (set_adapter), or push mode='merged'"
            )
        if source.rank > limit:
            raise PushRefused(f"the adapter's rank {source.rank} is above the engine's max_lora_rank {limit}{_INSTEAD}")
        await check_modules(self._trainer, replicas, dict.fromkeys(source.modules, ""), _INSTEAD)
        return source, None


def lora_limits(replicas: Sequence[Replica]) -> tuple[torch.dtype, int]:
    """Return the dtype of the engines' LoRA weights, and the largest rank that all of them serve."""
    loras = [worker.lora for replica in replicas for worker in replica.workers if worker.lora]
    return dtype_of(loras[0].dtype), min(lora.max_rank for lora in loras)


async def check_modules(trainer: Trainer, replicas: Sequence[Replica], whose: Mapping[str, str], instead: str) -> None:
    """Raise `PushRefused` if an engine whose handle is here has no LoRA layer for a module.

    Args:
        whose: the modules -> how the error about one begins.
        instead: how it ends.
    """
    answers = await trainer.ask_own(replicas, "unserved_modules", modules=list(whose))
    for replica in replicas:
        found = answers.get(replica.index, ())
        if unserved := sorted({module for answer in found for module in answer["unserved"]}):
            advice = next((said for answer in found if (said := answer.get("advice"))), "")
            raise PushRefused(
                f"{whose[unserved[0]]}{replica.handle.name} has no LoRA layer for {', '.join(unserved)}{advice}"
                f"{instead}"
            )


class UpdateNegotiator:
    """Makes the update of a model that engines merge.

    Args:
        weights: the stream of the model.
        trains: see `UpdateBuilder`.
    """

    def __init__(self, trainer: Trainer, weights: MergedWeights, *, trains: bool = True) -> None:
        self._trainer, self._updates = trainer, UpdateBuilder(weights, trains=trains)
        self._last = ""

    def known(self) -> list[str]:
        """Return the digest of the last one, if there was one."""
        return [self._last] if self._last else []

    def release(self) -> None:
        self._updates.release()

    async def __call__(
        self, weights: MergedWeights, base: BucketWriter, replicas: Sequence[Replica], recipients: Recipients
    ) -> UpdatePayload:
        """Return the update; note in the workers of `replicas` whether they are ready for it.

        Args:
            weights, base, recipients: see `UpdateBuilder`.

        Raises:
            PushRefused: some engine cannot merge it, or only the trainer can; says why.
        """
        update, everyone = await self._trainer.keep_and_gather(self._try(weights, base, replicas, recipients))
        for answers in everyone:
            for replica in replicas:
                for worker, ready in zip(replica.workers, answers.get(replica.index, ()), strict=False):
                    worker.ready = [update.digest] if ready else []
        self._last = update.digest
        return update

    async def _try(
        self, weights: MergedWeights, base: BucketWriter, replicas: Sequence[Replica], recipients: Recipients
    ) -> tuple[UpdatePayload, dict[int, list[bool]]]:
        update = await self._trainer.blocking(lambda: self._updates(weights, base, recipients))
        new = [r for r in replicas if any(update.digest not in worker.ready for worker in r.workers)]
        answers = await self._trainer.ask_own(
            new, "check_update", lambda: {"spec": update.spec}, digest=update.digest, base=base.digest
        )
        for index, workers in answers.items():
            if problems := [problem for answer in workers for problem in answer["problems"]]:
                raise PushRefused(
                    f"engine {index} cannot merge by itself: {problems[0]}"
                    f"{f' (and {len(problems) - 1} more)' if len(problems) > 1 else ''}; {self._updates.instead}"
                )
        return update, {index: [answer["ready"] for answer in workers] for index, workers in answers.items()}


class PullNegotiator:
    """Makes a stream something that workers on this host can read where the trainer has it.

    Args:
        weights: the stream.
        stayed: whether the model's weights lie where they lay, for all streams of it.
    """

    def __init__(self, trainer: Trainer, weights: MergedWeights, stayed: Unmoved) -> None:
        self._trainer, self._pulls, self._stayed = trainer, PullBuilder(weights), stayed
        self._last: PullSource | None = None
        self._checked: tuple[BucketWriter, bool] | None = None
        self._refused: tuple[Any, ...] = (None, (), "")

    def known(self) -> list[str]:
        """Return the digest under which workers know the last one, if there was one."""
        return [self._last.offered] if self._last is not None else []

    def release(self) -> None:
        self._checked = None
        self._pulls.release()

    def check_ahead(self, stream: BucketWriter) -> None:
        """Note ahead of the call whether the last one serves again in this push. Collective, as making streams is."""
        self._checked = stream, self._pulls.serves(stream, self._last)

    async def __call__(self, stream: BucketWriter, replicas: Sequence[Replica]) -> tuple[PullSource | None, str]:
        """Return the stream as workers pull it; or None, and why some worker cannot. Collective.

        Args:
            stream: as it fits the engines, which know its table.
        """
        workers = [worker for replica in replicas for worker in replica.workers]
        who = [(worker.host, worker.pid, worker.device) for worker in workers]
        if self._refused[:2] == (stream, who):  # a model whose memory is elsewhere is another stream
            return None, self._refused[2]
        pull, why = await self._offered(stream, replicas, workers)
        self._last = pull
        if pull is None:
            self._pulls.forget()
            if self._trainer.offered:  # where a worker cannot unmap it, the next push asks again
                await self._trainer.ask(replicas, "unmap_source", trainer=self._trainer.name)
                self._trainer.offered = False
        self._refused = (None, (), "") if pull is not None or why == MOVED else (stream, who, why)
        return pull, why

    async def _offered(
        self, stream: BucketWriter, replicas: Sequence[Replica], workers: Sequence[WorkerInfo]
    ) -> tuple[PullSource | None, str]:
        trainer, last = self._trainer, self._last
        checked, self._checked = self._checked, None
        if checked is not None and checked[0] is stream:
            serves = checked[1]
        else:
            serves = await trainer.blocking(partial(self._pulls.serves, stream, last))
        ready = serves and last is not None and all(last.offered in worker.ready for worker in workers)
        if not await trainer.blocking(lambda: trainer.world.any(not ready)):
            return last, ""
        answers = await trainer.gather((unreadable(stream), trainer.introduced(stream), self._stayed(stream)))
        ranks = [rank for _, rank, _ in answers]
        why = next((why for why, *_ in answers if why), "") or readable(
            [worker.introduction for worker in workers], ranks
        )
        if not why and not all(stayed for *_, stayed in answers):
            why = MOVED
        if why:
            return None, why
        # Tensors that some worker does not take as a box of a parameter, in their dtype.
        found = await trainer.ask(replicas, "blocked_tensors", digest=stream.digest)
        blocked = frozenset(name for some in found.values() for answer in some for name in answer["blocked"])
        pull, exported = await trainer.keep_and_gather(self._make(stream, blocked))
        sources = [memory | rank for memory, rank in zip(exported, ranks, strict=True)]
        why = next((source["why"] for source in sources if source["why"]), "")
        if len({source.pop("digest") for source in sources}) > 1:
            why = why or "the adapters of some ranks lie in memory that can be mapped, those of others do not"
        why = why or await self._map(pull, sources, replicas)
        if why:
            return None, why
        await trainer.close_channels()  # those of a push before have room for all that is read from now on
        return pull, ""

    async def _make(self, stream: BucketWriter, blocked: frozenset[str]) -> tuple[PullSource, dict[str, Any]]:
        pull = await self._trainer.blocking(lambda: self._pulls(stream, blocked))
        return pull, {**pull.exported(), "digest": pull.digest}

    async def _map(self, pull: PullSource, sources: Sequence[dict[str, Any]], replicas: Sequence[Replica]) -> str:
        """Have workers map what the ranks export; return why one cannot, "" where all have."""
        message = pull.offer(self._trainer.name, sources)
        self._trainer.offered = True
        answers = await self._trainer.ask(
            replicas, "map_source", lambda: {"spec": pull.spec}, trainer=self._trainer.name, **message
        )
        pull.offered = message["digest"]
        whys = (f"engine {i}: {a['why']}" for i, workers in answers.items() for a in workers if a["why"])
        return next(whys, "")
