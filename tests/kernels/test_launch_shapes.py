"""Shapes of launches on GPUs that are not here: each choice is one that a launch takes, and what has no room is run
elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import assert_accurate, make_segment

from lora_merge.errors import BackendUnavailable
from lora_merge.kernels import backend, reference
from lora_merge.kernels.bindings import native, operators
from lora_merge.kernels.bindings.layout import PAIRS, SCALE_CONVERT
from lora_merge.kernels.cuda import backend as cuda
from lora_merge.kernels.cuda import hopper as cuda_hopper
from lora_merge.kernels.cuda import merge as cuda_merge
from lora_merge.kernels.cuda import scaled as cuda_scaled
from lora_merge.kernels.cuda import table as cuda_table
from lora_merge.kernels.cuda.kernel import Launch, arguments, serves
from lora_merge.kernels.cuda.merge import PLAIN_LOADS, Portable
from lora_merge.kernels.scaled.weights import Placed, Scaled
from lora_merge.kernels.segments import COLS, DESTINATION, FP8, RANK, Segment, pack

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")
KIB = 1 << 10
# GPUs by their shared memory: A10, A40, 3090, 4090, L4, L40S, RTX PRO; A100; H100, H200, B200.
GPUS = [pytest.param(size, id=f"{size} KiB") for size in (100, 164, 228)]

assert native.load_error() is None, native.load_error()
NATIVE = native.compiled


def block(kib: int) -> int:
    """Shared memory of one block: the system takes 1 KiB of each."""
    return (kib - 1) * KIB


def bytes_of(shape: Sequence[int], rank: int, planes: int, element_bytes: int) -> int:
    """Counted apart from the C++: stages of W and lora_B, and lora_A in one, two or three parts of 16 bits."""
    col_warps, stages, staged_B, pad = shape
    ranks = -(-rank // 32) * 32
    rows_of_a_stage = 64 // col_warps
    lora_B = rows_of_a_stage * ranks * (4 if planes > 1 else 2) * col_warps if staged_B else 0
    return stages * (64 * 64 * element_bytes + lora_B) + ranks * (64 * col_warps + pad) * 2 * planes


@pytest.mark.parametrize("kib", GPUS)
def test_every_choice_is_accepted(kib: int) -> None:
    for planes, element_bytes, widest, rank in product((1, 2, 3), (2, 4), (1, 2, 4), range(513)):
        shape = NATIVE.merge_shape(rank, planes, element_bytes, 1, widest, block(kib), kib * KIB)
        what = (planes, element_bytes, widest, rank, shape)
        if not shape:
            assert planes > 1, what
            assert bytes_of((1, 2, False, 0), rank, planes, element_bytes) + 128 > block(kib), what
            continue
        assert NATIVE.accepts_shape(*shape, rank, planes, element_bytes, block(kib)), what
        assert bytes_of(shape, rank, planes, element_bytes) + 128 <= block(kib), what
        assert shape[0] <= widest, what


@pytest.mark.parametrize("kib", GPUS)
def test_two_adapters_as_wide_as_one(kib: int) -> None:
    """A launch that takes one adapter's merge off and adds another's numbers its units as the launch of one does: so
    many warps side by side, with room for both up to rank 32 but for one case."""
    kinds = [(1, 2), (1, 4), (2, 2), (3, 4)]  # planes, bytes of an element
    for (planes, element_bytes), widest, rank in product(kinds, (1, 2, 4), (32, 64, 96, 128, 256)):
        one = NATIVE.merge_shape(rank, planes, element_bytes, 1, widest, block(kib), kib * KIB)
        both = one and NATIVE.merge_shape(2 * rank, planes, element_bytes, one[0], one[0], block(kib), kib * KIB)
        if both:
            assert both[0] == one[0]
            assert NATIVE.accepts_shape(*both, 2 * rank, planes, element_bytes, block(kib))
        else:
            small = kib == 100 and planes == 3  # in two passes
            assert rank > 32 or small, (planes, element_bytes, widest, rank)


def test_what_a_launch_refuses() -> None:
    good = [4, 4, 1, 8]
    assert NATIVE.accepts_shape(*good, 32, 1, 2, block(228))
    for bad in ([3, 4, 1, 8], [8, 4, 1, 8], [4, 3, 1, 8], [4, 1, 1, 8], [4, 8, 1, 8], [4, 4, 1, 4], [0, 4, 1, 8]):
        assert not NATIVE.accepts_shape(*bad, 32, 1, 2, block(228)), bad
    assert not NATIVE.accepts_shape(*good, 513, 1, 2, block(228))
    assert not NATIVE.accepts_shape(*good, 32, 1, 2, bytes_of(good, 32, 1, 2))  # without the kernel's own
    for bad in ([192, 4, 2], [256, 4, 1], [256, 4, 7], [256, 3, 2], [256, 17, 2]):
        assert not NATIVE.accepts_tiles(*bad, 32, 1, 0, False, block(228)), bad
    assert not NATIVE.accepts_tiles(256, 5, 2, 32, 3, 0, False, block(228))
    assert not NATIVE.accepts_tiles(256, 4, 2, 65, 3, 0, True, block(228))
    for planes in (1, 2, 3):
        assert NATIVE.accepts_tiles(64, 2, 2, 32, planes, 0, False, block(228)) == (planes == 2)
    for planes in (0, 4):
        assert not NATIVE.accepts_tiles(256, 4, 2, 32, planes, 0, False, block(228))
        assert NATIVE.accepts_tiles(256, 4, 2, 32, 2, 0, False, block(228))


@pytest.mark.parametrize("kib", GPUS)
@pytest.mark.parametrize("extra", [0, 1088], ids=["merge", "tracked"])
def test_every_choice_of_tiles_is_accepted(kib: int, extra: int) -> None:
    for planes, rank, ahead in product((1, 2, 3), range(1, 513), (False, True)):
        tiles = NATIVE.hopper_tiles(rank, planes, extra, block(kib), ahead)
        if tiles:
            assert NATIVE.accepts_tiles(*tiles, rank, planes, extra, ahead, block(kib)), (planes, rank, tiles)


@pytest.mark.parametrize(("kib", "planes", "element_bytes", "most"), [
    (100, 1, 2, 512), (100, 1, 4, 512), (100, 2, 2, 320), (100, 3, 4, 160),
    (164, 2, 2, 512), (164, 3, 4, 320), (228, 3, 4, 512),
])  # fmt: skip
def test_the_largest_rank(kib: int, planes: int, element_bytes: int, most: int) -> None:
    most_ranks = cuda_table._most_ranks(1, cuda_table.Memory(block(kib), kib * KIB))
    assert most_ranks[{1: 0, 2: PAIRS, 3: 2}[planes], element_bytes // 4] == most


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Plans for a GPU with so much shared memory, on tensors of the CPU; nothing is launched."""

    def pretend(kib: int) -> None:
        properties = SimpleNamespace(
            name="GPU", shared_memory_per_block_optin=block(kib), shared_memory_per_multiprocessor=kib * KIB,
            multi_processor_count=84,
        )  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(cuda_hopper, "_available", lambda device: False)
    monkeypatch.setitem(backend._PREFERENCE, "cpu", ("cuda", "triton", "reference"))
    monkeypatch.setattr(backend._backend("triton"), "unavailable", lambda device: "this test has none")
    backend._first.cache_clear()
    yield pretend
    backend._first.cache_clear()


