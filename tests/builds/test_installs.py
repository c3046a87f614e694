"""What pip makes of the sources in environments that hold nothing else: the source distribution, the pure wheel, the
checkout (`make test-installs`; pip brings setuptools and ninja into its own build environments)."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import index
import pytest
import torch
from packaging import metadata
from repository import ROOT

TORCH = Path(torch.__file__).parents[1]
"""Beside which the package is imported."""
LEFT_OUT = ("PYTHONPATH", "LORA_MERGE_BUILD", "GITHUB_SERVER_URL", "GITHUB_REPOSITORY")
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
    kept = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
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


@pytest.fixture(scope="module")
def pure(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made as a release on GitHub makes it, which knows where it is."""
    folder, there = tmp_path_factory.mktemp("pure"), {"GITHUB_SERVER_URL": "https://forge", "GITHUB_REPOSITORY": "o/r"}
    python = fresh(sys.executable, folder / "env")
    command = [python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder / "dist", sources]
    run(command, LORA_MERGE_BUILD="0", **there)
    (wheel,) = (folder / "dist").glob("*-py3-none-any.whl")
    return wheel


@pytest.fixture(scope="module")
def compiled(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of the checkout by the newest Python, with pip's own build environment and nothing beside it."""
    folder = tmp_path_factory.mktemp("compiled")
    python = fresh(pythons()[-1], folder / "env")
    run([python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder / "dist", sources], LORA_MERGE_CUDA="0")
    (wheel,) = (folder / "dist").glob("*.whl")
    run([python, "-m", "pip", "install", "-q", "--no-deps", wheel])
    (there,) = (folder / "env").glob("lib/python*/site-packages/lora_merge")
    assert "GPUs:" in run([python, "-I", ROOT / "tests" / "support" / "other_python.py", there])
    return wheel


def test_pip_compiles_it_by_itself(sdist: Path, tmp_path: Path) -> None:
    python = fresh(sys.executable, tmp_path / "env")
    run([python, "-m", "pip", "install", "-q", "--no-deps", sdist], LORA_MERGE_CUDA="0")
    (folder,) = (tmp_path / "env").glob("lib/python*/site-packages/lora_merge")
    assert "GPUs:" in run([python, "-I", ROOT / "tests" / "support" / "other_python.py", folder])
    assert run([python, "-I", "-c", MERGED.format(torch=str(TORCH))]).strip() == "compiled"


def beside(folder: Path) -> Path:
    """Torch and all else that is installed here, as packages of another environment; without lora_merge."""
    folder.mkdir()
    for path in TORCH.iterdir():
        if not path.name.lower().startswith(("lora_merge", "lora-merge", "__editable__")) and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    return folder


def test_pip_install_lora_merge(compiled: Path, pure: Path, sdist: Path, tmp_path: Path) -> None:
    """By its name, from an index that has what a release uploads: the wheel of the platform, the pure one where there
    is no other, the sources where no wheel is wanted; what it depends on is found by its metadata."""
    dist = tmp_path / "dist"
    dist.mkdir()
    for file in (compiled, pure, sdist):
        shutil.copy(file, dist)
    python, packages = fresh(sys.executable, tmp_path / "env"), beside(tmp_path / "packages")
    with index.served(dist) as variables:
        told = run([python, "-m", "pip", "install", "lora-merge[peft]"], PYTHONPATH=str(packages), **variables)
        assert f"Downloading {variables['PIP_INDEX_URL']}lora-merge/{compiled.name}" in told
        assert "Requirement already satisfied: torch>=2.10" in told
        assert "Requirement already satisfied: peft<0.22,>=0.18" in told
        told = run([tmp_path / "env/bin/lora-merge", "--version"], PYTHONPATH=str(packages))
        assert told == f"lora-merge {compiled.name.split('-')[1]}\n"
        assert run([python, "-I", "-c", MERGED.format(torch=str(packages))]).strip() == "compiled"
        for platform, found in (("macosx_14_0_arm64", pure), ("win_amd64", pure), ("linux_x86_64", compiled)):
            got = tmp_path / platform
            asked = ["--only-binary", ":all:", "--platform", platform, "--python-version", "3.13", "-d", got]
            run([python, "-m", "pip", "download", "-q", "--no-deps", *asked, "lora_merge"], **variables)
            assert [path.name for path in got.iterdir()] == [found.name]


def test_what_an_index_shows(pure: Path, sdist: Path) -> None:
    """Authors, licence, addresses of the repository that made it; and a README whose links lead there, as no index has
    the files beside it. Made elsewhere it names no address."""
    with zipfile.ZipFile(pure) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        told = metadata.Metadata.from_email(archive.read(name))  # which checks every field
    assert told.name == "lora-merge"
    assert told.author == "The lora_merge authors"
    assert told.license_expression == "Apache-2.0"
    assert told.description_content_type == "text/markdown"
    at = f"https://forge/o/r/blob/v{told.version}"
    assert told.project_urls == {
        "Repository": "https://forge/o/r",
        "Documentation": f"{at}/docs/install.md",
        "Changelog": f"{at}/CHANGELOG.md",
        "Issues": "https://forge/o/r/issues",
    }
    assert told.description is not None
    pictures = re.findall(r"!\[[^]]*\]\((?!https:)", (ROOT / "README.md").read_text())
    assert told.description.count("](https://forge/o/r/raw/") == len(pictures)
    assert f"({at}/docs/" in told.description
    links = re.findall(r"\]\(([^)\s]+)\)", told.description)
    assert not [link for link in links if not link.startswith(("https://", "#"))]
    with tarfile.open(sdist) as archive:
        (member,) = (name for name in archive.getnames() if name.count("/") == 1 and name.endswith("PKG-INFO"))
        file = archive.extractfile(member)
        assert file is not None
        plain = metadata.Metadata.from_email(file.read())
    assert not plain.project_urls
    assert plain.description == (ROOT / "README.md").read_text()


def test_the_pure_wheel(pure: Path, tmp_path: Path) -> None:
    """It holds no machine code, and merges by what is there without."""
    python, wheel = fresh(sys.executable, tmp_path / "env"), pure
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
