"""Which rank sends which element: of every tensor, each element has one owner among the ranks that hold it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from ..errors import InvalidInput
from . import Box, Shard, numel, overlap
from .ranks import Ranks


def divide(names: Sequence[str], shards: Sequence[Shard], ranks: Ranks) -> list[list[list[Box]]]:
    """Return for each shard and each rank the boxes that the rank owns; collective, and the same on every rank.

    A box that several ranks hold (replicas) has one owner; owners take turns.

    Raises:
        InvalidInput: the boxes of all ranks do not make up the whole tensor, each element once; names it.
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
    if not apart(holders):  # as many elements as there are, so that others are missing
        raise InvalidInput(
            f"{name}: the ranks hold boxes of {shard.shape} that overlap and leave others out, {sorted(holders)}; do "
            "all ranks cut the tensor alike?"
        )
    owned: list[list[Box]] = [[] for _ in held]
    for box, owners in holders.items():
        owned[owners[turn % len(owners)]].append(box)
    return owned


def apart(boxes: Iterable[Box]) -> bool:
    """Return True if no two of some boxes share an element."""
    boxes = list(boxes)
    starts = [set(along) for along in zip(*(start for start, _ in boxes), strict=True)]
    if not starts:
        return len(boxes) < 2
    dim = max(range(len(starts)), key=lambda at: len(starts[at]))  # cut most: few lie side by side along it
    begun: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[0][dim]):
        begun = [other for other in begun if other[0][dim] + other[1][dim] > box[0][dim]]
        if any(overlap(box, other) for other in begun):
            return False
        begun.append(box)
    return True
