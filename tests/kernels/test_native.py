"""The compiled extension: what it shares with Python, what its operators refuse, and copies that do not fit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_segment
from repository import ROOT

from lora_merge.kernels import cpu, segments
from lora_merge.kernels.bindings import layout, native, operators
from lora_merge.kernels.segments import pack

CPU = torch.device("cpu")
assert native.load_error() is None, native.load_error()
NATIVE = native.compiled


WHOLE = make_segment("w", 4, 6, 3, (torch.float32,) * 4, CPU)  # its memory stays where tables say it is


def table() -> torch.Tensor:
    return torch.from_numpy(pack([replace(WHOLE, destination=WHOLE.source)]))


# ---- one description -------------------------------------------------------------------------------------------------


def test_the_header_is_what_the_description_says() -> None:
    """Else: `python lora_merge/kernels/bindings/layout.py`."""
    assert (ROOT / "csrc" / "layout.h").read_text() == layout.header()
    assert NATIVE.layout_hash() == layout.HASH


def test_words_and_codes() -> None:
    names = [f.name for f in layout.SEGMENT for _ in range(f.words)]
    assert len(names) == segments.WORDS == 37
    assert all(names.index(name) == offset for name, offset in layout.OFFSET.items())
    assert [segments.BF16, segments.FP16, segments.FP32] == [0, 1, 2]
    assert segments.RAW == {1: 3, 2: 4, 4: 5, 8: 6}


def test_no_constant_has_a_second_home() -> None:
    """C++ takes these from the generated header alone."""
    names = re.findall(r"^constexpr (?:int|int64_t) (k\w+) =", (ROOT / "csrc" / "layout.h").read_text(), re.MULTILINE)
    assert len(names) == len(layout._CONSTANTS)
    for path in [*(ROOT / "csrc" / "cuda").rglob("*.*"), *(ROOT / "csrc").glob("*.*")]:
        if path.name != "layout.h":
            for name in names:
                # A kernel may have a local of that name.
                assert not re.search(rf"^constexpr \w+ [^;]*\b{name} =", path.read_text(), re.MULTILINE), (path, name)


def test_the_module_offers_what_is_described() -> None:
    """C++ is compiled against these declarations; Python calls with as many arguments."""
    here = {name for name in dir(NATIVE) if not name.startswith("__")} - {"Watch"}  # test_watch.py
    assert here in (layout.OPERATORS.keys(), layout.OPERATORS.keys() | layout.CUDA_OPERATORS.keys())
    for name in here:
        count = len(layout.parameters(name))
        with pytest.raises(TypeError, match=f"{name} takes {count} arguments, got {count + 1}"):
            getattr(NATIVE, name)(*[0] * (count + 1))
    with pytest.raises(TypeError):
        NATIVE.merge_shape("x", False, 2, 1, 1, 1 << 16, 1 << 17)
    with pytest.raises(OverflowError):
        NATIVE.merge_shape(1 << 70, False, 2, 1, 1, 1 << 16, 1 << 17)


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
    "36 words": (lambda: table()[:, :36].contiguous(), r"must be contiguous int64 \[segments, 37\]"),
    "unknown source dtype": (lambda: words(dtypes=FP32 + 5), "segment 0: unknown dtypes"),
    "unknown lora_A dtype": (lambda: words(dtypes=FP32 + (7 << 16)), "segment 0: unknown dtypes"),
    "bits beyond the codes": (lambda: words(dtypes=FP32 | 1 << 40), "segment 0: unknown dtypes"),
    "unknown format": (lambda: words(dtypes=FP32 | 3 << 32), "segment 0: unknown dtypes"),
    "codes of bytes": (lambda: words(dtypes=3 | 3 << 8 | 1 << 32), "segment 0: unknown dtypes"),
    "codes without scales": (lambda: words(dtypes=FP32 | 2 << 32), "what its codes stand for is missing"),
    "codes without values": (
        lambda: words(dtypes=FP32 | 1 << 32, absmax=64, block=64),
        "what its codes stand for is missing",
    ),
    "blocks of nothing": (lambda: words(dtypes=FP32 | 2 << 32, absmax=64), "what its codes stand for is missing"),
    "scales without values": (
        lambda: words(dtypes=FP32 | 2 << 32, absmax=64, block=64, absmax_code=64),
        "what its absmax stands for is missing",
    ),
    "raw source, float result": (lambda: words(dtypes=3 | 2 << 8), "segment 0: unknown dtypes"),
    "raw with a rank": (lambda: words(dtypes=3 | 3 << 8), "rank must be between 0 and 512, got 3"),
    "negative rank": (lambda: words(rank=-1), "rank must be between 0 and 512, got -1"),
    "rank 513": (lambda: words(rank=513), "rank must be between 0 and 512, got 513"),
    "no rows": (lambda: words(rows=0), "rows and columns must be between 1 and"),
    "negative columns": (lambda: words(cols=-8), "rows and columns must be between 1 and"),
    "columns beyond 32 bits": (lambda: words(cols=2**31), "rows and columns must be between 1 and"),
    "no source": (lambda: words(source=0), "an address is missing"),
    "no lora_A": (lambda: words(lora_A=0), "an address is missing"),
    "meta": (lambda: table().to("meta"), r"on the CPU, got .* on meta"),
}


@pytest.mark.parametrize("what", BAD)
def test_operators_refuse_what_is_no_table(what: str) -> None:
    make, message = BAD[what]
    for run in (
        lambda t: operators.launch_cpu(t, False, 0),
        lambda t: operators.row_norms_cpu(t, torch.zeros(4, dtype=torch.float64)),
        operators.tracked_sizes_cpu,
    ):
        with pytest.raises(RuntimeError, match=message):
            run(make())


def test_operators_refuse_other_tensors() -> None:
    t = table()
    for out in (torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)[::2]):
        with pytest.raises(RuntimeError, match="lora_merge: out must"):
            operators.row_norms_cpu(t, out)
    first, code_bytes = operators.tracked_sizes_cpu(t)
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

    def retrack_cpu(t: torch.Tensor, codes: Any, records: Any, arena: Any, mark: int, asked: Any) -> None:
        operators.retrack_cpu(t, t, codes, records, arena, layout.SECOND_ARENA - mark, asked, good["arena"])

    for run in (operators.track_cpu, retrack_cpu, operators.untrack_cpu):
        for name, wrong in bad.items():
            for tensor in wrong:
                *memory, asked = {**good, name: tensor}.values()
                with pytest.raises(RuntimeError, match=f"lora_merge: {name} must"):
                    run(t, *memory, 0, asked)
        *memory, asked = good.values()
        run(t, *memory, 0, asked)
    with pytest.raises(RuntimeError, match="a merge of 1 segments cannot follow one of 2"):
        operators.retrack_cpu(t, torch.cat([t, t]), *memory, 0, asked, good["arena"])


# ---- calls of functions that only a GPU runs -------------------------------------------------------------------------


class Recorder:
    """In the place of a compiled module: keeps what each function was called with, by the names that C++ has."""

    def __init__(self) -> None:
        self.called: dict[str, dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*values: Any) -> None:
            self.called[name] = dict(zip(layout.parameters(name), values, strict=True))

        return call


JOURNAL = ("codes", "records", "arena", "mark", "asked", "chunk", "before")
"""Arguments of `journal_cuda`."""


def test_gpu_functions_get_what_they_are_declared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number in its place: they have twenty of them, and no machine without a GPU would notice."""
    recorder = Recorder()
    monkeypatch.setattr(native, "compiled", recorder)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 4242, raising=False)
    tensors = {
        "table": table(),
        "unit_segment": torch.zeros(0, dtype=torch.int32),
        "counter": torch.zeros(2, dtype=torch.int32),
        "maps": torch.zeros(layout.MAP_BYTES, dtype=torch.uint8),
        "jobs": torch.zeros(layout.ROUNDED_WORDS, dtype=torch.int64),
        "out": torch.zeros(8, dtype=torch.float64),
        "codes": torch.zeros(3, dtype=torch.uint8),
        "records": torch.zeros(5, dtype=torch.int64),
        "arena": torch.zeros(7, dtype=torch.uint8),
        "asked": torch.zeros(3, dtype=torch.int64),
        "before": torch.zeros(9, dtype=torch.uint8),
    }
    sizes = {"n_codes": 3, "n_records": 5, "room": 7, "room_before": 9, "n_unit_segment": 0, "on_device": False}
    last = operators.journal_cuda(-1, *(tensors.get(name, 77) for name in JOURNAL))  # type: ignore[arg-type]
    for name in layout.CUDA_OPERATORS.keys() - {"cuda_problem", "tensor_maps", "thirds_cuda"}:
        function = getattr(operators, name)
        launches = isinstance(function, operators.Launcher)
        given: dict[str, Any] = {}
        for number, field in enumerate(signature(function).parameters, start=100):
            if field not in ("_", "numbers"):  # what the others take and this one does not
                given[field] = {**tensors, "device": -1}.get(field, number)
        numbers = {}
        if launches:
            declared = layout.parameters(name)
            declared = declared[declared.index("maps") + 1 : declared.index("device")]
            numbers = dict(zip(declared, range(100, 200), strict=False))
            if "way" in numbers:
                numbers |= dict(zip(declared[declared.index("way") + 1 :], last, strict=True))
        with monkeypatch.context() as patched:
            if name == "row_norms_cuda":  # takes its device from `out`
                patched.setattr(operators, "CPU", -2)
                patched.setattr(operators, "_words", lambda t, device: (t.data_ptr(), t.shape[0]))
            function(*given.values(), *numbers.values())
        got = recorder.called[name]
        assert (got["device"], got["stream"]) == (-1, 4242), name
        assert got.get("segments", got.get("n_jobs")) == 1
        given |= numbers
        given |= {field: tensors[field] for field in tensors if field in got and "way" in numbers}
        for field, value in given.items():
            wanted = value.data_ptr() if isinstance(value, torch.Tensor) else value
            if field not in ("device", "unit_segment"):  # there is none beside a table on the CPU
                assert got[field] == wanted, (name, field)
        assert all(got[size] == count for size, count in sizes.items() if size in got), name
        assert "way" not in got or (got["mark"], got["chunk"]) == (77, 77)


