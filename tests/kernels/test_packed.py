"""Quantised sources: every backend decodes them, while it merges, to the bits of the decoded weight."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from backends import Backend
from helpers import assert_accurate, assert_same_bits, bits, empty, make_segment
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lora_merge import InvalidInput, Plan, Segment
from lora_merge.kernels.packed import INT8_STEP, Codes, Nested, Packed
from lora_merge.kernels.segments import FLOATS
from lora_merge.kernels.tracked.plan import TrackedPlan


def codes_of(
    count: int,
    dtype: torch.dtype,
    device: torch.device,
    block: int,
    *,
    int8: bool = False,
    nested: int = 0,
    seed: int = 0,
) -> Codes:
    """Random codes; `nested`: bytes that share a scale, 0 where absmax is float32."""
    draw = torch.Generator().manual_seed(seed)
    number = -(-count // block)
    absmax = torch.rand(number, generator=draw) * 0.05 + 1e-3
    values = torch.linspace(-1, 1, 16).sign() * torch.linspace(-1, 1, 16).abs() ** 1.3
    inner = None
    if nested:
        inner = Nested(
            torch.randn(256, generator=draw).to(device),
            (torch.rand(-(-number // nested), generator=draw) * 0.01).to(device),
            nested,
            torch.tensor(0.04).to(device),
        )
        absmax = torch.randint(0, 256, (number,), dtype=torch.uint8, generator=draw)
    size = count if int8 else -(-count // 2)
    data = torch.randint(-127, 128, (size,), generator=draw).to(torch.int8)
    data = data if int8 else data.view(torch.uint8)
    return Codes(data.to(device), dtype, absmax.to(device), block, None if int8 else values.to(device), inner)


def wanted(codes: Codes, count: int) -> Tensor:
    """What they stand for, by the definition, element by element."""
    data, out = codes.data.cpu(), []
    absmax = codes.absmax.cpu()
    if codes.nested is not None:
        n = codes.nested
        per = torch.arange(len(absmax)) // n.block
        absmax = n.code.cpu()[absmax.long()] * n.absmax.cpu()[per] + n.offset.cpu()
    for place in range(count):
        scale = absmax[place // codes.block]
        if codes.code is None:
            out.append(data[place].float() * scale * INT8_STEP)
        else:
            byte = int(data[place // 2])
            out.append(codes.code.cpu()[byte & 15 if place % 2 else byte >> 4] * scale)
    return torch.stack(out).to(codes.dtype)


def decoded(source: Packed, name: str = "copy") -> Tensor:
    """A copy by the backend."""
    out = torch.empty(source.shape, dtype=source.dtype, device=source.device)
    Plan([Segment(name, source, out)]).run()
    return out


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("nested", [0, 3])
@pytest.mark.parametrize("dtype", FLOATS)
def test_values(backend: Backend, dtype: torch.dtype, nested: int, int8: bool) -> None:
    """Every code, ragged blocks and rows; the definition itself, what torch gets of the tensor, and a copy."""
    for rows, cols, block in ((7, 37, 8), (5, 64, 64), (1, 131, 32), (33, 9, 9)):
        codes = codes_of(rows * cols, dtype, backend.device, block, int8=int8, nested=nested, seed=rows)
        source, right = codes.tensor((rows, cols)), wanted(codes, rows * cols).view(rows, cols)
        assert_same_bits(source.decoded().cpu(), right, "decoded")
        assert_same_bits(decoded(source).cpu(), right, f"{rows}x{cols} in blocks of {block}")


@settings(max_examples=40)
@given(data=st.data())
def test_merges_are_those_of_the_decoded_weight(backend: Backend, data: st.DataObject) -> None:
    """Bit by bit: any box, turned over or not, rank, dtypes, rounding, row factors; cut out of a larger weight."""
    most = 24 if backend.interpreted else 150
    rows, cols = data.draw(st.integers(1, most), "rows"), data.draw(st.integers(1, most), "cols")
    int8, nested = data.draw(st.booleans(), "int8"), data.draw(st.sampled_from([0, 2, 256]), "nested")
    block = data.draw(st.sampled_from([2, 16, 64, cols, 7]), "block")
    dtypes = [data.draw(st.sampled_from(FLOATS), "dtype") for _ in range(4)]
    rank = data.draw(st.sampled_from([0, 1, 8, 33, 130]), "rank")
    turned, scaled = data.draw(st.booleans(), "turned"), data.draw(st.booleans(), "scaled")
    rounding = data.draw(st.sampled_from(["nearest", "stochastic"]), "rounding")
    seed = 5 if rounding == "stochastic" else None
    codes = codes_of(rows * cols, dtypes[0], backend.device, block, int8=int8, nested=nested, seed=rows)
    whole = codes.tensor((rows, cols))
    top, left = data.draw(st.integers(0, rows - 1), "top"), data.draw(st.integers(0, cols - 1), "left")
    source = whole[top:, left:].t() if turned else whole[top:, left:]
    layout = data.draw(st.sampled_from(["contiguous", "transposed", "every second column"]), "layout")
    s = make_segment("w", *source.shape, rank, dtypes, backend.device)
    s = dataclasses.replace(s, source=source, destination=empty(layout, *source.shape, dtypes[1], backend.device))
    if scaled:
        s = dataclasses.replace(s, row_scale=torch.rand(source.shape[0], device=backend.device) + 0.5)
    like = dataclasses.replace(s, source=source.decoded(), destination=torch.empty_like(s.destination))
    Plan([s]).run(rounding=rounding, seed=seed)
    Plan([like]).run(rounding=rounding, seed=seed)
    assert_same_bits(s.destination, like.destination)
    assert_accurate(like, s.destination, stochastic=rounding == "stochastic")
    if scaled:
        norms, right = Plan([s]).row_norms()[0], Plan([like]).row_norms()[0]
        assert_same_bits(norms, right, "norms")


@settings(max_examples=60)
@given(data=st.data())
def test_whole_rows_of_blocks(backend: Backend, data: st.DataObject) -> None:
    """Likewise where rows are whole blocks, which is what kernels are fast for: several steps and units, strips that
    end early, rows left over, boxes that begin at a block or amid one, and steps in which only some warps have work."""
    small = not backend.compiled or backend.device.type == "cpu"
    rows = data.draw(st.integers(1, 40 if small else 1100), "rows")
    block = data.draw(st.sampled_from([8, 16, 64, 128]), "block")
    cols = block * data.draw(st.integers(1, max(1, (128 if small else 1024) // block)), "blocks a row")
    kind = data.draw(st.sampled_from(["4 bits", "4 bits, nested", "int8", "int8, nested"]), "kind")
    block = cols if kind == "int8" else block
    nested = data.draw(st.sampled_from([1, 3, 256]), "nested") if "nested" in kind else 0
    dtypes = [data.draw(st.sampled_from(FLOATS), "dtype") for _ in range(2)]
    dtypes += [data.draw(st.sampled_from(FLOATS), "adapters")] * 2
    rank = data.draw(st.sampled_from([0, 4, 8, 32, 64, 72]), "rank")
    top = data.draw(st.sampled_from([0, 1, rows // 2]), "top")
    left = data.draw(st.sampled_from([0, 8, 24, 4]), "left") % cols
    end = data.draw(st.sampled_from([0, 8, 3]), "end")
    turned, scaled = data.draw(st.integers(0, 3), "turned") == 0, data.draw(st.integers(0, 3), "scaled") == 0
    seed = data.draw(st.sampled_from([None, None, 5]), "seed")
    codes = codes_of(
        rows * cols, dtypes[0], backend.device, block, int8="int8" in kind, nested=nested, seed=rows + cols
    )
    source = codes.tensor((rows, cols))[top:, left : max(cols - end, left + 1)]
    source = source.t() if turned else source
    s = dataclasses.replace(make_segment("w", *source.shape, rank, dtypes, backend.device), source=source)
    if scaled:
        s = dataclasses.replace(s, row_scale=torch.rand(source.shape[0], device=backend.device) + 0.5)
    like = dataclasses.replace(s, source=source.decoded(), destination=torch.empty_like(s.destination))
    rounding = "nearest" if seed is None else "stochastic"
    for segment in (s, like):
        Plan([segment]).run(rounding=rounding, seed=seed)
    assert_same_bits(s.destination, like.destination)
    assert_accurate(like, s.destination, stochastic=seed is not None)


def test_a_table_of_many(backend: Backend) -> None:
    """One launch of weights of all kinds and sizes: each unit finds its own codes, tables and scales; and again."""
    segments, likes = [], []
    sizes = (
        [(8, 64), (600, 256), (33, 192), (128, 1024), (7, 24), (513, 128)] if backend.compiled else [(8, 64), (9, 24)]
    )
    for number, (rows, cols) in enumerate(sizes * 3):
        int8, nested = number % 3 == 2, (0, 2, 256)[number % 3 if number % 2 else 0]
        codes = codes_of(
            rows * cols, torch.bfloat16, backend.device, cols if int8 else 8, int8=int8, nested=nested, seed=number
        )
        if codes.code is not None:
            codes.code.mul_(1 + number)  # no two weights have one table
        dtypes = [torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16]
        s = make_segment(f"w{number}", rows, cols, (32, 8, 64, 0)[number % 4], dtypes, backend.device)
        source = codes.tensor((rows, cols))
        segments.append(dataclasses.replace(s, source=source))
        likes.append(dataclasses.replace(s, source=source.decoded(), destination=torch.empty_like(s.destination)))
    plan, plain = Plan(segments), Plan(likes)
    plain.run()
    for _ in range(2):
        for s in segments:
            s.destination.zero_()
        plan.run()
        for s, like in zip(segments, likes, strict=True):
            assert_same_bits(s.destination, like.destination, s.name)


def test_shards_of_codes(backend: Backend) -> None:
    """A rank's codes begin anywhere at a whole byte: blocks that it shares with others are no matter."""
    codes = codes_of(40 * 24, torch.bfloat16, backend.device, 64, nested=4)
    right = wanted(codes, 40 * 24)
    for begin, end in ((0, 50), (50, 480), (174, 960)):
        part = dataclasses.replace(codes, data=codes.data[begin // 2 : end // 2].clone(), begin=begin)
        assert_same_bits(decoded(part.tensor().unsqueeze(0)).cpu()[0], right[begin:end])


def test_special_values(backend: Backend) -> None:
    """Zeros, infinities, NaN and overflow of absmax: what the products are in float32 and in the weight's dtype."""
    for dtype in FLOATS:
        codes = codes_of(6 * 16, dtype, backend.device, 16)
        codes.absmax.copy_(torch.tensor([0.0, float("inf"), float("nan"), 3e38, -1.0, 1e-41]))
        got, right = decoded(codes.tensor((6, 16))).cpu(), wanted(codes, 96).view(6, 16)
        assert torch.equal(got.isnan(), right.isnan())
        assert_same_bits(got.nan_to_num(7.0), right.nan_to_num(7.0), str(dtype))


@pytest.mark.parametrize("kind", ["4 bits", "4 bits, nested", "int8"])
def test_special_values_of_whole_rows(backend: Backend, kind: str) -> None:
    """Likewise under an adapter, in rows of whole blocks, which kernels are fast for; what has no value in one block
    stays there. A quantised absmax overflows, and is infinite, by its own scale and offset."""
    rows, cols = (48, 128) if backend.compiled else (8, 64)
    special = torch.tensor([0.0, float("inf"), float("nan"), 3e38, -1.0, 1e-41])
    for dtype in FLOATS:
        codes = codes_of(
            rows * cols,
            dtype,
            backend.device,
            cols if kind == "int8" else 64,
            int8=kind == "int8",
            nested=2 if "nested" in kind else 0,
        )
        scales = codes.absmax if codes.nested is None else codes.nested.absmax
        scales.copy_(special.repeat(-(-scales.numel() // len(special)))[: scales.numel()])
        s = make_segment("w", rows, cols, 8, [dtype] * 4, backend.device)
        s = dataclasses.replace(s, source=codes.tensor((rows, cols)))
        like = dataclasses.replace(s, source=s.source.decoded(), destination=torch.empty_like(s.destination))
        Plan([s]).run()
        Plan([like]).run()
        got, right = s.destination.cpu(), like.destination.cpu()
        assert right.isnan().any()
        assert right.isfinite().any()
        assert torch.equal(got.isnan(), right.isnan())
        assert_same_bits(got.nan_to_num(7.0), right.nan_to_num(7.0), str(dtype))


def test_what_a_packed_tensor_is() -> None:
    codes = codes_of(12 * 10, torch.bfloat16, torch.device("cpu"), 8)
    packed, plain = codes.tensor((12, 10)), wanted(codes, 120).view(12, 10)
    assert (packed.shape, packed.dtype, packed.stride()) == (plain.shape, plain.dtype, plain.stride())
    views = (
        lambda t: t.t()[2:5, 1:], lambda t: t.view(-1)[7:99], lambda t: t.unbind(0)[3], lambda t: t.narrow(1, 3, 5),
        lambda t: t.split(5)[1], lambda t: t.view(3, 4, 10)[1].unsqueeze(0), lambda t: t.detach().flatten(),
    )  # fmt: skip
    for view in views:
        got, right = view(packed), view(plain)
        assert isinstance(got, Packed)
        assert got.stride() == right.stride()
        assert_same_bits(got.decoded(), right)
    assert_same_bits(packed.double() @ torch.ones(10, 2).double(), plain.double() @ torch.ones(10, 2).double())
    assert_same_bits(torch.empty_like(plain).copy_(packed), plain)
    for write in (lambda: packed.zero_(), lambda: packed[2:].copy_(plain[2:]), lambda: packed.t().add_(1)):
        with pytest.raises(InvalidInput, match="cannot be written"):
            write()


def test_refused(backend: Backend) -> None:
    """Quantised weights are read; what is written, and the adapters, are plain."""
    packed = codes_of(64, torch.bfloat16, backend.device, 8).tensor((8, 8))
    plain = torch.zeros(8, 8, dtype=torch.bfloat16, device=backend.device)
    ones = torch.ones(8, 8, device=backend.device)
    scaled = Plan([Segment("w", packed, packed, ones, ones, row_scale=ones[0].contiguous())])
    scaled.row_norms()
    with pytest.raises(InvalidInput, match="w: a quantised weight cannot be written"):
        scaled.run()
    for s in (
        Segment("w", plain, packed),
        Segment("w", packed, packed, ones, ones),
        Segment("w", plain, plain, packed, ones),
    ):
        with pytest.raises(InvalidInput, match="must be a plain tensor, got a quantised one"):
            Plan([s])
    with pytest.raises(InvalidInput):
        TrackedPlan([Segment("w", packed, packed, ones, ones)])
    codes = packed.codes.data
    with pytest.raises(InvalidInput, match="overlaps what w reads"):
        Plan(
            [
                Segment("w", packed, torch.empty_like(plain)),
                Segment("x", ones[:1].to(torch.uint8), codes[:8].view(1, 8)),
            ]
        )


def test_codes_are_not_written(backend: Backend) -> None:
    codes = codes_of(1024, torch.bfloat16, backend.device, 64, nested=2)
    before = [bits(t).clone() for t in codes.tensors]
    decoded(codes.tensor((32, 32)))
    assert all(torch.equal(bits(t), b) for t, b in zip(codes.tensors, before, strict=True))
