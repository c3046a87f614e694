"""Which machine and GPU architectures the extension is built for."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from repository import ROOT

import lora_merge
from lora_merge.kernels.bindings import native

KNOWN = {"75", "80", "86", "87", "88", "89", "90", "100", "103", "110", "120", "121"}


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    return load()


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lora_merge_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("wanted", "built", "said"), [
    ("8.0", ["80"], ""),
    ("9.0", ["90a"], ""),
    ("9.0a", ["90a"], ""),
    ("8.0;9.0 10.0,12.0+PTX", ["80", "90a", "100", "120", "120+PTX"], ""),
    ("8.6+PTX", ["86", "86+PTX"], ""),
    ("8.6+ptx;8.6", ["86", "86+PTX"], ""),
    ("10.0f", ["100f"], ""),
    ("7.5 8.0", ["80"], "'7.5' is left out"),
    ("6.1;7.0;8.9+PTX", ["89", "89+PTX"], "'6.1' is left out.*'7.0' is left out"),
    ("Ampere", ["80", "86"], ""),
    ("hopper", ["90a"], ""),
    ("Turing;Ada+PTX", ["89", "89+PTX"], "'Turing' is left out"),
    ("Blackwell", ["100", "103", "120", "121"], ""),
    ("Ampere+Tegra", ["87"], ""),
    ("8.0 13.0", ["80"], "13.0 is left out: this nvcc does not know it"),
])  # fmt: skip
def test_lists(setup: ModuleType, wanted: str, built: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert setup.architectures(wanted, [(8, 0)], KNOWN) == built
    err = capsys.readouterr().err
    assert re.search(said, err, re.DOTALL) if said else not err


def test_without_a_list(setup: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """The GPUs that are here; where none is, those that this nvcc knows of all that the kernels run on."""
    assert setup.architectures("", [(9, 0), (8, 9), (9, 0)], KNOWN) == ["89", "90a"]
    assert setup.architectures(" ", [], KNOWN) == ["80", "86", "89", "90a", "100", "120", "120+PTX"]
    assert capsys.readouterr().err == ""
    assert setup.architectures("", [], KNOWN - {"100", "120"}) == ["80", "86", "89", "90a"]
    assert "12.0 is left out: this nvcc does not know it" in capsys.readouterr().err


def test_an_index_shows_where_the_repository_is(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GitHub, which says so. The number of the release is written in two places."""
    for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY"):
        monkeypatch.delenv(name, raising=False)
    plain = setup.page()
    assert plain["long_description"] == (ROOT / "README.md").read_text()
    assert not plain["project_urls"]
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://forge")
    monkeypatch.setenv("GITHUB_REPOSITORY", "o/r")
    told = setup.page()
    assert told["project_urls"]["Changelog"] == f"https://forge/o/r/blob/v{lora_merge.__version__}/CHANGELOG.md"
    links = re.findall(r"\]\(([^)\s]+)\)", told["long_description"])
    assert links
    assert all(link.startswith(("https://", "#")) for link in links)
    assert f"\nversion: {lora_merge.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize(("wanted", "message"), [
    ("7.5", "none of it can be built.*8.0 and later"),
    ("Volta;Turing+PTX", "none of it can be built"),
    ("8", "expected numbers such as 8.0;9.0a, or Hopper, got '8'"),
    ("8.0;Hoper", "got 'Hoper'"),
    ("sm_80", "got 'sm_80'"),
])  # fmt: skip
def test_lists_that_stop_the_build(setup: ModuleType, wanted: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        setup.architectures(wanted, [], KNOWN)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_default_on_this_nvcc(setup: ModuleType, tmp_path: Path) -> None:
    """It compiles, and what it says that it built is what runs."""
    nvcc = Path(shutil.which("nvcc") or "")
    built = setup.architectures("", [], setup.known_to(nvcc))
    (tmp_path / "empty.cu").write_text("__global__ void nothing() {}\n")
    output = tmp_path / "empty.o"
    subprocess.run([nvcc, *setup.flags(built), "-c", tmp_path / "empty.cu", "-o", output], check=True)
    assert output.stat().st_size > 0
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0)):
        assert any(native.runs(name, capability) for name in built)
    if "120+PTX" in built:
        assert all(any(native.runs(name, c) for name in built) for c in ((10, 0), (10, 3), (12, 0), (12, 1), (13, 0)))


def test_another_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The compiler says which one; CUDA's runtime has to be that machine's."""
    pytest.importorskip("ziglang", reason="a compiler for another machine")
    other = "x86_64" if platform.machine() in ("aarch64", "arm64") else "aarch64"
    monkeypatch.setenv("CXX", f"{sys.executable} -m ziglang c++ -target {other}-linux-gnu.2.28")
    module = load()
    machine = module.MACHINE
    assert machine == other
    assert module.CROSS
    assert module.extension()["options"]["bdist_wheel"]["plat_name"] == f"linux_{other}"
    for folder in ("", "lib"):
        if folder:
            monkeypatch.setenv("LORA_MERGE_CUDART", str(tmp_path / folder))
        with pytest.raises(SystemExit, match=f"no libcudart_static.a for {other} in .*{folder}.*LORA_MERGE_CUDART"):
            module.cudart(tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libcudart_static.a").touch()
    assert module.cudart(tmp_path) == [f"-L{tmp_path / 'lib'}"]


def test_this_machine(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not setup.CROSS
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not load().CROSS, "that there is none is said when it is needed"