def test_thirds_get_what_they_are_declared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape and the strides are the tensor's."""
    recorder = Recorder()
    monkeypatch.setattr(native, "compiled", recorder)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 4242, raising=False)
    source, out = torch.zeros(6, 4).t(), torch.zeros(4, 6, dtype=torch.bfloat16)
    operators.thirds_cuda(source, 3, out)
    assert recorder.called["thirds_cuda"] == {
        "source": source.data_ptr(), "rows": 4, "columns": 2, "planes": 3, "row_stride": 1, "column_stride": 4,
        "destination": out.data_ptr(), "device": -1, "stream": 4242,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="thirds must have 24 elements"):
        operators.thirds_cuda(source, 3, out[:3])
    with pytest.raises(RuntimeError, match=r"thirds of torch\.float64"):
        operators.thirds_cuda(source.double(), 3, out)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("name", ["scale.cu", "sm90/scaled.cu"])
def test_instructions_of_the_oldest_gpu(name: str, tmp_path: Path) -> None:
    """The wheel of CI has code for one GPU, a newer one; these two have instructions that not all of them have."""
    command = ["nvcc", "-std=c++17", "-O1", "-Xptxas", "-O0", "-gencode=arch=compute_80,code=sm_80", "-cubin"]
    source = ROOT / "csrc" / "cuda" / name
    subprocess.run([*command, "-o", str(tmp_path / "out"), str(source)], check=True)


