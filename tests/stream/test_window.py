"""Boxes of tensors: windows of views, buckets of boxes, checksums that add up; held to plain slicing."""

from __future__ import annotations

from math import prod

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from lora_merge.shards import Box, cut
from lora_merge.stream.buckets import ALIGNMENT, Meta, checksum, combined, from_json, lay_out_parts, metas, to_json
from lora_merge.stream.window import window_of

SHAPES = st.lists(st.sampled_from([1, 2, 3, 5]), min_size=1, max_size=4)


def box_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return start, tuple(draw(st.integers(1, n - s)) for n, s in zip(shape, start, strict=True))


@hypothesis.given(st.data())
@hypothesis.settings(deadline=None, max_examples=200)
def test_a_window_is_its_view(data: st.DataObject) -> None:
    shape = tuple(data.draw(SHAPES))
    tensor = torch.arange(prod(shape)).view(shape)
    view = cut(tensor, box_in(data.draw, shape)).permute(data.draw(st.permutations(range(len(shape)))))
    if data.draw(st.booleans()):
        view = view.squeeze()
    window = window_of((int(view.storage_offset()), view.shape, view.stride()), tensor.shape, tensor.stride())
    assert window is not None
    assert torch.equal(window.fold(cut(tensor, window.box)), view)
    assert torch.equal(window.unfold(view), cut(tensor, window.box))
    inner = box_in(data.draw, tuple(view.shape))
    outer = window.outer(inner)
    assert torch.equal(window.fold(cut(tensor, outer)), cut(view, inner))
    assert window.inner(outer) == inner


@pytest.mark.parametrize("view", [(0, (2, 3), (6, 2)), (0, (12,), (1,)), (4, (1, 4), (4, 1))])
def test_what_is_no_box_has_no_window(view: tuple[int, tuple[int, ...], tuple[int, ...]]) -> None:
    """Every second column; rows run into each other; a row that goes on in the next one."""
    assert window_of(view, (2, 6), (6, 1)) is None


@hypothesis.given(st.data())
@hypothesis.settings(deadline=None, max_examples=100)
def test_checksums_of_boxes_add_up(data: st.DataObject) -> None:
    shape = tuple(data.draw(SHAPES))
    tensor = torch.randn(shape).to(data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float64])))
    dim = data.draw(st.integers(0, len(shape) - 1))
    at = data.draw(st.integers(0, shape[dim]))
    start = tuple(at if d == dim else 0 for d in range(len(shape)))
    parts = [checksum(tensor.narrow(dim, 0, at), (0,) * len(shape), shape),
             checksum(tensor.narrow(dim, at, shape[dim] - at), start, shape)]  # fmt: skip
    assert combined(parts) == checksum(tensor)


@hypothesis.given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=20), st.data())
@hypothesis.settings(deadline=None, max_examples=50)
def test_parts_cover_every_element_once(shapes: list[tuple[int, int]], data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([1, 2, 3]))
    bucket_bytes = data.draw(st.sampled_from([256, 1000, 4096, 1 << 20]))
    sent: list[list[tuple[Meta, Box]]] = [[] for _ in range(ranks)]
    for i, shape in enumerate(shapes):
        sent[i % ranks].append((Meta(str(i), torch.bfloat16, shape), ((0, 0), shape)))
    table, sizes = lay_out_parts(sent, bucket_bytes)
    assert from_json(to_json(table)) == table
    seen = {name: torch.zeros(meta.shape, dtype=torch.int32) for name, meta in metas(table).items()}
    for slots, parts in zip(table, sizes, strict=True):
        assert max(parts) <= max(bucket_bytes // ranks // ALIGNMENT, 1) * ALIGNMENT
        for slot in slots:
            cut(seen[slot.name], slot.box).add_(1)
    assert len(seen) == len(shapes)
    assert all(bool((count == 1).all()) for count in seen.values())
