"""The compiled CPU kernels: what the tests of all backends do not see."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import LAYOUTS, assert_accurate, assert_same_bits, bits, cut, in_place, make_segment, pairwise
from repository import ROOT, SUPPORT

from lora_merge import Segment
from lora_merge.kernels import cpu
from lora_merge.kernels.bindings import native, operators
from lora_merge.kernels.segments import seed_key

CPU = torch.device("cpu")
SHAPES = ((1, 1, 3), (5, 31, 32), (13, 97, 133), (26, 64, 128), (7, 40, 512), (19, 130, 0), (400, 1100, 40))
"""rows, columns, rank: inside, at and beyond the edges of tiles, panels, rank blocks and units of work"""


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    assert native.load_error() is None, native.load_error()


def cases() -> Iterator[tuple[Segment, bool]]:
    """Segments and whether they round stochastically: every pair of dtypes, layout, shape and special value."""
    for index in range(63):
        rows, cols, rank = SHAPES[index % 7]
        layouts = [LAYOUTS[index * step % 6] for step in (1, 5, 2, 3)]
        s = make_segment(f"case {index}", rows, cols, rank, pairwise(index // 7), CPU, layouts=layouts, seed=index)
        if index % 2:
            for start, value in enumerate((float("nan"), float("inf"), -0.0)):
                s.source[rows // 2, start::7] = value
        if index % 4 == 3:
            scale = torch.rand(rows, generator=torch.Generator().manual_seed(index)) + 0.5
            s = Segment(s.name, s.source, s.destination, s.lora_A, s.lora_B, s.scaling, scale)
        yield s, index % 3 == 0


def digest() -> str:
    """SHA-256 of what all cases write, whole and cut, and of their row norms; tracked in place they come back.

    Every case without special values is held against float64, too."""
    total = hashlib.sha256()
    for s, stochastic in cases():
        rows, cols = s.source.shape
        cpu.prepare([s], CPU)(stochastic, seed_key(3))
        whole = s.destination.clone()
        if s.source.isfinite().all():
            assert_accurate(s, whole, stochastic=stochastic)
        s.destination.zero_()
        i, j = rows // 3, cols * 2 // 5
        corners = [(0, i, 0, j), (0, i, j, cols), (i, rows, 0, j), (i, rows, j, cols)]
        parts = [part for part in cut(s, corners) if part.source.numel()]
        cpu.prepare(parts, CPU)(stochastic, seed_key(3))
        assert_same_bits(s.destination, whole, f"{s.name}, cut at row {i} and column {j}")
        total.update(bits(whole).numpy().tobytes())
        if s.row_scale is not None:
            norms = torch.zeros(rows, dtype=torch.float64)
            cpu.prepare([s], CPU).row_norms(norms)
            total.update(norms.numpy().tobytes())
        if s.rank or s.row_scale is not None:
            there = in_place(s)
            tracked = cpu.prepare_tracked([there], CPU)
            tracked.merge()
            total.update(bits(there.source).numpy().tobytes())
            if not stochastic and s.source.dtype == s.destination.dtype:
                assert_same_bits(there.source, whole, f"{s.name}, tracked")
            assert not tracked.unmerge(), f"{s.name}: nobody wrote it"
            assert_same_bits(there.source, s.source, f"{s.name}, restored")
    return total.hexdigest()


def special_digest() -> str:
    """SHA-256 of what becomes of rows of lora_B and columns of lora_A with values that matrix units do not take: they
    flush denormals, and would multiply infinities with parts that are 0. All else is held against float64."""
    total = hashlib.sha256()
    specials = (float("inf"), float("nan"), 2.0**-130, -(2.0**-60), 2.0**70, 2.0**-126)
    for index, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16) * 2):
        rank, dtypes = (40, 130)[index // 3], (torch.bfloat16, torch.float32, dtype, dtype)
        s = make_segment(f"special {index}", 100, 203, rank, dtypes, CPU, seed=index)
        assert s.lora_A is not None
        assert s.lora_B is not None
        rows, cols = torch.zeros(100, dtype=torch.bool), torch.zeros(203, dtype=torch.bool)
        rows[[3, 21, 22, 47, 80, 99]] = cols[[0, 31, 64, 100, 191, 202]] = True
        values = [value for value in specials if torch.tensor(value, dtype=dtype) != 0]  # float16 has not all
        rows[rows.nonzero()[len(values) :]] = cols[cols.nonzero()[len(values) :]] = False
        for value, i, j in zip(values, rows.nonzero(), cols.nonzero(), strict=True):
            s.lora_B[i, index] = s.lora_A[rank - 1, j] = torch.tensor(value, dtype=dtype)  # torch 2.15 wants it rounded
        odd = rows[:, None] | cols
        cpu.prepare([s], CPU)(False, 0)
        total.update(bits(s.destination)[odd].numpy().tobytes())
        s.lora_A[:, cols], s.lora_B[rows] = 0, 0
        assert_accurate(s, torch.where(odd, s.source, s.destination))
        tiny = dataclasses.replace(s, lora_A=s.lora_A * 2.0**-133, lora_B=s.lora_B * 2.0**80, scaling=2.0**40)
        cpu.prepare([tiny], CPU)(False, 0)
        total.update(bits(s.destination).numpy().tobytes())
    return total.hexdigest()


def paired_digest() -> str:
    """SHA-256 of merges with bf16 adapters, which some machines multiply two ranks at a time: every rank around a pair
    and a block, and values at the ends of what may be multiplied like that, cancelled sums and denormals among them."""
    total = hashlib.sha256()
    for index, rank in enumerate((1, 2, 3, 15, 16, 17, 31, 33, 127, 128, 129, 255, 257, 511, 512)):
        dtypes = ((torch.bfloat16, torch.float32)[index % 2],) * 2 + (torch.bfloat16,) * 2
        layouts = [LAYOUTS[index * step % 6] for step in (1, 5, 2, 3)]
        s = make_segment(f"pairs {index}", 61, 167, rank, dtypes, CPU, layouts=layouts, seed=index)
        assert s.lora_A is not None
        assert s.lora_B is not None
        cpu.prepare([s], CPU)(False, 0)
        assert_accurate(s, s.destination)
        total.update(bits(s.destination).numpy().tobytes())
        least, most = 2.0**-50, 2.0**50 * (1 - 2.0**-8)
        for few, many in ((least, least), (least, -most), (most, -least), (least * 0.99, most), (2.0**-133, 2.0**60)):
            s.lora_B[::7], s.lora_A[:, ::5] = few, many
            if rank > 2:  # what comes first is taken back, so that what is left is small
                s.lora_B[::7, 1] = -few
                s.lora_B[::7, 2:] = 0
            cpu.prepare([s], CPU)(False, 0)
            total.update(bits(s.destination).numpy().tobytes())
    return total.hexdigest()


def in_new_process(isa: str) -> subprocess.CompletedProcess[str]:
    """The digests in a process that is told which instruction set to use: it is chosen once in each."""
    path = os.pathsep.join([str(SUPPORT), str(ROOT), os.environ.get("PYTHONPATH", "")])
    code = "import tests.kernels.test_cpu_kernel as t; t.native.load_error()\n"
    code += "for made in (t.digest, t.special_digest, t.paired_digest): print(made.__name__, made())"
    environment = os.environ | {"LORA_MERGE_CPU_ISA": isa, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)


def test_instruction_sets_agree() -> None:
    """Every bit, on as many of generic, AVX2, AVX-512 and its bf16 instructions as this machine has; with AMX what it
    leaves to AVX-512, while its own sums have another order."""
    results: dict[str, dict[str, str]] = {}
    for isa in native.compiled.cpu_isas():
        done = in_new_process(isa)
        assert done.returncode == 0, f"{isa}: {done.stderr[-2000:]}"
        for function, made in map(str.split, done.stdout.splitlines()):
            if isa != "amx" or function == "special_digest":
                results.setdefault(function, {})[isa] = made
    assert results.keys() == {"digest", "special_digest", "paired_digest"}
    for function, made_by in results.items():
        assert len(set(made_by.values())) == 1, f"instruction sets round apart: {function}, {made_by}"


def test_unknown_instruction_set() -> None:
    done = in_new_process("sse9")
    assert done.returncode != 0
    assert "LORA_MERGE_CPU_ISA=sse9: expected one of those that this machine runs: " in done.stderr


@pytest.mark.parametrize("command", [["doctor"], ["doctor", "--json"]])
def test_unknown_instruction_set_in_the_doctor(command: list[str]) -> None:
    environment = os.environ | {"LORA_MERGE_CPU_ISA": "sse9"}
    run = [sys.executable, "-m", "lora_merge", *command]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    told = " ".join(done.stdout.split())
    assert "LORA_MERGE_CPU_ISA=sse9: expected one of those that this machine runs" in told


def test_threads_change_nothing() -> None:
    before = torch.get_num_threads()
    results = {}
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results[threads] = digest()
    finally:
        torch.set_num_threads(before)
    assert len(set(results.values())) == 1, f"the number of threads shows in the result: {results}"


@pytest.fixture
def flushing() -> Iterator[Callable[[bool], None]]:
    """Sets what this thread does with denormals, not those of the pool, which begin with what this one does."""
    if not torch.set_flush_denormal(False):
        pytest.skip("this machine cannot flush denormals")
    torch.ones(1 << 22).sum()
    yield torch.set_flush_denormal
    torch.set_flush_denormal(False)


def with_denormals(dtype: torch.dtype) -> Segment:
    """A seventh of the base is denormal and nothing is added, so that a flushed element shows."""
    s = make_segment("denormal", 512, 1024, 4, (dtype,) * 2 + (torch.float32,) * 2, CPU)
    s.lora_B.zero_()
    flat = s.source.view(-1)
    flat[::7] = (torch.rand(flat[::7].shape) * torch.finfo(dtype).tiny).to(dtype)
    return s


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_merging_keeps_denormals(dtype: torch.dtype, flushing: Callable[[bool], None]) -> None:
    """Whatever the caller's threads do with them, which keep doing it."""
    s = with_denormals(dtype)
    flushing(True)
    cpu.prepare([s], CPU)(False, 0)
    still = torch.tensor([1e-39]) * 1.0
    flushing(False)
    assert_same_bits(s.destination, s.source)
    assert still.item() == 0, "the caller's own setting is another one now"