# ---- copies that do not fit ------------------------------------------------------------------------------------------


def test_a_stale_extension_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another description, or of the time before there was one; the next backend runs instead."""
    monkeypatch.setattr(layout, "HASH", "0123456789abcdef")
    native.load_error.cache_clear()
    try:
        message = cpu.unavailable(CPU)
        assert message is not None
        assert re.search(r"another version.*0123456789abcdef.*pip install", message)
        assert not native.has_cuda()
    finally:
        native.load_error.cache_clear()

    class Old:
        pass

    assert "layout none" in (native.stale(Old) or "")


TWO_COPIES = """
import importlib.machinery, importlib.util, sys
spec = importlib.util.spec_from_file_location("elsewhere._C", sys.argv[1])
other = importlib.util.module_from_spec(spec)
spec.loader.exec_module(other)
import torch, lora_merge
from lora_merge.kernels.bindings import native
assert native.load_error() is None, native.load_error()
assert native.compiled is not other
assert other.layout_hash() == native.compiled.layout_hash()
assert (lora_merge.merge(torch.ones(4, 4), torch.ones(1, 4), torch.ones(4, 1), 0.5) == 1.5).all()
print("both")
"""


def test_two_copies_in_one_process(tmp_path: Path) -> None:
    """Say, an installed one and one beside the sources: each has functions of its own."""
    (library,) = (ROOT / "lora_merge").glob("_C*.so")
    copy = tmp_path / library.name
    shutil.copy(library, copy)
    command = [sys.executable, "-c", TWO_COPIES, str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "both"


def test_a_checkout_takes_the_installed_module(tmp_path: Path) -> None:
    """Python puts the folder that it is started in first: a checkout there hid what pip had installed."""
    (library,) = (ROOT / "lora_merge").glob("_C*.so")
    checkout, installed = tmp_path / "checkout", tmp_path / "site"
    shutil.copytree(ROOT / "lora_merge", checkout / "lora_merge", ignore=shutil.ignore_patterns("_C*", "__pycache__"))
    (installed / "lora_merge").mkdir(parents=True)
    shutil.copy(library, installed / "lora_merge")
    code = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]\n"
        "import lora_merge; from lora_merge.kernels.bindings import native\n"
        "print(lora_merge.__file__, native.load_error(), native.compiled and native.compiled.__file__)"
    )
    command, environment = [sys.executable, "-P", "-c", code], dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(checkout), str(installed)])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
    file, problem, module = done.stdout.split()
    assert file.startswith(str(checkout))
    assert (problem, module) == ("None", str(installed / "lora_merge" / library.name))
    environment["PYTHONPATH"] = str(checkout)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "the compiled extension is missing" in done.stdout


def test_torchs_own_threads_do_the_work() -> None:
    """And as many as torch is told."""
    code = (
        "import os, torch, lora_merge; torch.set_num_threads(2); w = torch.empty(4096, 4096)\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "lora_merge.merge_(w, torch.zeros(2, 4096), torch.zeros(4096, 2), 1.0)\n"
        "here = len(os.listdir('/proc/self/task')); torch.add(w, 1, out=w)\n"
        "print(here - before, len(os.listdir('/proc/self/task')) - here)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["1", "0"]


def test_an_error_in_a_thread_reaches_python() -> None:
    raw = torch.from_numpy(pack([replace(WHOLE, lora_A=None, lora_B=None, destination=torch.empty_like(WHOLE.source))]))
    with pytest.raises(RuntimeError, match="row norms of a byte copy"):
        operators.row_norms_cpu(raw, torch.zeros(4, dtype=torch.float64))


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
    from lora_merge.kernels.cuda import backend as cuda

    monkeypatch.setattr(native, "architectures", lambda: ("80", "90a"))
    monkeypatch.setattr(native, "has_cuda", lambda: True)
    monkeypatch.setattr(native, "cuda_problem", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    number = f"{capability[0]}.{capability[1]}"
    reason = cuda.unavailable(torch.device("cuda", 0)) or ""
    assert re.search(rf"built for 80, 90a, and this GPU has compute capability {number}.*ARCH_LIST={number}", reason)
    for runs in ((8, 0), (8, 6), (8, 9), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, c=runs: c)
        assert cuda.unavailable(torch.device("cuda", 0)) is None


@pytest.mark.gpu
def test_gpu_operators_refuse_other_tensors() -> None:
    from lora_merge.kernels.cuda import backend as cuda

    device = torch.device("cuda", 0)
    many = [
        make_segment(f"w{i}", 64, 64, 8, (torch.bfloat16,) * 4, device, layouts=("transposed",) * 4) for i in range(9)
    ]
    launch = cuda.prepare(many, device)
    for one in launch.launches:
        one(False, 0)
        table, unit_segment, counter, *rest = one.args
        for wrong in (
            (table.int(), unit_segment, counter),
            (table, unit_segment.cpu(), counter),
            (table, unit_segment, counter.long()),
        ):
            with pytest.raises(RuntimeError, match="lora_merge: "):
                one.func(*wrong, *rest, False, 0)
        with pytest.raises(RuntimeError, match="lora_merge: unit_segment must have"):
            one.func(table, unit_segment[:1], counter, *rest, False, 0)
    torch.cuda.synchronize()
