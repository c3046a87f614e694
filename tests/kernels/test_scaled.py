"""Results of 8 bits: every backend against an oracle that searches the table of all e4m3 numbers, and bad input."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from backends import BACKENDS, forced
from torch import Tensor

from lora_merge import InvalidInput, Plan, Segment
from lora_merge.kernels.scaled.weights import SCALED_FROM, Scaled, put_ties, quantise, trials
from lora_merge.kernels.segments import copies

FP8 = torch.float8_e4m3fn
GROUPS = ["tensor", "channel", "block"]
TABLE = torch.arange(127, dtype=torch.uint8).view(FP8).float().numpy()
"""The e4m3 numbers from 0 up; number i has the bits i."""


# Triton's merges are scaled by tensor operations: nothing for its interpreter, which takes milliseconds for each tile.
@pytest.fixture(params=[param for param in BACKENDS if param.id != "triton"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Of a backend, which is forced."""
    return forced(request, monkeypatch).device


def nearest(y: np.ndarray) -> np.ndarray:
    """Bits of the nearest e4m3 number, ties to even ones; beyond the largest that one, and for NaN, too."""
    size = np.minimum(np.where(np.isnan(y), np.inf, np.abs(y)), 448).astype(np.float64)
    above = np.minimum(np.searchsorted(TABLE, size), 126)
    below = np.maximum(above - 1, 0)
    down, up = size - TABLE[below], TABLE[above] - size
    bits = np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    return (bits | (np.signbit(np.where(np.isnan(y), 1, y)).astype(np.int64) << 7)).astype(np.uint8)


