"""The compiled extension: what it shares with Python, what its operators refuse, and copies that do not fit."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import make_segment

from lora_merge.kernels import cpu, layout, native, segments
from lora_merge.kernels.segments import pack

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
assert native.load_error() is None, native.load_error()
NATIVE = torch.ops.lora_merge_native


WHOLE = make_segment("w", 4, 6, 3, (torch.float32,) * 4, CPU)  # its memory stays where tables say it is


def table() -> torch.Tensor:
    return torch.from_numpy(pack([replace(WHOLE, destination=WHOLE.source)]))


# ---- one description -------------------------------------------------------------------------------------------------


def test_the_header_is_what_the_description_says() -> None:
    """Else: `python lora_merge/kernels/layout.py`."""
    assert (ROOT / "csrc" / "layout.h").read_text() == layout.header()
    assert NATIVE.layout_hash() == layout.HASH


def test_words_and_codes() -> None:
    names = [f.name for f in layout.SEGMENT for _ in range(f.words)]
    assert len(names) == segments.WORDS == 24
    assert all(names.index(name) == offset for name, offset in layout.OFFSET.items())
    assert [segments.BF16, segments.FP16, segments.FP32] == [0, 1, 2]
    assert segments.RAW == {1: 3, 2: 4, 4: 5, 8: 6}


def test_no_constant_has_a_second_home() -> None:
    """C++ takes these from the generated header alone."""
    names = re.findall(r"^constexpr int (k\w+) =", (ROOT / "csrc" / "layout.h").read_text(), re.MULTILINE)
    assert len(names) == len(layout._CONSTANTS)
    for path in [*(ROOT / "csrc" / "cuda").iterdir(), *(ROOT / "csrc").glob("*.*")]:
        if path.name != "layout.h":
            for name in names:
                # A kernel may have a local of that name.
                assert not re.search(rf"^constexpr \w+ [^;]*\b{name} =", path.read_text(), re.MULTILINE), (path, name)


def test_operators_have_the_described_schemas() -> None:
    for name, arguments in layout.OPERATORS.items():
        if hasattr(NATIVE, name):
            assert str(getattr(NATIVE, name).default._schema) == f"lora_merge_native::{name}{arguments}"
        else:
            assert torch.version.cuda is None, name


# ---- what operators refuse -------------------------------------------------------------------------------------------


def words(**changes: int) -> torch.Tensor:
    t = table()
    for name, value in changes.items():
        t[0, layout.OFFSET[name]] = value
    return t


FP32 = 2 | 2 << 8 | 2 << 16 | 2 << 24
BAD: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "float words": (lambda: table().double(), "must be contiguous int64"),
    "int32 words": (lambda: table().int(), "must be contiguous int64"),
    "strided": (lambda: table().repeat(2, 2)[:, ::2], "must be contiguous int64"),
    "one dimension": (lambda: table().view(-1), "must be contiguous int64"),
    "23 words": (lambda: table()[:, :23].contiguous(), r"must be contiguous int64 \[segments, 24\]"),
    "unknown source dtype": (lambda: words(dtypes=FP32 + 5), "segment 0: unknown dtypes"),
    "unknown lora_A dtype": (lambda: words(dtypes=FP32 + (7 << 16)), "segment 0: unknown dtypes"),
    "bits beyond the codes": (lambda: words(dtypes=FP32 | 1 << 40), "segment 0: unknown dtypes"),
    "raw source, float result": (lambda: words(dtypes=3 | 2 << 8), "segment 0: unknown dtypes"),
    "raw with a rank": (lambda: words(dtypes=3 | 3 << 8), "rank must be between 0 and 512, got 3"),
    "negative rank": (lambda: words(rank=-1), "rank must be between 0 and 512, got -1"),
    "rank 513": (lambda: words(rank=513), "rank must be between 0 and 512, got 513"),
    "no rows": (lambda: words(rows=0), "rows and columns must be between 1 and"),
    "negative columns": (lambda: words(cols=-8), "rows and columns must be between 1 and"),
    "columns beyond 32 bits": (lambda: words(cols=2**31), "rows and columns must be between 1 and"),
    "no source": (lambda: words(source=0), "an address is missing"),
    "no lora_A": (lambda: words(lora_A=0), "an address is missing"),
    "meta": (lambda: table().to("meta"), "must be there, got meta"),
}


@pytest.mark.parametrize("what", BAD)
def test_operators_refuse_what_is_no_table(what: str) -> None:
    make, message = BAD[what]
    for run in (
        lambda t: NATIVE.launch_cpu(t, False, 0),
        lambda t: NATIVE.row_norms_cpu(t, torch.zeros(4, dtype=torch.float64)),
        NATIVE.tracked_sizes_cpu,
    ):
        with pytest.raises(RuntimeError, match=message):
            run(make())


def test_operators_refuse_other_tensors() -> None:
    t = table()
    for out in (torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)[::2]):
        with pytest.raises(RuntimeError, match="lora_merge: out must"):
            NATIVE.row_norms_cpu(t, out)
    first, code_bytes = NATIVE.tracked_sizes_cpu(t)
    good = {
        "codes": torch.zeros(code_bytes, dtype=torch.uint8),
        "records": torch.full((int(first[-1]), 2), -1),
        "arena": torch.zeros(4096, dtype=torch.uint8),
        "counter": torch.zeros(3, dtype=torch.int64),
    }
    bad = {
        "codes": (good["codes"][:-1], good["codes"].int()),
        "records": (good["records"][:0], good["records"].int()),
        "arena": (good["arena"][::2], good["arena"].int()),
        "counter": (good["counter"][:2], good["counter"].int()),
    }
    for run in (NATIVE.track_cpu, NATIVE.untrack_cpu):
        for name, wrong in bad.items():
            for tensor in wrong:
                with pytest.raises(RuntimeError, match=f"lora_merge: {name} must"):
                    run(t, *{**good, name: tensor}.values())
        run(t, *good.values())


# ---- copies that do not fit ------------------------------------------------------------------------------------------


def test_a_stale_extension_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another description, or of the time before there was one; the next backend runs instead."""
    monkeypatch.setattr(layout, "HASH", "0123456789abcdef")
    native.load_error.cache_clear()
    try:
        message = cpu.unavailable(CPU)
        assert message is not None
        assert re.search(r"another version.*0123456789abcdef.*pip install --no-build-isolation", message)
        assert not native.has_cuda()
    finally:
        native.load_error.cache_clear()

    class Old:
        launch_cpu = None

    monkeypatch.setattr(torch.ops, "lora_merge_native", Old)
    assert "layout none" in (native.stale() or "")


