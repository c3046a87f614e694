"""The roles of the kernel for compute capability 9 in every shape that is chosen: nobody waits for ever, or reads what
is not there yet, or no longer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hopper_roles import Launch, Stuck

from tests.kernels.test_launch_shapes import NATIVE, block

EXTRA = 1088
"""Bytes of the journal beside a box."""
MANY_RANK = 64
"""kManyRank: up to it three groups multiply where merges are tracked."""
UNITS = ([1], [2], [3], [1, 1], [3, 1, 1, 2], [1] * 12, [2, 1] * 5, [7, 7], [])


def chosen(eight_bits: bool = False) -> list[tuple[int, ...]]:
    """Boxes, held, stages, planes, products, chunks of a product, groups, whether lora_A is ahead; each with the most
    chunks. `eight_bits`: those of results of 8 bits, else of merges and tracked ones."""
    found = {}
    for planes in (1, 2, 3):
        for extra, products in ((0, 1),) if eight_bits else ((0, 1), (EXTRA, 1), (EXTRA, 2)):
            for rank in range(1, products * 32 + 1 if planes == 3 else 513):
                ahead = eight_bits or extra > 0
                tiles = NATIVE.hopper_tiles(rank, planes, extra, block(228), ahead)
                if not tiles or (products > 1 and rank < 64):
                    continue
                strip, held, stages = tiles
                many = extra > 0 and (planes == 3 or (planes == 1 and rank <= MANY_RANK and strip == 256))
                groups = (4 if planes == 1 else 3) if eight_bits else 3 if many else 2
                key = strip // 64, held, stages, planes, products, groups, ahead
                found[key] = max(-(-rank // 32) // products, 1)
    return [(*key[:5], chunks, *key[5:]) for key, chunks in found.items()]


@pytest.mark.parametrize("shape", chosen(), ids=lambda shape: "-".join(map(str, shape)))
def test_a_shape(shape: Sequence[int]) -> None:
    for units in UNITS:
        for seed in range(6):
            Launch(*shape[:7], units, ahead=bool(shape[7])).run(seed)


@pytest.mark.parametrize("shape", [s for s in chosen(eight_bits=True) if s[0] == 4], ids=str)
def test_results_of_eight_bits(shape: Sequence[int]) -> None:
    """Groups have two boxes side by side, as many as there are registers for; of blocks the upper tile waits for the
    lower one."""
    for blocks in (False, True):
        for units in UNITS:
            for seed in range(6):
                Launch(*shape[:7], units, ahead=True, in_pairs=True, blocks=blocks).run(seed)


def test_the_model_sees_what_goes_wrong() -> None:
    """Three groups that share strips of two boxes: one leaves lora_A that another one still reads."""
    wrong = 0
    for seed in range(20):
        try:
            Launch(2, 3, 2, 1, 1, 1, 3, [2, 1] * 6).run(seed)
        except (Stuck, AssertionError):
            wrong += 1
    assert wrong
