"""What follows a base, an adapter or an update: read as vLLM can serve it, and every engine asked whether it can."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ..errors import PushRefused
from ..stream.buckets import dtype_of
from ..stream.filler import Filler
from ..stream.weights import MergedWeights
from .adapter import AdapterSource, filler_of
from .replica import Replica
from .trainer import Trainer
from .update import Update, Updates

_INSTEAD = '; push with mode="merged" instead'


class Offer:
    """Makes the adapter of a model something that engines can be sent; kept while it stays what it was.

    Args:
        weights: the stream of the model.
    """

    def __init__(self, trainer: Trainer, weights: MergedWeights) -> None:
        self._trainer, self._weights = trainer, weights
        self._known: tuple[Filler, torch.dtype, AdapterSource] | None = None

    async def __call__(self, replicas: Sequence[Replica]) -> AdapterSource:
        """The adapter.

        Raises:
            PushRefused: some engine cannot serve it; says so, and that merged mode can.
        """
        for replica in replicas:
            if replica.workers[0]["no_adapters"]:
                raise PushRefused(
                    f"engine {replica.index} cannot take an adapter: {replica.workers[0]['no_adapters']}{_INSTEAD}"
                )
            if any(worker["lora"] is None for worker in replica.workers):
                raise PushRefused(f"engine {replica.index} was started without enable_lora=True{_INSTEAD}")
        loras = [worker["lora"] for replica in replicas for worker in replica.workers]
        dtype, limit = dtype_of(loras[0]["dtype"]), min(lora["max_rank"] for lora in loras)
        made: list[AdapterSource] = []
        await self._trainer.everywhere(self._try(dtype, limit, made, replicas))
        return made[0]

    def _read(self, dtype: torch.dtype) -> AdapterSource:
        filler = filler_of(self._weights)
        if self._known is None or self._known[0] is not filler or self._known[1] != dtype:
            self._known = filler, dtype, AdapterSource(self._weights, filler, dtype)
        return self._known[2]

    async def _try(
        self, dtype: torch.dtype, limit: int, made: list[AdapterSource], replicas: Sequence[Replica]
    ) -> None:
        source = await self._trainer.blocking(lambda: self._read(dtype))
        made.append(source)
        if not source.modules:
            raise PushRefused("the model has no active adapter to send")
        if source.rank > limit:
            raise PushRefused(f"the adapter's rank {source.rank} is above the engine's max_lora_rank {limit}{_INSTEAD}")

        async def ask(replica: Replica) -> None:
            answers = await replica.handle.rpc("adapter_modules", modules=source.modules)
            unserved = sorted({name for answer in answers for name in answer["unserved"]})
            if unserved:
                raise PushRefused(f"{replica.handle.name} has no LoRA layer for {', '.join(unserved)}{_INSTEAD}")

        await self._trainer.all_own(replicas, ask)


class UpdateOffer:
    """Makes what training has changed in a model something that engines can merge.

    Args:
        weights: the stream of the model.
        trains: as of `Updates`.
    """

    def __init__(self, trainer: Trainer, weights: MergedWeights, *, trains: bool = True) -> None:
        self._trainer, self._updates = trainer, Updates(weights, trains=trains)
        self._last = ""

    def known(self) -> list[str]:
        """The digest of the last one, if there was one."""
        return [self._last] if self._last else []

    def release(self) -> None:
        """As `MergedWeights.release`."""
        self._updates.release()

    async def __call__(self, weights: MergedWeights, base: Filler, replicas: Sequence[Replica]) -> Update:
        """The update; what the workers of `replicas` are ready for is noted in them.

        Args:
            weights, base: as of `Updates`.

        Raises:
            PushRefused: some engine cannot merge it, or nobody but the trainer; says why.
        """
        made: list[Update] = []
        for answers in await self._trainer.everywhere(self._try(weights, base, made, replicas)):
            for replica in replicas:
                for worker, ready in zip(replica.workers, answers.get(replica.index, ()), strict=False):
                    worker["ready"] = [made[0].digest] if ready else []
        self._last = made[0].digest
        return made[0]

    async def _try(
        self, weights: MergedWeights, base: Filler, made: list[Update], replicas: Sequence[Replica]
    ) -> dict[int, list[bool]]:
        update = await self._trainer.blocking(lambda: self._updates(weights, base))
        made.append(update)
        ready: dict[int, list[bool]] = {}

        async def ask(replica: Replica) -> None:
            if all(update.digest in worker["ready"] for worker in replica.workers):
                return
            call = partial(replica.handle.rpc, "examine_update", digest=update.digest, base=base.digest)
            answers = await call()
            if any("unknown" in answer for answer in answers):
                answers = await call(said=update.said)
            if found := [problem for answer in answers for problem in answer["problems"]]:
                raise PushRefused(
                    f"engine {replica.index} cannot merge by itself: {found[0]}"
                    f"{f' (and {len(found) - 1} more)' if len(found) > 1 else ''}; {self._updates.instead}"
                )
            ready[replica.index] = [answer["ready"] for answer in answers]

        await self._trainer.all_own(replicas, ask)
        return ready