TWO_COPIES = """
import sys, warnings, torch
first, second = sys.argv[1:]
torch.ops.load_library(first)
torch.ops.load_library(second)  # ended the process
sys.path.insert(0, sys.argv[1].rsplit("/", 2)[0])
import lora_merge
from lora_merge.kernels import native
assert native.load_error() is None, native.load_error()
assert (lora_merge.merge(torch.ones(4, 4), torch.ones(1, 4), torch.ones(4, 1), 0.5) == 1.5).all()
print("both")
"""


def test_two_copies_in_one_process(tmp_path: Path) -> None:
    """Say, an installed one and one beside the sources: the second leaves the operators to the first."""
    (library,) = (ROOT / "lora_merge").glob("_C*.so")
    copy = tmp_path / library.name
    shutil.copy(library, copy)
    command = [sys.executable, "-c", TWO_COPIES, str(library), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "both"


ANOTHER_FIRST = """
import sys, torch
torch.ops.load_library(sys.argv[1])
before = set(open("/proc/self/maps").read().split())
from lora_merge.kernels import native
assert native.load_error() is None, native.load_error()
loaded = {w for w in open("/proc/self/maps").read().split() if "/_C." in w and "lora_merge" in w}
assert not loaded, loaded
"""


def test_a_copy_that_is_there_is_taken(tmp_path: Path) -> None:
    (library,) = (ROOT / "lora_merge").glob("_C*.so")
    copy = tmp_path / library.name
    shutil.copy(library, copy)
    command = [sys.executable, "-c", ANOTHER_FIRST, str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# ---- architectures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("architecture", "on", "not_on"), [
    ("80", ["8.0", "8.6", "8.7", "8.9"], ["7.5", "9.0", "10.0", "12.0"]),
    ("86", ["8.6", "8.9"], ["8.0", "9.0"]),
    ("90", ["9.0"], ["8.9", "10.0"]),
    ("90a", ["9.0"], ["8.0", "10.0", "12.0"]),
    ("90a+PTX", ["9.0"], ["10.0"]),
    ("100", ["10.0", "10.3"], ["9.0", "11.0", "12.0"]),
    ("100a", ["10.0"], ["10.3"]),
    ("100f", ["10.0", "10.3"], ["11.0", "12.0"]),
    ("100f+PTX", ["10.0", "10.3"], ["12.0"]),
    ("120", ["12.0", "12.1"], ["10.0"]),
    ("80+PTX", ["8.0", "8.9", "9.0", "10.0", "12.1"], ["7.5"]),
    ("120+PTX", ["12.0", "13.0"], ["10.3"]),
    ("weird", [], ["8.0"]),
])  # fmt: skip
def test_which_gpus_run_an_architecture(architecture: str, on: list[str], not_on: list[str]) -> None:
    def capability(name: str) -> tuple[int, int]:
        major, minor = name.split(".")
        return int(major), int(minor)

    assert all(native.runs(architecture, capability(name)) for name in on)
    assert not any(native.runs(architecture, capability(name)) for name in not_on)


@pytest.mark.parametrize("capability", [(10, 0), (12, 0)])
def test_a_binary_without_code_for_this_gpu(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton runs, and the reason is told; a launch would fail with `no kernel image is available`."""
    from lora_merge.kernels import cuda

    monkeypatch.setattr(native, "architectures", lambda: ("80", "90a"))
    monkeypatch.setattr(native, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    number = f"{capability[0]}.{capability[1]}"
    reason = cuda.unavailable(torch.device("cuda", 0)) or ""
    assert re.search(rf"built for 80, 90a, and this GPU has compute capability {number}.*ARCH_LIST={number}", reason)
    for runs in ((8, 0), (8, 6), (8, 9), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, c=runs: c)
        assert cuda.unavailable(torch.device("cuda", 0)) is None


@pytest.mark.gpu
def test_gpu_operators_refuse_other_tensors() -> None:
    from lora_merge.kernels import cuda

    device = torch.device("cuda", 0)
    many = [
        make_segment(f"w{i}", 64, 64, 8, (torch.bfloat16,) * 4, device, layouts=("transposed",) * 4) for i in range(9)
    ]
    launch = cuda.prepare(many, device)
    for variant in launch.variants:
        run = type(variant).__call__
        run(variant, False, 0)
        for field, wrong in {
            "table": variant.table.int(),
            "unit_segment": variant.unit_segment.cpu(),
            "counter": variant.counter.long(),
        }.items():
            with pytest.raises(RuntimeError, match="lora_merge: "):
                run(variant._replace(**{field: wrong}), False, 0)
        with pytest.raises(RuntimeError, match="lora_merge: unit_segment must have"):
            run(variant._replace(unit_segment=variant.unit_segment[:1]), False, 0)
    torch.cuda.synchronize()
