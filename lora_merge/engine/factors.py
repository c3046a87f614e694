"""The adapters' factors on their way: the slots of an update that they fill, and how what a rank sends comes to it."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..models.delta import Delta, Factors
from ..models.operands import Operands, Turn
from ..shards import Box, Shard
from ..shards.parts import Parts, Wanted
from ..shards.ranks import Ranks
from ..stream.buckets import Meta
from .shares import Share
from .transport import WorkerId


def slots_of(deltas: Sequence[Delta], shares: Sequence[Share]) -> Iterator[tuple[frozenset[WorkerId] | None, Meta]]:
    """All that goes of the deltas beside whole tensors, and who takes it."""
    for share in shares:
        for which, f in enumerate(deltas[share.number].factors):
            for name, shard in (("lora_A", f.lora_A), ("lora_B", f.lora_B)):
                yield share.takers, Meta(_name(share, which, name), shard.dtype, _shape(deltas, share, name, f))
    for number, delta in enumerate(deltas):
        if delta.magnitude is not None:
            them = {share.takers for share in shares if share.number == number}
            together = None if None in them else frozenset().union(*(some for some in them if some is not None))
            yield together, Meta(f"{number}.row_scale", torch.float32, (delta.shape[0],))


def _name(share: Share, which: int, factor: str) -> str:
    return f"{share.number}.{share.first}.{which}.{factor}"


def _shape(deltas: Sequence[Delta], share: Share, factor: str, f: Factors) -> tuple[int, ...]:
    """In which a factor goes: of some experts, as if there were no others."""
    experts = deltas[share.number].experts or 1
    if share.many == experts:
        return getattr(f, factor).shape
    rank = f.lora_A.shape[0] // experts
    if factor == "lora_A":
        return share.many * rank, f.lora_A.shape[1]
    return f.lora_B.shape[0], rank * share.many


class Brought:
    """The factors of deltas on this rank: all of them, or what of them some workers take.

    Where all ranks want a delta, or DoRA takes the norms of its rows, its factors are gathered; of the others each rank
    gets what it wants.

    Args:
        deltas, shares: the same ones in the same order on every rank.
        workers: whose shares are wanted here; None for all shares.
        ranks: making it and `refresh` are collective over them.
        device: where factors are brought to.

    Attributes:
        tensors: of what is wanted, by its slot's name: as of the last `refresh`; as many elements in the same order.
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
        wanted: list[tuple[str, Wanted]] = []
        shards: dict[
            int, tuple[int, str, Shard]
        ] = {}  # by id of the factor: its number, its delta's name, as it is cut
        for number in sorted(dealt):
            for f in deltas[number].factors:
                for factor in (f.lora_A, _by_expert(f.lora_B, deltas[number])):
                    assert factor is not None
                    shards[id(f.lora_A if factor is f.lora_A else f.lora_B)] = len(shards), deltas[number].name, factor
        for share in shares:
            delta = deltas[share.number]
            if self.for_some_of(share.takers):
                for which, f in enumerate(delta.factors):
                    for name, factor in (("lora_A", f.lora_A), ("lora_B", f.lora_B)):
                        slot = _name(share, which, name)
                        if share.number not in dealt:
                            self.tensors[slot] = self._gathered(delta, share, f, name)
                        else:
                            at, _, shard = shards[id(factor)]
                            wanted.append((slot, (at, _box(shard, share, delta.experts, name))))
        for number, delta in enumerate(deltas):
            if (scale := self._operands.row_scale(delta)) is not None:
                self.tensors[f"{number}.row_scale"] = scale
        self._parts: Parts | None = None
        if dealt:
            names, some = [name for _, name, _ in shards.values()], [shard for _, _, shard in shards.values()]
            self._parts = Parts(names, some, [one for _, one in wanted], ranks, device)
            self.tensors |= {slot: tensor for (slot, _), tensor in zip(wanted, self._parts.tensors, strict=True)}

    def _gathered(self, delta: Delta, share: Share, f: Factors, name: str) -> Tensor:
        """What a share has of a factor that is here whole."""
        whole, experts = self._operands.whole(getattr(f, name)), delta.experts or 1
        if share.many == experts:
            return whole
        some = slice(share.first, share.first + share.many)
        if name == "lora_A":
            return whole.view(experts, -1, delta.shape[1])[some]
        cut = whole.view(delta.shape[0], -1, experts)[:, :, some]
        one = cut.stride(0) == cut.shape[1] * cut.stride(1)
        return cut.view(-1, share.many) if one else cut  # one copy, not one for each row

    def for_some_of(self, takers: frozenset[WorkerId] | None) -> bool:
        """Whether what these workers take (None: all) is wanted here."""
        return self._workers is None or takers is None or any(place in self._workers for place in takers)

    @property
    def nbytes(self) -> int:
        """Bytes that `refresh` receives from other ranks."""
        return self._operands.nbytes + (0 if self._parts is None else self._parts.nbytes)

    def refresh(self) -> None:
        """Read the live adapters again, on the current stream.

        An error of this rank is raised after the collectives.
        """
        try:
            self._operands.refresh()
        finally:
            if self._parts is not None:
                self._parts.run()

    def release(self) -> None:
        """As `Plan.release`."""
        self._operands.release()
        if self._parts is not None:
            self._parts.release()


def _dealt(deltas: Sequence[Delta], shares: Sequence[Share], ranks: Ranks) -> frozenset[int]:
    """Numbers of the deltas of which each rank gets what it wants: the same on every rank."""
    some = {share.number for share in shares if share.takers is not None}
    fit = [
        n
        for n in some
        if deltas[n].magnitude is None and all(_by_expert(f.lora_B, deltas[n]) for f in deltas[n].factors)
    ]
    return frozenset[int].intersection(*map(frozenset, ranks.gather(fit)))


def _by_expert(lora_B: Shard, delta: Delta) -> Shard | None:
    """lora_B of fused experts `[out, r*E]` as `[out*r, E]`, so that some experts are a box of it; None where a piece
    cannot be seen so. That of one matrix as it is."""
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


def _box(shard: Shard, share: Share, experts: int | None, name: str) -> Box:
    """What of a factor, as `_by_expert` has it, goes in a share."""
    if experts is None:
        return shard.box
    if name == "lora_A":
        rank = shard.shape[0] // experts
        return (share.first * rank, 0), (share.many * rank, shard.shape[1])
    return (0, share.first), (shard.shape[0], share.many)
