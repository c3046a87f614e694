"""Pieces of a parameter that lie in one tensor of an engine, and those that do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lora_merge.engine.push.places import joined
from lora_merge.shards import Box


def experts(held: Tensor, rows: int) -> list[tuple[Box, Tensor]]:
    """Pieces of one expert each, `rows` of its rows at a time, as a checkpoint has gate and up."""
    count, height, width = held.shape
    return [
        (((e, r, 0), (1, rows, width)), held[e : e + 1, r : r + rows])
        for e in range(count)
        for r in range(0, height, rows)
    ]


def padded() -> Tensor:
    return torch.randn(4, 9, 5)[:, 1:7]


@pytest.mark.parametrize("held", [torch.randn(4, 6, 5), padded(), torch.randn(1, 6, 5), torch.randn(4, 1, 5)])
@pytest.mark.parametrize("halves", [False, True])
def test_experts_one_by_one(held: Tensor, halves: bool) -> None:
    rows = held.shape[1] // 2 if halves and held.shape[1] > 1 else held.shape[1]
    pieces = experts(held, rows)
    for order in (pieces, pieces[::-1]):
        found = joined(held.shape, order)
        assert found is not None
        assert torch.equal(found, held)
        assert found.data_ptr() == held.data_ptr()
        assert found.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
        assert not found.is_inference()


def test_a_whole_one() -> None:
    with torch.inference_mode():
        held = torch.randn(7, 4)[1:6]
    found = joined((5, 4), [(((0, 0), (5, 4)), held)])
    assert found is not None
    assert torch.equal(found, held)
    assert not found.is_inference(), "a backward pass can keep it"
    assert joined((), [(((), ()), torch.tensor(3.0))]) is not None


BROKEN: dict[str, Callable[[Tensor], list[tuple[Box, Tensor]]]] = {
    "one is missing": lambda held: experts(held, 3)[:-1],
    "the first is missing": lambda held: experts(held, 3)[1:],
    "one lies elsewhere": lambda held: [*experts(held, 3)[:-1], (experts(held, 3)[-1][0], torch.randn(1, 3, 5))],
    "two have changed places": lambda held: [
        (box, held[[0, 2, 1, 3][box[0][0]], box[0][1] : box[0][1] + 3][None]) for box, _ in experts(held, 3)
    ],
    "up before gate": lambda held: [
        (box, held[box[0][0] : box[0][0] + 1, 3 - box[0][1] : 6 - box[0][1]]) for box, _ in experts(held, 3)
    ],
    "laid out by columns": lambda held: [
        *experts(held, 6)[:-1],
        (experts(held, 6)[-1][0], held[3].t().contiguous().t()[None]),
    ],
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_lies_apart(kind: str) -> None:
    assert joined((4, 6, 5), BROKEN[kind](torch.randn(4, 6, 5))) is None
