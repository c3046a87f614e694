"""Who sends what: of every tensor, each element has one owner among the ranks that hold it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..errors import InvalidInput
from ..ranks import Ranks
from . import Box, Shard, numel


def divide(names: Sequence[str], shards: Sequence[Shard], ranks: Ranks) -> list[list[list[Box]]]:
    """For each shard and each rank the boxes that the rank owns; collective, and the same on every rank.

    A box that several ranks hold (replicas) has one owner; owners take turns.

    Raises:
        InvalidInput: the boxes of all ranks do not make up the whole tensor; names it.
    """
    held = ranks.gather([shard.boxes for shard in shards])
    return [
        _divide(name, shard, [boxes[index] for boxes in held], index)
        for index, (name, shard) in enumerate(zip(names, shards, strict=True))
    ]


def _divide(name: str, shard: Shard, held: Sequence[Sequence[Box]], turn: int) -> list[list[Box]]:
    holders: dict[Box, list[int]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            holders.setdefault(box, []).append(rank)
    whole = ((0,) * len(shard.shape), shard.shape)
    if whole in holders:  # a rank that holds everything beside others that hold parts
        holders = {whole: holders[whole]}
    if numel(list(holders)) != prod(shard.shape):
        raise InvalidInput(
            f"{name}: the ranks hold {numel(list(holders))} of {prod(shard.shape)} elements, in the boxes "
            f"{sorted(holders)}; do all ranks of the model take part?"
        )
    owned: list[list[Box]] = [[] for _ in held]
    for box, owners in holders.items():
        owned[owners[turn % len(owners)]].append(box)
    return owned
