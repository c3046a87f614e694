"""The CUDA kernel for compute capability 9: which segments it takes, and that its bits are the other kernel's."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from helpers import make_segment

from lora_merge import kernels
from lora_merge.kernels import cuda, cuda_hopper
from lora_merge.segments import Segment, pack

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
H200 = SimpleNamespace(shared_memory_per_block_optin=227 << 10, multi_processor_count=132)


def test_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of whole 16-byte vectors, one 16-bit dtype, adapters as the kernel stages them, ranks that fit."""
    monkeypatch.setattr(cuda_hopper, "_available", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    cpu = torch.device("cpu")

    def segment(
        rows: int = 64,
        cols: int = 256,
        rank: int = 32,
        dtypes: Sequence[torch.dtype] = (BF16,) * 4,
        layouts: Sequence[str] = ("contiguous",) * 4,
    ) -> Segment:
        return make_segment("w", rows, cols, rank, dtypes, cpu, layouts=layouts)

    def columns(begin: int) -> Segment:
        there = slice(begin, begin + 256)
        return Segment("w", whole.source[:, there], whole.destination[:, there], whole.lora_A[:, there], whole.lora_B)

    whole = segment(65, 512)
    taken = {
        "bf16": segment(),
        "fp16 base": segment(dtypes=(FP16, FP16, BF16, BF16)),
        "float32 adapters": segment(dtypes=(BF16, BF16, FP32, FP32)),
        "mixed adapters": segment(dtypes=(BF16, BF16, BF16, FP32)),
        "rank 352": segment(rank=352),
        "any lora_A": segment(layouts=("contiguous", "contiguous", "transposed", "contiguous")),
        "rows of a matrix": Segment("w", whole.source[1:], whole.destination[1:], whole.lora_A, whole.lora_B[1:]),
        "a strip": columns(8),
    }
    left = {
        "float32 base": segment(dtypes=(FP32, BF16, BF16, BF16)),
        "float32 result": segment(dtypes=(BF16, FP32, BF16, BF16)),
        "lora_B is not float32": segment(dtypes=(BF16, BF16, FP32, BF16)),
        "rank 33": segment(rank=33),
        "91 columns": segment(cols=91),
        "odd start": columns(1),
        "transposed base": segment(layouts=("transposed", "contiguous", "contiguous", "contiguous")),
        "rank 360": segment(rank=360),
        "float32 adapters of rank 136": segment(rank=136, dtypes=(BF16, BF16, FP32, FP32)),
        "a copy": Segment("w", whole.source, whole.destination),
    }
    table = pack([*taken.values(), *left.values()])
    wide = (table[:, cuda.RANK] > 0) & ((table[:, cuda.DTYPES] >> 16 & 0xFFFF) != (cuda.BF16 | cuda.BF16 << 8))
    serves = cuda_hopper.serves(table, wide, cpu)
    assert dict(zip([*taken, *left], serves.tolist(), strict=True)) == {n: n in taken for n in [*taken, *left]}
    small = pack([segment(rank=8), segment(rank=8, dtypes=(BF16, BF16, FP32, FP32))])
    assert cuda_hopper.serves(small, wide[[0, 2]], cpu).tolist() == [False, True], "the other kernel is as fast there"


@pytest.mark.parametrize("wide", [False, True])
def test_shared_memory(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    for rank in range(8, cuda_hopper._most_rank(wide, torch.device("cpu")) + 1, 8):
        strip, stages = cuda_hopper.shape(rank, wide, torch.device("cpu"))
        ranks = -(-rank // 32) * 32
        used = stages * 64 * (strip * 2 + ranks * (4 if wide else 2)) + ranks * strip * (6 if wide else 2)
        assert 2 <= stages <= 8
        assert used + 5 * 1024 <= 227 << 10
        assert cuda_hopper.unit_rows(rank, wide) % 64 == 0


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
@pytest.mark.parametrize("adapters", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("base", [BF16, FP16], ids=["bf16 base", "fp16 base"])
def test_the_same_bits(base: torch.dtype, adapters: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every edge of tiles, boxes and chunks; in place too, with rows that are scaled, rounded stochastically, and with
    copies that ride along; as a kernel argument and as a table on the device."""
    device, serves = torch.device("cuda", 0), cuda_hopper.serves
    assert kernels.pick(device) is cuda
    monkeypatch.setattr(cuda_hopper, "SMALL_RANK", 0)

    def results(segments: list[Segment], ours: bool, stochastic: bool, scale: bool) -> list[torch.Tensor]:
        monkeypatch.setattr(cuda_hopper, "serves", serves if ours else lambda t, w, d: serves(t, w, d) & False)
        run, outputs = [], []
        for s in segments:
            source = s.source.clone()
            out = source if stochastic else torch.full_like(s.destination, 7)
            rows = torch.linspace(0.5, 2, len(source), device=device) if scale else None
            run.append(Segment(s.name, source, out, s.lora_A, s.lora_B, s.scaling, rows))
            outputs.append(out)
        raw = torch.arange(70_001, dtype=torch.int32, device=device)
        outputs.append(torch.zeros_like(raw))
        launch = cuda.prepare([*run, Segment("raw", raw[None], outputs[-1][None])], device)
        assert any(isinstance(v, cuda_hopper.HopperVariant) for v in launch.variants) == ours
        launch(stochastic, 5)
        return outputs

    def compare(segments: list[Segment], what: str, stochastic: bool = False, scale: bool = False) -> None:
        for ours, other in zip(
            results(segments, True, stochastic, scale), results(segments, False, stochastic, scale), strict=True
        ):
            assert torch.equal(ours.view(torch.uint8), other.view(torch.uint8)), what

    for rank in (8, 32, 40, 64, 96, 128) + ((256, 320) if adapters is BF16 else ()):
        shapes = [(1, 256), (64, 8), (200, 1000), (513, 64), (1030, 520)]
        segments = [make_segment("w", *shape, rank, (base, base, adapters, adapters), device) for shape in shapes]
        compare(segments, f"rank {rank}")
        compare(segments[2:4], f"rank {rank}, stochastic", stochastic=True)
        compare(segments[2:4], f"rank {rank}, scaled", scale=True)
    many = [
        make_segment(f"w{i}", 37 * i + 1, 8 * (i % 90 + 1), 8 * (i % 16 + 1), (base, base, adapters, adapters), device)
        for i in range(40)
    ]
    compare(many, "a table of many")