def accepted(launch: Launch, kib: int) -> bool:
    """By the operator that launches it."""
    of = arguments(launch)
    shape = [of[name] for name in ("col_warps", "stages", "staged_B", "pad", "max_rank")]
    element_bytes = 4 if 2 in (of["source_dtype"], of.get("destination_dtype")) else 2
    return NATIVE.accepts_shape(*shape, cuda_table.planes(of["adapters"]), element_bytes, block(kib))


def merging(launches: Sequence[object], operator: Callable[..., None] = operators.launch_cuda) -> list[Launch]:
    return [launch for launch in launches if isinstance(launch, partial) and launch.func is operator]


@pytest.mark.parametrize("kib", [100, 164, 228])
def test_plans(kib: int, gpu: Callable[[int], None]) -> None:
    """Every combination of dtypes, ranks in one table and alone: what is launched is accepted, the rest runs apart, and
    nothing is left out."""
    gpu(kib)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for base, out, a, b in product((BF16, FP16, FP32), repeat=4):
            if (a, b) not in ((BF16, BF16), (FP32, FP32), (BF16, FP32)):
                continue
            ranks = (1, 8, 31, 32, 33, 64, 160, 161, 193, 321, 385, 512)
            segments = [make_segment(f"w{r}", 5, 70, r, (base, out, a, b), CPU) for r in ranks]
            for group in (segments, *([s] for s in segments)):
                launch = cuda.prepare(group, CPU)
                launched = merging(launch.launches)
                assert all(accepted(one, kib) for one in launched)
                here = serves(PLAIN_LOADS, launch.table, CPU)
                assert sum(len(one.args[0]) for one in launched) == here.sum()
                assert isinstance(launch.launches[-1], partial) == here.all()