def oracle(x: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Bits and scales of a whole weight, group by group, in NumPy's float32."""
    values, f = x.float().cpu().numpy(), np.float32
    rows, cols = values.shape
    down, across = {"tensor": (rows, cols), "channel": (1, cols), "block": (128, 128)}[group]
    bits = np.zeros(values.shape, dtype=np.uint8)
    scales = []
    with np.errstate(all="ignore"):
        for i in range(0, rows, down):
            for j in range(0, cols, across):
                part = values[i : i + down, j : j + across]
                largest = np.abs(part).max()
                if group == "tensor":
                    scale = f(largest / f(448))
                elif group == "channel":
                    scale = np.maximum(f(largest / f(448)), f(1 / f(448 * 512)))
                else:
                    scale = f(np.maximum(largest, f(1e-4)) * f(1 / 448))
                y = part / scale if group == "channel" else part * (f(1) / scale)
                bits[i : i + down, j : j + across] = nearest(y)
                scales.append(scale)
    return torch.from_numpy(bits), torch.tensor(np.array(scales, dtype=f))


def weight(rows: int, cols: int, group: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Scaled:
    """Memory for a weight of 8 bits, full of what nobody would write."""
    groups = {"tensor": 1, "channel": rows}.get(group, -(-rows // 128) * -(-cols // 128))
    data = torch.full((rows, cols), 0x7F, dtype=torch.uint8, device=device).view(FP8)
    return Scaled(data, torch.full((groups,), float("nan"), device=device), group, dtype)  # type: ignore[arg-type]


def adapter(rows: int, cols: int, rank: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows + cols + rank)
    a, b = torch.randn(rank, cols, generator=g) * 0.2, torch.randn(rows, rank, generator=g) * 0.2
    return a.to(device, dtype), b.to(device, dtype)


def base(rows: int, cols: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    w = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 0.05
    w[0, cols // 2] = 3.0
    return w.to(device, dtype)


def check(segments: list[Segment], target: Scaled, atol: int = 0, **run: Any) -> None:
    """Run it; compare with the oracle on what the same backend merges in 16 bits."""
    Plan(segments, [target]).run(**run)
    merged = torch.zeros(target.weight.shape, dtype=target.dtype, device=target.weight.device)
    begin = target.weight.data_ptr()
    for s in segments:
        row, col = divmod(s.destination.data_ptr() - begin, target.weight.shape[1])
        rows, cols = s.source.shape
        Plan([replace(s, destination=merged[row : row + rows, col : col + cols])]).run(**run)
    bits, scales = oracle(merged, target.group)
    assert torch.equal(target.scales.cpu().view(-1), scales)
    assert torch.equal(target.weight.cpu().view(torch.uint8), bits)


SHAPES = [(128, 128), (1000, 1200), (256, 384), (130, 200), (1, 8), (77, 1), (300, 129), (1024, 640), (513, 264)]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_bits(rows: int, cols: int, group: str, device: torch.device) -> None:
    """With bf16 and float32 adapters, ranks below, at and above a chunk, and without one; 72 in pairs."""
    narrow, wide = torch.bfloat16, torch.float32
    for rank, dtype in ((0, narrow), (1, wide), (8, narrow), (33, narrow), (72, wide)):
        w, target = base(rows, cols, torch.bfloat16, device), weight(rows, cols, group, device)
        a, b = adapter(rows, cols, rank, dtype, device) if rank else (None, None)
        check([Segment("w", w, target.weight, a, b, 0.5)], target)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("loaded", SCALED_FROM)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_of_bases(dtype: torch.dtype, loaded: torch.dtype, group: str, device: torch.device) -> None:
    """What is scaled was rounded to what the engine loads: an fp16 base in a bf16 engine was rounded to fp16."""
    for adapters, rank in ((torch.float32, 16), (torch.float32, 40), (dtype, 16), (dtype, 0)):
        w, target = base(260, 392, dtype, device), weight(260, 392, group, device, loaded)
        a, b = adapter(260, 392, rank, adapters, device) if rank else (None, None)
        check([Segment("w", w, target.weight, a, b, 0.5)], target)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("cut", [(128, 384), (100, 300), (8, 500)])
def test_fused(cut: tuple[int, int], group: str, device: torch.device) -> None:
    """Three tensors in one weight share scales, also in blocks that they divide; row factors, turned sources; one of
    them is merged in pairs."""
    rows, cols = 640, 256
    target = weight(rows, cols, group, device)
    segments = []
    for number, (first, last) in enumerate(zip((0, *cut), (*cut, rows), strict=True)):
        w = base(last - first, cols, torch.bfloat16, device, number) * (number + 1)
        kind = (40, torch.float32) if number == 2 else (16, torch.bfloat16)
        a, b = adapter(last - first, cols, *kind, device)
        scale = torch.rand(last - first, device=device) + 0.5 if number == 1 else None
        if number == 2:
            w = w.t().contiguous().t()
        segments.append(Segment(f"w{number}", w, target.weight[first:last], a, b, 0.5, scale))
    check(segments, target)


def test_columns_and_stochastic_rounding(device: torch.device) -> None:
    """Pieces of columns at borders of blocks; the random bits are those of a merge in 16 bits."""
    for group in GROUPS:
        target = weight(256, 640, group, device)
        w, (a, b) = base(256, 640, torch.bfloat16, device), adapter(256, 640, 16, torch.bfloat16, device)
        pieces = [(0, 128), (128, 512), (512, 640)]
        segments = [
            Segment("w", w[:, i:j], target.weight[:, i:j], a[:, i:j], b, 0.5, first=i, pitch=(640, 1))
            for i, j in pieces
        ]
        check(segments, target)
        check(segments, target, rounding="stochastic", seed=7)


@pytest.mark.parametrize("group", GROUPS)
def test_odd_values(group: str, device: torch.device) -> None:
    """Zeros, tiny numbers, large ones; infinity and NaN show in the scale of their group."""
    rows, cols = 256, 256
    zeros = torch.zeros(rows, cols, dtype=torch.bfloat16, device=device)
    tiny, huge = zeros.clone(), zeros.clone()
    tiny[3, 5], tiny[200, 100] = 1e-39, -1e-38
    huge[0, 0], huge[255, 255], huge[128] = 3.3e38, -3.3e38, 1.0
    for w in (zeros, tiny, huge):
        target = weight(rows, cols, group, device)
        check([Segment("w", w, target.weight)], target)
    for odd in (float("nan"), float("-inf")):
        w, target = base(rows, cols, torch.bfloat16, device), weight(rows, cols, group, device)
        w[200, 3] = odd
        Plan([Segment("w", w, target.weight)], [target]).run()
        hit = {"tensor": [0], "channel": [200], "block": [2]}[group]
        assert [i for i, x in enumerate(target.scales.tolist()) if not np.isfinite(x)] == hit


def test_ties_and_every_pair(device: torch.device) -> None:
    """All bf16 numbers of one binade over scales that make many ties."""
    x = torch.arange(256 * 256, dtype=torch.int32).view(256, 256)
    w = x.to(torch.int16).view(torch.bfloat16).to(device)
    w = torch.where(w.abs() < 1e30, w, 1.0).nan_to_num(1.0)
    a, b = torch.zeros(8, 256, device=device), torch.zeros(256, 8, device=device)
    for group in GROUPS:
        for largest in (448.0, 0.5, 3.0, 1.7734375):
            part = torch.where(w.abs() <= largest, w, largest).to(torch.bfloat16)
            for adapters in ((None, None), (a, b)):
                target = weight(256, 256, group, device)
                check([Segment("w", part, target.weight, *adapters)], target)


def test_copies_and_other_segments(device: torch.device) -> None:
    """`copies` keeps rows; experts; plain segments in the same plan; groups that are not written stay."""
    target = [weight(128, 256, "block", device) for _ in range(3)]
    stacked = torch.empty(3, 128, 256, dtype=torch.uint8, device=device).view(FP8)
    target = [replace(t, weight=stacked[e]) for e, t in enumerate(target)]
    w = torch.stack([base(128, 256, torch.bfloat16, device, e) for e in range(3)])
    plain = torch.empty(128, 256, dtype=torch.bfloat16, device=device)
    Plan([*copies("experts", w, stacked), *copies("bias", w[0], plain)], target).run()
    assert torch.equal(plain, w[0])
    for e in range(3):
        bits, scales = oracle(w[e], "block")
        assert torch.equal(stacked[e].cpu().view(torch.uint8), bits)
        assert torch.equal(target[e].scales.cpu(), scales)
    part = weight(256, 256, "block", device)
    Plan(copies("w", w[0], part.weight[128:]), [part]).run()
    assert part.scales.isnan().tolist() == [True, True, False, False]
    assert (part.weight[:128].view(torch.uint8) == 0x7F).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", GROUPS)
def test_experts(group: str, dtype: torch.dtype, device: torch.device) -> None:
    """As PEFT holds their adapters: lora_A one below the other, lora_B column by column among each other; gate and up
    in one matrix, a router without an adapter, and more of them than a launch takes as arguments."""
    experts, rank, cols = 20, 4, 128
    lora_A, _ = adapter(1, cols, experts * rank, dtype, device)
    _, lora_B = adapter(256, 1, rank * experts, dtype, device)
    w = torch.stack([base(256, cols, torch.bfloat16, device, e) for e in range(experts)])
    router = base(16, cols, torch.bfloat16, device, experts)
    targets = [*(weight(256, cols, group, device) for _ in range(experts)), weight(16, cols, group, device)]
    segments = []
    for e in range(experts):
        a, b = lora_A[e * rank : (e + 1) * rank], lora_B.view(256, rank, experts)[:, :, e]
        for part in (slice(0, 128), slice(128, 256)):
            segments.append(Segment(f"expert {e}", w[e, part], targets[e].weight[part], a, b[part], 0.5))
    Plan([*segments, Segment("router", router, targets[-1].weight)], targets).run()
    merged = torch.empty_like(w)
    Plan([replace(s, destination=merged.view(-1, 128, cols)[n]) for n, s in enumerate(segments)]).run()
    for what, target in zip([*merged, router], targets, strict=True):
        bits, scales = oracle(what, group)
        assert torch.equal(target.scales.cpu().view(-1), scales)
        assert torch.equal(target.weight.cpu().view(torch.uint8), bits)


def test_runs_again(device: torch.device) -> None:
    """What was the largest before does not count, and plans read what is there."""
    for group in GROUPS:
        w, target = base(256, 256, torch.bfloat16, device), weight(256, 256, group, device)
        plan = Plan([Segment("w", w, target.weight)], [target])
        w.mul_(1000)
        plan.run()
        w.mul_(0.001)
        plan.run()
        bits, scales = oracle(w, group)
        assert torch.equal(target.scales.cpu(), scales)
        assert torch.equal(target.weight.cpu().view(torch.uint8), bits)


def test_bad_input(device: torch.device) -> None:
    w = base(256, 256, torch.bfloat16, device)
    block, tensor = weight(256, 256, "block", device), weight(256, 256, "tensor", device)
    for segments, scaled, told in (
        ([Segment("w", w, block.weight)], [], "needs the weight that it is part of"),
        ([Segment("w", w, block.weight)], [tensor], "needs the weight that it is part of"),
        ([Segment("w", w[:128], tensor.weight[:128])], [tensor], "write whole groups"),
        ([Segment("w", w[:100], block.weight[:100])], [block], "write whole groups"),
        ([Segment("w", w[:, 64:], block.weight[:, 64:])], [block], "inside of a block"),
        ([Segment("w", w.t(), block.weight.t())], [block], "rows and columns"),
        ([Segment("w", w[::2], block.weight[::2])], [block], "rows and columns"),
        ([Segment("w", w.double(), block.weight)], [block], "only bfloat16, float16 and float32 convert"),
        ([], [replace(block, scales=block.scales[:3])], "4 contiguous float32"),
        ([], [replace(block, scales=block.scales.double())], "4 contiguous float32"),
        ([], [replace(block, weight=w)], "contiguous torch.float8_e4m3fn"),
        ([], [replace(block, group="row")], "must be one of tensor, channel, block"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidInput, match=told):
            Plan(segments, scaled)
    with pytest.raises(InvalidInput, match="must be bfloat16 or float16, got"):
        replace(block, dtype=torch.float32)
    assert (block.weight.view(torch.uint8) == 0x7F).all()
    assert block.scales.isnan().all()


@pytest.mark.gpu
def test_blocks_as_they_are_compiled() -> None:
    """The bits of a function that Triton compiled, of numbers in the middle between two for every scale that has any;
    the function is written as vLLM's."""

    def by_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
        (m, n), padded = x.shape, x.new_zeros(-(-x.shape[0] // 128) * 128, -(-x.shape[1] // 128) * 128)
        padded[:m, :n] = x
        blocks = padded.view(-1, 128, padded.shape[1] // 128, 128)
        scale = blocks.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448.0
        made = (blocks * (1.0 / scale)).to(FP8)
        return made.view_as(padded)[:m, :n].contiguous(), scale.view(blocks.shape[0], blocks.shape[2])

    compiled = torch.compile(by_blocks, dynamic=True)
    for number, (rows, cols) in enumerate([(2048, 2048), (4608, 3584), (1000, 1040), (3584, 18944)]):
        w = torch.randn(rows, cols, generator=torch.Generator().manual_seed(number)) * 0.1
        put_ties(w, number)
        x = w.cuda().bfloat16()
        values, scales = compiled(x)
        target = weight(rows, cols, "compiled", x.device)
        Plan([Segment("w", x, target.weight)], [target]).run()
        assert torch.equal(target.scales.view(scales.shape), scales)
        assert torch.equal(target.weight.view(torch.uint8), values.view(torch.uint8))
        exact = weight(rows, cols, "block", x.device)
        Plan([Segment("w", x, exact.weight)], [exact]).run()
        apart = (exact.weight.view(torch.uint8).int() - target.weight.view(torch.uint8).int()).abs()
        assert apart.max() <= 1


def test_ties_are_ties() -> None:
    """Numbers that are put into blocks are bf16, and an inverse with another last bit makes others of some."""
    w = torch.rand(256, 1152, generator=torch.Generator().manual_seed(0)) * 0.5
    put_ties(w, 0)
    x = w.bfloat16().float()
    seen = set()
    for block in x.view(2, 128, 9, 128).transpose(1, 2).reshape(18, 128, 128):
        scale = block.abs().max().clamp(min=1e-4) * torch.tensor(1 / 448)
        seen.add(float(scale) / 2.0 ** np.floor(np.log2(float(scale))))
        inverse = 1 / scale
        made = [(block * torch.nextafter(inverse, inverse * up)).to(FP8).view(torch.uint8) for up in (0.0, 2.0)]
        assert not torch.equal(*made)
    assert len(seen) == 18


def test_quantise_is_the_oracle() -> None:
    for group in GROUPS:
        x = base(300, 260, torch.bfloat16, torch.device("cpu"))
        found, scales = quantise(x, group)  # type: ignore[arg-type]
        bits, wanted = oracle(x, group)
        assert torch.equal(found.view(torch.uint8), bits)
        assert torch.equal(scales.view(-1), wanted)


@pytest.mark.parametrize("shape", [(128, 128), (16, 128), (1, 40), (16, 128, 128), (3, 128, 1), (8, 64, 32)])
def test_trials_tell_groups_apart(shape: tuple[int, ...]) -> None:
    """A weight of one block has as many scales as a tensor, one of a single row as a channel: their bits differ."""
    left = {frozenset(pair) for pair in combinations(("tensor", "channel", "block"), 2)}
    for trial in trials({"w": shape, "bias": shape[:1]}, {"w"}, prod(shape[:-2])):
        matrices = trial["w"].bfloat16().view(-1, *shape[-2:])
        made = {g: [quantise(m, g) for m in matrices] for g in ("tensor", "channel", "block")}  # type: ignore[arg-type]
        for pair in list(left):
            one, other = (made[group] for group in pair)
            pairs = zip(one, other, strict=True)
            if any(a.numel() != b.numel() or not torch.equal(a.view(-1), b.view(-1)) for (_, a), (_, b) in pairs):
                left.remove(pair)
    assert not left
