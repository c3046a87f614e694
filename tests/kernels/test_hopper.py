"""The CUDA kernel for compute capability 9: which segments it takes, and that its bits are the other kernel's."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import LAYOUTS, make_segment

from lora_merge.kernels import backend
from lora_merge.kernels.backend import idle
from lora_merge.kernels.bindings import layout, native, operators
from lora_merge.kernels.cuda import backend as cuda
from lora_merge.kernels.cuda import hopper as cuda_hopper
from lora_merge.kernels.cuda import repack as cuda_repack
from lora_merge.kernels.cuda import table as cuda_table
from lora_merge.kernels.cuda import tracked as cuda_tracked
from lora_merge.kernels.cuda.kernel import NONE, Work, arguments
from lora_merge.kernels.cuda.merge import MERGES
from lora_merge.kernels.plan import Plan
from lora_merge.kernels.segments import (
    COLS,
    DESTINATION,
    DTYPES,
    LORA_A,
    LORA_A_STRIDE,
    LORA_B,
    LORA_B_STRIDE,
    PARTS_A,
    PARTS_B,
    RANK,
    ROWS,
    SOURCE,
    Segment,
    pack,
)
from lora_merge.kernels.tracked import one_pass
from lora_merge.kernels.tracked.plan import TrackedPlan

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def on_hopper(test: Callable[..., None]) -> Callable[..., None]:
    there = not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0)
    return pytest.mark.gpu(pytest.mark.skipif(not there, reason="needs compute capability 9.0")(test))


HOPPER = MERGES[-1]
H200 = SimpleNamespace(
    shared_memory_per_block_optin=227 << 10, shared_memory_per_multiprocessor=228 << 10, multi_processor_count=132
)
assert native.load_error() is None  # it chooses shapes


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

    whole, margin = segment(65, 512), segment(rank=40)
    taken = {
        "bf16": segment(),
        "fp16 base": segment(dtypes=(FP16, FP16, BF16, BF16)),
        "all fp16": segment(dtypes=(FP16,) * 4),
        "float32 adapters": segment(dtypes=(BF16, BF16, FP32, FP32)),
        "rank 384": segment(rank=384),
        "rows of a matrix": Segment("w", whole.source[1:], whole.destination[1:], whole.lora_A, whole.lora_B[1:]),
        "a strip": columns(8),
        "by columns": segment(layouts=("transposed",) * 4),
    }
    left = {
        "float32 base": segment(dtypes=(FP32, BF16, BF16, BF16)),
        "fp16 adapters of a bf16 base": segment(dtypes=(BF16, BF16, FP16, FP16)),
        "float32 result": segment(dtypes=(BF16, FP32, BF16, BF16)),
        "lora_B is not float32": segment(dtypes=(BF16, BF16, FP32, BF16)),
        "lora_A is not float32": segment(dtypes=(BF16, BF16, BF16, FP32)),
        "transposed lora_A": segment(layouts=("contiguous", "contiguous", "transposed", "contiguous")),
        "rank 33": segment(rank=33),
        "rank 33 with a margin": Segment(
            "w", margin.source, margin.destination, margin.lora_A[:33], margin.lora_B[:, :33]
        ),
        "91 columns": segment(cols=91),
        "91 columns of longer rows": segment(cols=91, layouts=("rows of vectors",) * 4),
        "odd start": columns(1),
        "transposed base": segment(layouts=("transposed", "contiguous", "contiguous", "contiguous")),
        "rank 392": segment(rank=392),
        "by columns, float32 adapters": segment(dtypes=(BF16, BF16, FP32, FP32), layouts=("transposed",) * 4),
        "a copy": Segment("w", whole.source, whole.destination),
    }
    pairs = {
        "float32 adapters": segment(rank=33, dtypes=(BF16, BF16, FP32, FP32)),
        "fp16 adapters of a bf16 base": segment(rank=40, dtypes=(BF16, BF16, FP16, FP16)),
        "lora_B is not float32": segment(rank=40, dtypes=(BF16, BF16, FP32, BF16)),
        "lora_A is not float32": segment(rank=40, dtypes=(BF16, BF16, BF16, FP32)),
        "float32 adapters of rank 256": segment(rank=256, dtypes=(BF16, BF16, FP32, FP32)),
        "float32 adapters of rank 257": segment(rank=257, dtypes=(BF16, BF16, FP32, FP32)),
    }
    made = cuda_repack.repack(pack(list(pairs.values())), cpu, MERGES)
    assert len(made.splits) == 2 * len(pairs)
    assert HOPPER.serves(made.table, cpu).tolist() == [True] * 5 + [False]

    table = pack([*taken.values(), *left.values()])
    serves = HOPPER.serves(table, cpu)
    assert dict(zip([*taken, *left], serves.tolist(), strict=True)) == {n: n in taken for n in [*taken, *left]}

    long = pack([segment(), segment()])
    long[:, COLS] = 2**25, 2**25 + 8  # elements of 64 rows up to a column are counted in 32 bits
    assert HOPPER.serves(long, cpu).tolist() == [True, False]


def at(address: int, shape: tuple[int, int], strides: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Memory that something else keeps, as a tensor."""
    size = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    words = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(words, dtype=dtype).as_strided(shape, strides)


