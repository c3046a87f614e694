"""Plans pushes of several tenants: the merged weights of one, then the factors of all, in the same push."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...choices import Merge
from ...errors import PushRefused, UnsupportedAdapter
from ...stream.bucket_writer import BucketWriter
from ...stream.weights import MergedWeights
from ..payload.adapter import AdapterBuilder, AdapterSource
from ..payload.tenants import TenantsSource, rank_of, side_by_side
from ..tenants import Tenants
from ..transport.routing import Route
from .channels import Trainer
from .negotiators import check_modules, lora_limits
from .planner import PushPlanner, Transfer
from .replica import Replica, SyncReport

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM takes as `max_lora_rank`."""
_ALONE = "; or push it alone, without tenants"


class TenantPlanner(PushPlanner):
    """Plans pushes of a model's tenants.

    Engines hold nothing of the tenants beside the merged one from the moment when its weights change until all have
    come: those before were relative to other weights.

    Args:
        weights, base, merge: see `PushPlanner`.
        tenants: which, and which of them is merged.
    """

    def __init__(
        self, trainer: Trainer, weights: MergedWeights, base: MergedWeights, merge: Merge, tenants: Tenants
    ) -> None:
        super().__init__(trainer, weights, base, merge)
        self._tenants, self._slots = tenants, TenantNegotiator(trainer, weights, tenants.names)

    def release(self) -> None:
        super().release()
        self._slots.release()

    async def __call__(
        self, replicas: Sequence[Replica], report: SyncReport, verify: bool, read: BucketWriter | None
    ) -> list[Transfer]:
        order = self._tenants.order
        if any(other != order for other in await self._trainer.gather(order)):
            raise PushRefused("the trainer's ranks push other tenants, or merge another one: name the same on each")
        check_serves(replicas, len(order))
        transfers = await super().__call__(replicas, report, verify, read)
        fits = self._weights if report.merge == "trainer" else self._base
        source = await self._slots(replicas, order, fits.renames)
        state = replace(transfers[-1].state, tenants=order)
        return [*transfers, Transfer(state, source, replicas, Route.of_buckets(source))]


def check_serves(replicas: Sequence[Replica], count: int) -> None:
    """Raise `PushRefused` if some engine cannot serve so many tenants."""
    for replica in replicas:
        if replica.workers[0].no_adapters:
            raise PushRefused(f"engine {replica.index} cannot serve tenants: {replica.workers[0].no_adapters}")
        for worker in replica.workers:
            if worker.lora is None:
                raise PushRefused(
                    f"engine {replica.index} was started without enable_lora=True, and all tenants but the merged one "
                    "are LoRA slots of it"
                )
            if worker.lora.room < count:
                raise PushRefused(
                    f"engine {replica.index} keeps {worker.lora.room} adapters (max_cpu_loras), fewer than the "
                    f"{count} tenants, the merged one included: start it with max_cpu_loras={count}"
                )


class TenantNegotiator:
    """Makes the factors of tenants; kept while the adapters stay what they were.

    Args:
        weights: the stream of the model.
        names: of the tenants.
    """

    def __init__(self, trainer: Trainer, weights: MergedWeights, names: Sequence[str]) -> None:
        self._trainer = trainer
        self._build = {
            name: AdapterBuilder(MergedWeights(weights.model, bucket_bytes=weights.bucket_bytes, adapter_names=[name]))
            for name in names
        }
        self._made: TenantsSource | None = None
        self._served: tuple[Any, ...] = ()

    def release(self) -> None:
        for build in self._build.values():
            build.release()

    async def __call__(
        self, replicas: Sequence[Replica], order: Sequence[str], renames: Sequence[Sequence[str]]
    ) -> TenantsSource:
        """Return the factors of all tenants, after a check that the engines can serve them. Collective.

        Args:
            order: their names, that of the merged one first.
            renames: with which the stream of the weights fits the engines.

        Raises:
            PushRefused, UnsupportedAdapter: some engine cannot; says what of which tenant.
        """
        made, _ = await self._trainer.keep_and_gather(self._try(replicas, order, renames))
        return made

    async def _try(
        self, replicas: Sequence[Replica], order: Sequence[str], renames: Sequence[Sequence[str]]
    ) -> tuple[TenantsSource, None]:
        dtype, limit = lora_limits(replicas)
        sources = await self._trainer.blocking(lambda: [self._read(name, dtype, renames) for name in order])
        if self._made is None or not self._made.made_of(order, sources):
            self._made = TenantsSource(order, sources)
        served = self._made, limit, [worker.name for replica in replicas for worker in replica.workers]
        if self._served != served:
            check_ranks(order, sources, limit)
            # The modules of the merged tenant count as well: the others take its product off.
            whose: dict[str, str] = {}
            for name, source in zip(order, sources, strict=True):
                for module in source.modules:
                    whose.setdefault(module, f"tenant {name!r}: ")
            await check_modules(self._trainer, replicas, whose, _ALONE)
            self._served = served
        return self._made, None

    def _read(self, name: str, dtype: torch.dtype, renames: Sequence[Sequence[str]]) -> AdapterSource:
        try:
            source = self._build[name](dtype, renames)
        except UnsupportedAdapter as error:
            why = str(error).partition("; push with mode=")[0]
            raise UnsupportedAdapter(f"tenants (seen at {name!r}): {why}{_ALONE}") from None
        if not source.modules:
            raise PushRefused(f"tenant {name!r} adapts nothing that an engine could serve as an adapter")
        return source


def check_ranks(order: Sequence[str], sources: Sequence[AdapterSource], limit: int) -> None:
    """Raise `PushRefused` if a tenant and the merged one side by side have a rank above what engines serve."""
    ranks = [rank_of({slot.name: slot.shape for slot in source.table[0]}) for source in sources]
    for name, own in zip(order[1:], ranks[1:], strict=True):
        rank = side_by_side(own, ranks[0])
        if rank > limit:
            enough = next((known for known in _RANKS if known >= rank), None)
            start = "" if enough is None else f": start it with max_lora_rank={enough}"
            raise PushRefused(
                f"tenant {name!r} beside the merged {order[0]!r} has rank {rank} (both ranks, side by side), above the "
                f"engine's max_lora_rank {limit}{start}{_ALONE}"
            )
