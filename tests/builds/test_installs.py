"""What pip makes of the sources in environments that hold nothing else: the source distribution, the pure wheel, the
checkout (`make test-installs`; pip brings setuptools and ninja into its own build environments)."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from repository import ROOT

TORCH = Path(torch.__file__).parents[1]
"""Beside which the package is imported."""
IMPORT_S = 1.0
ONCE = """
import sys, time
sys.path.append({torch!r})
import numpy, torch
began = time.process_time()
import lora_merge
print(time.process_time() - began, lora_merge.__file__)
"""
MERGED = """
import sys, warnings
sys.path.append({torch!r})
import torch, lora_merge
from lora_merge.kernels.bindings import native
torch.manual_seed(0)
weight, lora_A, lora_B = torch.randn(5, 9), torch.randn(2, 9), torch.randn(5, 2)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    merged = lora_merge.merge(weight, lora_A, lora_B, 0.5)
wanted = weight.double() + 0.5 * lora_B.double() @ lora_A.double()
assert torch.allclose(merged.double(), wanted, rtol=1e-6, atol=1e-6)
print("compiled" if native.load_error() is None else "pure")
"""


def run(command: Sequence[str | Path], **environment: str) -> str:
    """What a command prints, errors too.

    Raises:
        AssertionError: it fails; says what it printed.
    """
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LORA_MERGE_BUILD")}
    done = subprocess.run(
        [str(part) for part in command], cwd="/", env=kept | environment, capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is in the repository, in which others build nothing meanwhile."""
    copy = tmp_path_factory.mktemp("sources") / "lora_merge"
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def sdist(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made where there is no torch."""
    folder = tmp_path_factory.mktemp("sdist")
    make = "import os, sys; sys.modules['torch'] = None; os.chdir(sys.argv[1]); from setuptools import build_meta; "
    run([sys.executable, "-c", f"{make}build_meta.build_sdist(sys.argv[2])", sources, folder])
    (made,) = folder.iterdir()
    return made


def pythons() -> list[str]:
    """This Python, and the newest one that is here."""
    beside = [shutil.which(f"python3.{minor}") for minor in (14, 13, 12)]
    versions = sorted(Path.home().glob(".pyenv/versions/3.1[2-9]*/bin/python"), reverse=True)
    asked = {
        str(path): subprocess.run([path, "-m", "venv", "-h"], capture_output=True)
        for path in (*beside, *versions)
        if path
    }
    return [sys.executable, *[path for path, told in asked.items() if told.returncode == 0][:1]]


def fresh(python: str, folder: Path) -> Path:
    """The Python of a new environment."""
    run([python, "-m", "venv", folder])
    return folder / "bin" / "python"


def test_the_source_distribution_is_whole(sources: Path, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {str(path.relative_to(sources)) for path in sources.rglob("*") if path.is_file()}
    assert not sorted(name for name in wanted - names if not name.startswith("."))


@pytest.mark.parametrize("what", ["checkout", "source distribution"])
def test_pip_compiles_it_by_itself(what: str, sources: Path, sdist: Path, tmp_path: Path) -> None:
    """With pip's own build environment, and nothing beside it; the checkout by the newest Python."""
    source, base = (sources, pythons()[-1]) if what == "checkout" else (sdist, sys.executable)
    python = fresh(base, tmp_path / "env")
    run([python, "-m", "pip", "install", "-q", "--no-deps", source], LORA_MERGE_CUDA="0")
    (folder,) = (tmp_path / "env").glob("lib/python*/site-packages/lora_merge")
    assert "GPUs:" in run([python, "-I", ROOT / "tests" / "support" / "other_python.py", folder])
    if base == sys.executable:
        assert run([python, "-I", "-c", MERGED.format(torch=str(TORCH))]).strip() == "compiled"


def test_the_pure_wheel(sources: Path, tmp_path: Path) -> None:
    """It holds no machine code, and merges by what is there without."""
    python, dist = fresh(sys.executable, tmp_path / "env"), tmp_path / "dist"
    run([python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", dist, sources], LORA_MERGE_BUILD="0")
    (wheel,) = dist.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith((".so", ".o"))]
    run([python, "-m", "pip", "install", "-q", "--no-deps", wheel])
    assert run([python, "-I", "-c", MERGED.format(torch=str(TORCH))]).strip() == "pure"
    took = [run([python, "-I", "-c", ONCE.format(torch=str(TORCH))]).split() for _ in range(3)]
    assert all(str(tmp_path) in where for _, where in took)
    seconds = statistics.median(float(spent) for spent, _ in took)
    assert seconds < IMPORT_S, f"import lora_merge takes {seconds:.2f} s of CPU time beside torch's import"


def test_without_a_compiler_it_says_what_to_do(sdist: Path, tmp_path: Path) -> None:
    python = fresh(sys.executable, tmp_path / "env")
    with pytest.raises(AssertionError, match=r"no C\+\+ compiler: 'no-such' is not on the PATH.*LORA_MERGE_BUILD=0"):
        run([python, "-m", "pip", "install", "--no-deps", sdist], CXX="no-such", LORA_MERGE_CUDA="0")