PAIR_TYPES = [(FP32, FP32), (FP32, BF16), (FP16, FP32), (FP16, BF16)]


@pytest.mark.parametrize(("dtypes", "rank"), [
    *itertools.product([(BF16, BF16), (FP16, FP16), *PAIR_TYPES], (1, 2, 3, 4, 5, 6, 12, 20, 31)),
    *itertools.product([(BF16, BF16), (FP16, FP16)], (33, 96)),
])  # fmt: skip
def test_adapters_are_laid_where_they_can_be_read(
    rank: int, dtypes: tuple[torch.dtype, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any rank, dtype and layout of either half: served afterwards, with the same values, and zeros behind them. What
    already lies well stays, and pieces of a weight share what they share."""
    monkeypatch.setattr(cuda_hopper, "_available", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    monkeypatch.setattr(cuda_repack, "WORTH", 0)
    cpu = torch.device("cpu")
    segments = []
    for i, kind in enumerate(LAYOUTS):
        base = FP16 if dtypes == (FP16, FP16) else BF16
        layouts = ("contiguous", "contiguous", kind, LAYOUTS[-i])
        whole = make_segment(f"w{i}", 128, 136, rank, (base, base, *dtypes), cpu, layouts=layouts, seed=i)
        upper, lower = slice(0, 64), slice(64, 128)
        for rows in (upper, lower):
            assert whole.lora_B is not None
            parts = whole.source[rows], whole.destination[rows], whole.lora_A, whole.lora_B[rows]
            segments.append(Segment(whole.name, *parts))
    table = pack(segments)
    made = cuda_repack.repack(table, cpu, MERGES)
    assert HOPPER.serves(made.table, cpu).all()
    if len(made.copies):
        operators.launch_cpu(torch.from_numpy(made.copies), False, 0)
    assert len(made.copies) <= 3 * len(LAYOUTS), "lora_A of both halves of a weight is one"
    used = made.memory.new_zeros(made.memory.shape, dtype=torch.bool)
    for s, before, after in zip(segments, table, made.table, strict=True):
        dtype = {0: BF16, 1: FP16, 2: FP32}[int(after[DTYPES]) >> 16 & 0xFF]
        assert after[DTYPES] >> 16 & 0xFF == after[DTYPES] >> 24 & 0xFF
        assert int(after[RANK]) == (rank if dtype == FP32 else -(-rank // 8) * 8)
        for word, stride, half, old in (
            (LORA_A, LORA_A_STRIDE, s.lora_A, before[LORA_A]),
            (LORA_B, LORA_B_STRIDE, s.lora_B, before[LORA_B]),
        ):
            assert half is not None
            strides = tuple(map(int, after[stride : stride + 2]))
            got = at(int(after[word]), tuple(half.shape), strides, dtype)  # type: ignore[arg-type]
            assert torch.equal(got, half.to(dtype)), (word, s.name)
            if after[word] != old:
                begin = int(after[word]) - made.memory.data_ptr()
                ranks = -(-rank // 8) * 8 if word == LORA_A and dtype != FP32 else half.shape[0]
                size = ((ranks - 1) * strides[0] + strides[0]) * dtype.itemsize
                assert begin >= 0
                assert begin + size <= made.memory.numel()
                there = made.memory[begin : begin + size].view(dtype).view(ranks, strides[0])
                assert not there[half.shape[0] :].any(), "zeros below"
                assert not there[:, half.shape[1] :].any(), "zeros behind"
                used[begin : begin + size] = True
    assert len(used) - int(used.sum()) <= cuda_repack.ALIGNED * (len(made.copies) + 1)


def test_small_weights_keep_their_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the adapter is no small part of the weight, copying it would take longer than it saves."""
    monkeypatch.setattr(cuda_hopper, "_available", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    small = pack([make_segment("w", 64, 4096, 12, (BF16,) * 4, torch.device("cpu"))])
    made = cuda_repack.repack(small, torch.device("cpu"), MERGES)
    assert not len(made.copies)
    assert (made.table == small).all()
    assert made.memory.numel() == 0


@pytest.mark.parametrize("rank", [33, 40, 64, 512])
@pytest.mark.parametrize("dtypes", PAIR_TYPES)
def test_where_pairs_go(rank: int, dtypes: tuple[torch.dtype, torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both parts and the factors of each half have room of their own; pieces of a weight share what they share."""
    monkeypatch.setattr(cuda_hopper, "_available", lambda device: False)
    cpu = torch.device("cpu")
    segments = []
    for i, kind in enumerate(LAYOUTS):
        layouts = ("contiguous", "contiguous", kind, LAYOUTS[-i])
        whole = make_segment(f"w{i}", 130, 70, rank, (BF16, FP16, *dtypes), cpu, layouts=layouts, seed=i)
        for rows in (slice(0, 65), slice(65, 130)):
            assert whole.lora_B is not None
            segments.append(
                Segment(whole.name, whole.source[rows], whole.destination[rows], whole.lora_A, whole.lora_B[rows])
            )
    before = pack(segments)
    made = cuda_repack.repack(before, cpu, MERGES)
    assert len(made.copies) == 0
    assert len(made.splits) == 3 * len(LAYOUTS), "lora_A of both halves of a weight is one"
    ranks, taken = -(-rank // 8) * 8, []
    for job in made.splits:
        of_B, length = int(job[layout.OFFSET["key"]]), int(job[ROWS])
        assert (length, int(job[COLS])) == ((65, rank) if of_B else (70, rank))
        plane = ranks * (65 if of_B else 128)
        begin = int(job[layout.OFFSET["destination"]])
        assert begin % 128 == 0
        taken.append((begin, begin + 2 * 2 * plane + 4 * 2 * (64 + 4)))
    taken.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(taken))
    memory = made.memory.data_ptr()
    assert taken[0][0] >= memory
    assert taken[-1][1] <= memory + made.memory.numel()
    places = {int(job[layout.OFFSET["destination"]]): job for job in made.splits}
    for s, old, new in zip(segments, before, made.table, strict=True):
        assert (new[: layout.OFFSET["parts_A"]] == old[: layout.OFFSET["parts_A"]]).all(), "what adapters are stays"
        for part, word, half in (("parts_A", LORA_A, s.lora_A), ("parts_B", LORA_B, s.lora_B)):
            job = places[int(new[layout.OFFSET[part]])]
            assert half is not None
            assert job[layout.OFFSET["source"]] == new[word] == half.data_ptr()
            vectors = half.t() if part == "parts_A" else half
            begin = layout.OFFSET["source_stride"]
            assert tuple(job[begin : begin + 2].tolist()) == vectors.stride()


@pytest.mark.parametrize(
    "adapters", [layout.DTYPES["BFloat16"], layout.DTYPES["Float32"], layout.PAIRS], ids=["bf16", "fp32", "pairs"]
)
def test_shared_memory(adapters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planes = cuda_table.planes(adapters)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    for rank in range(8, cuda_hopper._most_rank(planes, 0, 227 << 10, False, 0) + 1, 8):
        work = Work((0, adapters), NONE, rank, torch.device("cpu"))
        tiles = HOPPER.shape(work)
        assert tiles is not None
        strip, held, stages = tiles
        ranks = -(-rank // 32) * 32
        factors = 2 * (64 + 4) * 4 if planes == 2 else 0
        lora_A = held * 32 * 64 * 4 + ranks * strip * 6 if planes == 3 else held * (ranks * 64 * 2 * planes + factors)
        used = stages * (64 * (strip * 2 + ranks * (2 if planes == 1 else 4)) + factors) + lora_A
        assert 2 <= stages <= 6
        assert held % 2 == 0 if planes == 3 else held >= strip // 64
        assert used + 3 * 1024 <= 227 << 10
        assert HOPPER.units(work, tiles).most % 64 == 0


def test_large_segments_have_short_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)

    def rows(*shapes: tuple[int, int]) -> int:
        segments = [make_segment("w", 1, 8, 8, (BF16,) * 4, torch.device("cpu"))] * len(shapes)
        table = pack(segments)
        table[:, [ROWS, COLS]] = shapes
        work = Work((0, 0), table, 32, torch.device("cpu"))
        return HOPPER.units(work, cuda_hopper.Tiles(256, 4, 2)).most

    assert rows((18944, 3584), (512, 3584), (3584, 3584)) == 128
    assert rows(*[(768, 2048)] * 100) == rows((8960, 1536), (1536, 1536)) == 256


def test_units_of_tracked_merges() -> None:
    """Longer ones of float32 adapters: a warp splits their lora_A."""
    segment = make_segment("w", 4096, 4096, 8, (BF16,) * 4, torch.device("cpu"))
    for adapters, ranks, rows in ((BF16, 32, 256), (FP32, 32, 512), (FP32, 64, 512)):
        work = Work(
            (0, layout.DTYPES[{BF16: "BFloat16", FP32: "Float32"}[adapters]]),
            pack([segment]),
            ranks,
            segment.source.device,
        )
        assert cuda_tracked.TrackedHopper().units(work, cuda_hopper.Tiles(256, 4, 2)).most == rows, (adapters, ranks)


def test_units_of_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each segment has units of its own, whichever kernel tracks it."""
    monkeypatch.setattr(cuda_hopper, "_available", lambda device: True)
    monkeypatch.setattr(operators, "tensor_maps", lambda *args: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kinds = [(65, 256, 32, BF16, BF16), (64, 1000, 8, BF16, BF16), (37, 71, 5, BF16, BF16), (300, 776, 64, BF16, FP32)]
    kinds += [(10, 10, 4, FP32, FP32), (200, 136, 320, BF16, BF16)]
    segments = []
    for i, (rows, cols, rank, base, adapters) in enumerate(kinds):
        s = make_segment(f"w{i}", rows, cols, rank, (base, base, adapters, adapters), torch.device("cpu"))
        segments.append(Segment(s.name, s.source, s.source, s.lora_A, s.lora_B))
    tracked = cuda_tracked.CudaTracked(segments, pack(segments), torch.device("cpu"))
    assert [one.func.name for one in tracked._launches] == ["track_cuda"] * 2 + ["track_hopper"] * 2
    for of in map(arguments, tracked._launches[2:]):
        tiles = [of[name] for name in ("strip_cols", "held", "stages", "max_rank")]
        extra, ahead = cuda_tracked.TrackedHopper.extra_box, cuda_tracked.TrackedHopper.ahead
        assert native.compiled.accepts_tiles(*tiles, cuda_table.planes(of["adapters"]), extra, ahead, 227 << 10)
    first = dict(zip(tracked._names, np.concatenate(tracked._first).tolist(), strict=True))
    ends = [*sorted(first.values())[1:], tracked.units]
    for name, end in zip(sorted(first, key=first.__getitem__), ends, strict=True):
        rows, cols = kinds[int(name[1:])][:2]
        assert end - first[name] >= -(-rows // 64) * -(-cols // 64) * 4, name
        assert tracked.names(torch.tensor([first[name], end - 1])) == {name}


def of_peers(device: torch.device, every: bool) -> list[Segment]:
    """Merges, copies that move bits and such that convert, of which every second one, or all, are of a peer's."""
    torch.manual_seed(0)
    segments = []
    for i, (rank, adapters) in enumerate([(32, BF16), (12, BF16), (32, FP32), (8, FP32), (48, FP32), (48, FP32)] * 2):
        s = make_segment(f"w{i}", 200 + i, 1000, rank, (BF16, BF16, adapters, adapters), device, seed=i)
        segments.append(dataclasses.replace(s, peer=every or i % 2 == 1))
    raw, long = torch.arange(70_001, device=device), torch.randn(9000, device=device)
    segments.append(Segment("raw", raw[None], torch.zeros_like(raw)[None], peer=True))
    segments.append(Segment("long", long[None], torch.zeros(1, 9000, dtype=BF16, device=device), peer=True))
    return segments


@pytest.mark.parametrize("every", [False, True])
def test_a_peers_memory_is_not_read_by_tensor_maps(every: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 GB/s, where plain loads read it at the speed of the link. Nothing else of the plan goes another way."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(cuda_hopper, "_available", lambda device: True)
    monkeypatch.setattr(operators, "tensor_maps", lambda *args: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    segments = of_peers(cpu, every)
    launch = cuda.prepare(segments, cpu)
    by_map, plainly, jobs = (
        [one.args[0] for one in launch.launches if one.func is operator]
        for operator in (operators.launch_hopper, operators.launch_cuda, operators.split_adapters)
    )
    mapped = {address for table in by_map for address in table[:, SOURCE].tolist()}
    assert not mapped & {s.source.data_ptr() for s in segments if s.peer}
    assert mapped >= {s.source.data_ptr() for s in segments if not s.peer}
    assert {s.source.data_ptr() for s in segments if s.peer} <= {a for t in plainly for a in t[:, SOURCE].tolist()}
    assert bool(by_map) == (not every)
    pairs = [row for table in (*by_map, *plainly) for row in table.numpy() if row[PARTS_A] or row[PARTS_B]]
    assert {int(row[SOURCE]) for row in pairs} == {segments[i].source.data_ptr() for i in (4, 5, 10, 11)}
    made = {int(job[DESTINATION]) for table in jobs for job in table}
    assert made == {int(row[word]) for row in pairs for word in (PARTS_A, PARTS_B)}
    again = cuda.prepare([dataclasses.replace(s, peer=False) for s in segments], cpu)
    assert any(one.func is operators.launch_hopper for one in again.launches)


@on_hopper
def test_the_bits_of_what_is_read_from_a_peer() -> None:
    device = torch.device("cuda", 0)
    near, far = of_peers(device, False), of_peers(device, True)
    cuda.prepare([dataclasses.replace(s, peer=False) for s in near], device)(False, 0)
    for segments in (far, of_peers(device, False)):
        cuda.prepare(segments, device)(False, 0)
        for one, other in zip(near, segments, strict=True):
            assert torch.equal(one.destination, other.destination), one.name


KINDS = [
    pytest.param(BF16, BF16, id="bf16"),
    pytest.param(BF16, FP32, id="bf16, fp32 adapters"),
    pytest.param(FP16, BF16, id="fp16, bf16 adapters"),
    pytest.param(FP16, FP16, id="fp16"),
    pytest.param(FP16, FP32, id="fp16, fp32 adapters"),
]


@on_hopper
@pytest.mark.parametrize(("base", "adapters"), KINDS)
def test_the_same_bits(base: torch.dtype, adapters: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every edge of tiles, boxes and chunks; in place too, with rows that are scaled, rounded stochastically, and with
    copies that ride along; as a kernel argument and as a table on the device."""
    device, could = torch.device("cuda", 0), cuda_hopper.Hopper.could_serve
    monkeypatch.setattr(cuda_repack, "WORTH", 0)
    assert backend.pick(device) is cuda

    def results(segments: list[Segment], ours: bool, stochastic: bool, scale: bool) -> list[torch.Tensor]:
        monkeypatch.setattr(cuda_hopper.Hopper, "could_serve", could if ours else lambda *args: could(*args) & False)
        run, outputs = [], []
        for s in segments:
            source = s.source.clone()
            out = source if stochastic else torch.full_like(s.destination, 7)
            rows = torch.linspace(0.5, 2, len(source), device=device) if scale else None
            run.append(Segment(s.name, source, out, s.lora_A, s.lora_B, s.scaling, rows))
            outputs.append(out)
        raw = torch.arange(70_001, dtype=torch.int32, device=device)
        outputs.append(torch.zeros_like(raw))
        wide = torch.arange(300 * 800, device=device).to(torch.uint8).view(300, 800)
        outputs.append(torch.zeros_like(wide))
        copies = [Segment("raw", raw[None], outputs[-2][None]), Segment("bytes", wide, outputs[-1])]
        launch = cuda.prepare([*run, *copies], device)
        assert any(one.func is operators.launch_hopper for one in launch.launches) == ours
        launch(stochastic, 5)
        return outputs

    def compare(segments: list[Segment], what: str, stochastic: bool = False, scale: bool = False) -> None:
        for ours, other in zip(
            results(segments, True, stochastic, scale), results(segments, False, stochastic, scale), strict=True
        ):
            assert torch.equal(ours.view(torch.uint8), other.view(torch.uint8)), what

    for rank in (8, 32, 40, 64, 96, 128) + ((256, 320) if adapters is not FP32 else (168, 256)):
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
    for rank in (1, 2, 3, 4, 5, 7, 12, 20, 33):
        shapes = [(513, 1032), (1030, 2048)]
        segments = [make_segment("w", *shape, rank, (base, base, adapters, adapters), device) for shape in shapes]
        compare(segments, f"rank {rank}")
        compare(segments[:1], f"rank {rank}, stochastic", stochastic=True)
        by_columns = [
            make_segment("w", 1032, 2056, rank, (base, base, adapters, adapters), device, layouts=layouts)
            for layouts in (
                ("contiguous", "contiguous", "transposed", "odd start"),
                ("contiguous", "contiguous", "padded columns", "every second column"),
            )
        ]
        compare(by_columns, f"rank {rank}, adapters of any strides")


@on_hopper
@pytest.mark.parametrize(("base", "adapters"), KINDS)
def test_tracked_there_and_back(base: torch.dtype, adapters: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The merge's bits, twice, and the base's again: edges of tiles, boxes and chunks, any values, arenas too small,
    rows that are scaled, and weights that others wrote meanwhile."""
    device = torch.device("cuda", 0)

    def compare(
        shapes: list[tuple[int, int]], ranks: list[int], update: float = 0.1, scale: bool = False, room: int = 64
    ) -> None:
        what = (shapes[:3], ranks[:3], update, scale, room)
        monkeypatch.setattr(one_pass, "FIRST_ROOM", room)
        segments, wanted = [], []
        for i, ((rows, cols), rank) in enumerate(zip(shapes, ranks, strict=True)):
            s = make_segment(f"w{i}", rows, cols, rank, (base, base, adapters, adapters), device, update=update, seed=i)
            for j, value in enumerate((0.0, -0.0, 1e-42, -6e-8, float("inf"), float("nan"), 6e4)):
                s.source.view(-1)[j::9] = value
            factors = torch.linspace(0.5, 2, rows, device=device) if scale else None
            segments.append(Segment(s.name, s.source, s.source, s.lora_A, s.lora_B, s.scaling, factors))
            merged = s.source.clone()
            wanted.append(Segment(s.name, merged, merged, s.lora_A, s.lora_B, s.scaling, factors))
        before = [s.source.clone() for s in segments]
        cuda.prepare(wanted, device)(False, 0)
        tracked = cuda.prepare_tracked(segments, device)
        assert any(one.func is operators.track_hopper for one in tracked._kernels._launches)  # type: ignore[attr-defined]
        for _ in range(2):
            tracked.merge()
            for s, w in zip(segments, wanted, strict=True):
                assert torch.equal(s.source.view(torch.int16), w.source.view(torch.int16)), f"merged, {what}"
            assert tracked.unmerge() == set()
            for s, old in zip(segments, before, strict=True):
                assert torch.equal(s.source.view(torch.int16), old.view(torch.int16)), f"restored, {what}"
        others, after = [], []
        for s, old in zip(segments, before, strict=True):
            assert s.lora_A is not None
            a, factors = s.lora_A.flip(0, 1).contiguous(), None if s.row_scale is None else s.row_scale.flip(0)
            others.append(dataclasses.replace(s, lora_A=a, scaling=-0.75 * s.scaling, row_scale=factors))
            merged = old.clone()
            after.append(dataclasses.replace(others[-1], source=merged, destination=merged))
        cuda.prepare(after, device)(False, 0)
        other = cuda.prepare_tracked(others, device)
        fits = max(ranks) <= 256 and other._kernels.follows(tracked._kernels)  # type: ignore[attr-defined]
        assert fits or max(ranks) > 64, "one pass"
        tracked.merge()
        for now, then, bits in ((other, tracked, after), (tracked, other, wanted), (other, tracked, after)):
            assert now.remerge(then, idle) == set()
            for s, w in zip(segments, bits, strict=True):
                assert torch.equal(s.source.view(torch.int16), w.source.view(torch.int16)), f"merged anew, {what}"
        segments[-1].source[-1, -1] = 3.0
        segments[0].source[0, 1] = 5.0
        assert tracked.remerge(other, idle) == {segments[0].name, segments[-1].name}, f"written meanwhile, {what}"
        assert not tracked.merged
        assert not other.merged
        for s, old in zip(segments[1:-1], before[1:-1], strict=True):
            assert torch.equal(s.source.view(torch.int16), old.view(torch.int16)), f"restored, {what}"
        for s, old in zip(segments, before, strict=True):
            s.source.copy_(old)
        tracked.merge()
        segments[-1].source[-1, -1] = 3.0
        segments[0].source[0, 1] = 5.0
        assert tracked.unmerge() == {segments[0].name, segments[-1].name}, f"written meanwhile, {what}"

    for rank in (1, 4, 12):
        compare([(513, 1032), (1030, 2048)], [rank] * 2)
    for rank in (8, 32, 40, 64, 128) + ((256, 320) if adapters is not FP32 else (168, 256)):
        compare([(1, 256), (64, 8), (200, 1000), (513, 64), (1030, 520)], [rank] * 5)
        compare([(300, 776), (65, 256)], [rank, 8], scale=True)
    for update, room in ((1e-3, 64), (1.0, 1), (1.0, 17), (1e4, 64), (1.0, 10**9)):
        compare([(300, 776), (65, 256), (1024, 1024)], [32] * 3, update=update, room=room)
    compare([(37 * i + 1, 8 * (i % 90 + 1)) for i in range(40)], [8 * (i % 16 + 1) for i in range(40)])


@on_hopper
@pytest.mark.parametrize("tracked", [False, True], ids=["merged", "tracked"])
@pytest.mark.parametrize(("rank", "adapters"), [(8, BF16), (1, FP32), (40, FP32)])
def test_nothing_is_written_behind_a_row(rank: int, adapters: torch.dtype, tracked: bool) -> None:
    """A store by a tensor map ends at a whole vector of 16 bytes, wherever the columns end."""
    for rows, cols in itertools.product((1, 70), (1, 3, 8, 9, 31, 40, 63)):
        memory = torch.full((rows, 64), 3.0, dtype=BF16, device="cuda")
        weight, a = memory[:, :cols], torch.randn(rank, cols, dtype=adapters, device="cuda")
        segment = Segment("w", weight, weight, a, torch.randn(rows, rank, dtype=adapters, device="cuda"), 1.0)
        if tracked:
            TrackedPlan([segment]).merge()
        else:
            Plan([segment]).run()
        assert (memory[:, cols:] == 3.0).all(), (rows, cols)
        assert (memory[:, :cols] != 3.0).any(), (rows, cols)