@pytest.mark.parametrize("base", [BF16, FP16, FP32])
@pytest.mark.parametrize("kib", [100, 164, 228])
def test_plans_of_results_of_8_bits(kib: int, base: torch.dtype, gpu: Callable[[int], None]) -> None:
    """Merged to 16 bits by the launches of any merge, and scaled from there; or from where such numbers lie already."""
    gpu(kib)
    placed = []
    for rank, group in product((0, 1, 32, 33, 64), ("tensor", "channel", "block")):
        s = make_segment(f"w{rank}", 130, 200, rank, (base, BF16, FP32, FP32), CPU)
        count = {"tensor": 1, "channel": 130, "block": 4}[group]
        weight = Scaled(torch.empty(130, 200, dtype=FP8), torch.empty(count), group, BF16)
        placed.append(Placed(Segment(s.name, s.source, weight.weight, s.lora_A, s.lora_B), weight, 0, 0))
    launch = cuda.prepare_scaled(placed, CPU)
    ((merge, scale),) = launch._steps
    launched = merging(merge.launches)
    assert all(accepted(one, kib) for one in launched)
    merged = [row for one in launched for row in one.args[0].numpy()]
    assert sorted(rank for rank in merge.table[:, RANK].tolist() if rank) == sorted([1, 32, 33, 64] * 3)
    assert len(merged) == serves(PLAIN_LOADS, merge.table, CPU).sum()
    assert isinstance(scale, cuda_scaled.CudaScale)
    assert len(jobs(scale)) == 12 + 3 * (base != BF16)
    assert {source for source, _ in jobs(scale)} <= set(merge.table[:, DESTINATION].tolist())
    assert (launch._ready is None) == (base != BF16)
    if launch._ready is not None:
        assert {source for source, _ in jobs(launch._ready)} == {
            p.segment.source.data_ptr() for p in placed if p.segment.rank == 0
        }


def jobs(scale: cuda_scaled.CudaScale) -> list[tuple[int, int]]:
    """Sources and destinations of what is converted."""
    found = [one for one in scale.launches if one.args[3] == SCALE_CONVERT]
    return [(int(job[0]), int(job[1])) for one in found for job in one.args[0]]


def test_one_kernel_more(gpu: Callable[[int], None]) -> None:
    """It is an object more in a list: what it serves is launched by it, and all else as before."""
    gpu(228)

    class OfManyColumns(Portable):
        operator = staticmethod(operators.launch_hopper)  # any other one

        def serves(self, table: np.ndarray, device: torch.device) -> np.ndarray:
            return super().serves(table, device) & (table[:, COLS] > 100)

    kinds = [(70, BF16), (300, BF16), (70, FP32), (200, FP32)] * 3
    segments = [make_segment(f"w{i}", 9, n, 8, (BF16, BF16, a, a), CPU) for i, (n, a) in enumerate(kinds)]
    few = pack([s for s, (n, _) in zip(segments, kinds, strict=True) if n == 70])
    copy = make_segment("copy", 9, 70, 0, (BF16,) * 4, CPU)
    made = cuda_merge.merges(pack([*segments, copy]), CPU, (*cuda_merge.MERGES, OfManyColumns()))
    ours, others = merging(made, operators.launch_hopper), merging(made)
    assert [one.args[5:8] for one in made] == [(0, 0, 0), (0, 0, 2), (0, 0, 0), (0, 0, 2)], "the largest first"
    assert [len(one.args[0]) for one in ours] == [3 + 1, 3], "with the copy"
    for one, alone in zip(others, cuda_merge.merges(few, CPU), strict=True):
        assert torch.equal(one.args[0], alone.args[0])
        assert one.args[4:] == alone.args[4:]


