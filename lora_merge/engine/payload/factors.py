"""The adapters' factors of an update: the slots that they fill, and how each rank gets the parts that it sends."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...models.delta import Delta
from ...models.operands import Operands, Turn
from ...models.staging import Storages
from ...shards import Box, Shard
from ...shards.parts import Parts, Wanted
from ...shards.ranks import Ranks
from ...stream.buckets import Meta
from ..transport.routing import WorkerId
from .recipients import Share


def slots_of(deltas: Sequence[Delta], shares: Sequence[Share]) -> Iterator[tuple[frozenset[WorkerId] | None, Meta]]:
    """Yield the slots of all factors, each with the workers that take it (None: all)."""
    for share, side, slot, factor in _factors(deltas, shares):
        yield share.recipients, Meta(slot, factor.dtype, _shape(factor, share, deltas[share.number].experts or 1, side))
    for number, delta in enumerate(deltas):
        if delta.magnitude is not None:
            them = {share.recipients for share in shares if share.number == number}
            together = None if None in them else frozenset().union(*(some for some in them if some is not None))
            yield together, Meta(f"{number}.row_scale", torch.float32, (delta.shape[0],))


def _factors(deltas: Sequence[Delta], shares: Sequence[Share]) -> Iterator[tuple[Share, str, str, Shard]]:
    """Yield the factors of each share: the share, "lora_A" or "lora_B", the slot's name, the factor of all experts."""
    for share in shares:
        for which, f in enumerate(deltas[share.number].factors):
            for side, factor in (("lora_A", f.lora_A), ("lora_B", f.lora_B)):
                yield share, side, f"{share.number}.{share.first}.{which}.{side}", factor


def _shape(factor: Shard, share: Share, experts: int, side: str) -> tuple[int, ...]:
    """Return the shape of a share's part of a factor."""
    if share.many == experts:
        return factor.shape
    rows, cols = factor.shape
    return (rows // experts * share.many, cols) if side == "lora_A" else (rows, cols // experts * share.many)


class GatheredFactors:
    """The factors of deltas on this rank: all of them, or those parts that some workers take.

    The factors of a delta are gathered where all ranks want it, or DoRA takes the norms of its rows; of the others each
    rank receives what it wants.

    Args:
        deltas, shares: the same ones in the same order on every rank.
        workers: whose shares are wanted here; None for all shares.
        ranks: making it and `refresh` are collective over them.

    Attributes:
        tensors: what is wanted, by its slot's name, as of the last `refresh`: as many elements in the same order.
    """

    def __init__(
        self,
        deltas: Sequence[Delta],
        shares: Sequence[Share],
        workers: Container[WorkerId] | None,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self._workers = workers
        dealt = frozenset[int]() if workers is None or ranks.alone else _dealt(deltas, shares, ranks)
        gathered = [delta for number, delta in enumerate(deltas) if number not in dealt]
        everything = {delta.name for delta in gathered}
        self._operands = Operands([Turn(gathered, everything=everything)], ranks, device)
        self.tensors: dict[str, Tensor] = {}
        names: list[str] = []
        cuts: list[Shard] = []
        numbers: dict[int, int] = {}  # of what is dealt, by id of the factor
        for delta in (deltas[number] for number in sorted(dealt)):
            for f in delta.factors:
                for factor, seen in ((f.lora_A, f.lora_A), (f.lora_B, _by_expert(f.lora_B, delta))):
                    assert seen is not None
                    numbers[id(factor)] = len(cuts)
                    names.append(delta.name)
                    cuts.append(seen)
        wanted: dict[str, Wanted] = {}
        for share, side, slot, factor in _factors(deltas, shares):
            delta = deltas[share.number]
            if not self.for_some_of(share.recipients):
                continue
            if share.number in dealt:
                number = numbers[id(factor)]
                wanted[slot] = number, _box(cuts[number], share, delta.experts, side)
            else:
                self.tensors[slot] = _some(self._operands.whole(factor), delta, share, side)
        for number, delta in enumerate(deltas):
            if (scale := self._operands.row_scale(delta)) is not None:
                self.tensors[f"{number}.row_scale"] = scale
        self._parts = Parts(names, cuts, list(wanted.values()), ranks, device) if dealt else None
        if self._parts is not None:
            self.tensors |= zip(wanted, self._parts.tensors, strict=True)

    def for_some_of(self, recipients: frozenset[WorkerId] | None) -> bool:
        """Return True if what these workers take (None: all) is wanted here."""
        return self._workers is None or recipients is None or any(place in self._workers for place in recipients)

    @property
    def nbytes(self) -> int:
        """Bytes that `refresh` receives from other ranks."""
        return self._operands.nbytes + (0 if self._parts is None else self._parts.nbytes)

    def refresh(self, storages: Storages | None = None) -> None:
        """Read the live adapters again, on the current stream.

        An error of this rank is raised after the collectives.

        Args:
            storages: see `Operands.refresh`.
        """
        try:
            self._operands.refresh(storages=storages)
        finally:
            if self._parts is not None:
                self._parts.run()

    def release(self) -> None:
        self._operands.release()
        if self._parts is not None:
            self._parts.release()


def _dealt(deltas: Sequence[Delta], shares: Sequence[Share], ranks: Ranks) -> frozenset[int]:
    """Return the numbers of the deltas whose factors go to each rank as it wants them: the same numbers on every
    rank."""
    some = {share.number for share in shares if share.recipients is not None}
    fit = [
        n
        for n in some
        if deltas[n].magnitude is None and all(_by_expert(f.lora_B, deltas[n]) for f in deltas[n].factors)
    ]
    return frozenset[int].intersection(*map(frozenset, ranks.gather(fit)))


def _by_expert(lora_B: Shard, delta: Delta) -> Shard | None:
    """View lora_B of fused experts `[out, r*E]` as `[out*r, E]`, so that some experts are a box of it; None where a
    piece has no such view. That of one matrix is returned as it is."""
    if delta.experts is None:
        return lora_B
    rank = lora_B.shape[1] // delta.experts
    pieces = []
    for piece in lora_B.pieces:
        tensor = piece.tensor
        if tensor.shape[1] != lora_B.shape[1] or tensor.stride(0) != tensor.shape[1] * tensor.stride(1):
            return None
        pieces.append(
            replace(piece, start=(piece.start[0] * rank, 0), tensor=tensor.view(len(tensor) * rank, delta.experts))
        )
    return replace(lora_B, shape=(lora_B.shape[0] * rank, delta.experts), pieces=tuple(pieces))


def _some(whole: Tensor, delta: Delta, share: Share, side: str) -> Tensor:
    """Return a share's part of a factor that is here whole."""
    experts = delta.experts or 1
    if share.many == experts:
        return whole
    some = slice(share.first, share.first + share.many)
    if side == "lora_A":
        return whole.view(experts, -1, delta.shape[1])[some]
    cut = whole.view(delta.shape[0], -1, experts)[:, :, some]
    one = cut.stride(0) == cut.shape[1] * cut.stride(1)
    return cut.view(-1, share.many) if one else cut  # one copy, not one for each row


def _box(shard: Shard, share: Share, experts: int | None, side: str) -> Box:
    """Return the box of a factor, as `_by_expert` returns it, that goes in a share."""
    if experts is None:
        return shard.box
    if side == "lora_A":
        rank = shard.shape[0] // experts
        return (share.first * rank, 0), (share.many * rank, shard.shape[1])
    return (0, share.first), (shard.shape[0], share.many)