@pytest.mark.parametrize("merging", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_denormals_come_back(dtype: torch.dtype, merging: bool, flushing: Callable[[bool], None]) -> None:
    """One way flushes them in a thread, the other one does not."""
    s = in_place(with_denormals(dtype))
    before = s.source.clone()
    for _ in range(3):
        tracked = cpu.prepare_tracked([s], CPU)
        flushing(merging)
        tracked.merge()
        flushing(not merging)
        changed = tracked.unmerge()
        flushing(False)
        assert not changed
        assert_same_bits(s.source, before)


def test_other_python_threads_run_meanwhile() -> None:
    """Python takes no thread's turn from it here: who runs while another one launches was let in by the launch."""
    s = make_segment("long", 2048, 4096, 512, (torch.float32,) * 4, CPU)
    launch = cpu.prepare([s], CPU)
    launch(False, 0)
    inside, seen = False, 0

    def work() -> None:
        nonlocal inside
        for _ in range(20):  # a machine may be too busy to run this test's own thread during one of them
            if not seen:
                inside = True
                launch(False, 0)
                inside = False

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e3)
    try:
        worker = threading.Thread(target=work)
        worker.start()
        while worker.is_alive():
            time.sleep(1e-3)
            seen += inside
    finally:
        sys.setswitchinterval(interval)
    assert seen, "no other thread came to run during 20 launches"


@pytest.mark.parametrize(
    "table", [torch.zeros(2, 24), torch.zeros(2, 23, dtype=torch.int64), torch.zeros(24, 2, dtype=torch.int64).t()]
)
def test_what_is_no_table_is_refused(table: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="a segment table must be contiguous int64"):
        operators.launch_cpu(table, False, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rank", [3, 40])
def test_results_past_the_caches(dtype: torch.dtype, rank: int) -> None:
    """A launch too large for the caches streams whole cache lines; the bits are those of small launches, and nothing
    beside the rectangle is touched."""
    rows, cols, pitch = 2053, 2071, 2112
    s = make_segment("large", rows, cols, rank, (dtype, dtype, torch.float32, torch.float32), CPU)
    room = torch.full((rows + 1, pitch), 7.0, dtype=dtype)
    large = dataclasses.replace(s, destination=room[:rows, :cols])
    cpu.prepare([large], CPU)(False, 0)
    for part in cut(s, [(i, min(i + 700, rows), 0, cols) for i in range(0, rows, 700)]):
        cpu.prepare([part], CPU)(False, 0)
    assert_same_bits(room[:rows, :cols], s.destination)
    room[:rows, :cols] = 7
    assert (room == 7).all(), "something beside the rectangle was written"