def test_what_has_no_room_is_run_elsewhere(gpu: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """After one warning that names the ranks, the memory and the GPU; also on the way there and back."""
    gpu(100)
    small, large = (make_segment(n, 5, 70, r, (FP32, FP32, FP32, FP32), CPU) for n, r in (("a", 8), ("b", 256)))
    with pytest.warns(RuntimeWarning, match=r"reference backend.*rank 256 .*99 KiB.*this GPU.*this test has none"):
        launch = cuda.prepare([small, large], CPU)
    wanted = torch.empty_like(large.destination)
    reference.prepare([Segment("b", large.source, wanted, large.lora_A, large.lora_B, large.scaling)], CPU)(False, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cuda.prepare([small, large], CPU)
    [ours] = merging(launch.launches)
    assert len(ours.args[0]) == 1
    launch.launches.remove(ours)
    launch(False, 0)
    assert torch.equal(large.destination, wanted)

    base = large.source.clone()
    tracked = cuda.prepare_tracked([Segment("b", large.source, large.source, large.lora_A, large.lora_B)], CPU)
    tracked.merge()
    assert tracked.merged
    assert tracked.nbytes > 0
    assert not torch.equal(large.source, base)
    assert tracked.unmerge() == set()
    assert torch.equal(large.source, base)

    monkeypatch.setenv(backend.ENVIRONMENT, "cuda")
    with pytest.raises(BackendUnavailable, match=r"LORA_MERGE_BACKEND=cuda cannot run here.*rank 256"):
        cuda.prepare([small, large], CPU)


def test_parts_of_a_tracked_merge_go_back_together() -> None:
    """Where one part fails there, those before it are brought back; names of changed weights are of all parts."""
    from lora_merge.kernels.tracked.split import SplitTracked

    class Part:
        nbytes = 3

        def __init__(self, name: str, fails: str = "") -> None:
            self.name, self.fails, self.merged = name, fails, False

        def merge(self, meanwhile: Callable[[], object]) -> None:
            if self.fails == "merge":
                raise MemoryError
            self.merged = True

        def unmerge(self, meanwhile: Callable[[], object]) -> set[str]:
            if self.fails == "unmerge":
                self.fails = ""
                raise MemoryError
            self.merged = False
            return {self.name}

    first, second = Part("a"), Part("b", fails="merge")
    together = SplitTracked([first, second])
    with pytest.raises(MemoryError):
        together.merge()
    assert not together.merged
    second.fails = "unmerge"
    together.merge()
    assert together.merged
    assert together.nbytes == 6
    with pytest.raises(MemoryError):
        together.unmerge()
    assert together.merged
    assert together.unmerge() == {"a", "b"}
    assert not together.merged


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kib", [100, 164])
def test_shapes_of_smaller_gpus(kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large GPU runs what is chosen for small ones: nothing is refused, and the bits are the same, there and back."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(cuda_hopper, "_available", lambda device: False)
    for base, out, adapters in product((BF16, FP16, FP32), (BF16, FP32), (BF16, FP32)):
        segments = [
            make_segment(f"w{rank}", rows, cols, rank, (base, out, adapters, adapters), device)
            for rank in (1, 8, 32, 33, 64, 128, 160)
            for rows, cols in ((200, 520), (37, 91), (1000, 64))
        ]
        for group in (segments, *([s] for s in segments)):
            results = []
            for memory in (cuda_table.memory(device), cuda_table.Memory(block(kib), kib * KIB)):
                for s in group:
                    s.destination.fill_(7)
                with monkeypatch.context() as patch:
                    patch.setattr(cuda_table, "memory", lambda device, memory=memory: memory)
                    cuda.prepare(group, device)(False, 0)
                results.append([s.destination.clone() for s in group])
            for s, one, other in zip(group, *results, strict=True):
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (s.name, base, out, adapters)
        in_place = [Segment(s.name, s.source, s.source, s.lora_A, s.lora_B, s.scaling) for s in segments]
        before = [s.source.clone() for s in in_place]
        with monkeypatch.context() as patch:
            patch.setattr(cuda_table, "memory", lambda device: cuda_table.Memory(block(kib), kib * KIB))
            tracked = cuda.prepare_tracked(in_place, device)
        tracked.merge()
        assert tracked.unmerge() == set()
        assert all(torch.equal(s.source, old) for s, old in zip(in_place, before, strict=True))


@pytest.mark.gpu
def test_ranks_without_room_go_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with 100 KiB: the table is split, and every result is there."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(cuda_table, "memory", lambda device: cuda_table.Memory(block(100), 100 * KIB))
    monkeypatch.setattr(cuda_hopper, "_available", lambda device: False)
    segments = [make_segment(f"w{r}", 200, 520, r, (FP32, FP32, FP32, FP32), device) for r in (8, 256, 32, 512)]
    backend._first.cache_clear()
    with pytest.warns(RuntimeWarning, match="slower triton backend.*rank 256, 512"):
        launch = cuda.prepare(segments, device)
    launch(False, 0)
    for s in segments:
        assert_accurate(s, s.destination)
