"""What runs the tests that need a GPU (gpu_tests.py), on tests that need none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from repository import TESTS

PLAIN = """
import pytest

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("name", ["a b", "c"])
def test_passes(name): ...

def test_fails():
    assert 0
"""
STARTS = """
import os, pytest, subprocess, time

pytestmark = pytest.mark.gpu

class TestBoth:
    @pytest.mark.skipif("," not in os.environ.get("CUDA_VISIBLE_DEVICES", ""), reason="needs 2 GPUs")
    def test_two(self): ...

def test_hangs():
    child = subprocess.Popen(["sleep", "600"])
    with open("child", "w") as file:
        file.write(str(child.pid))
    time.sleep(600)
"""


def test_each_result_is_told(tmp_path: Path) -> None:
    """Failures, what hangs with what it has started, what wants two GPUs, what cannot be imported."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    for name, text in (("test_a.py", PLAIN), ("test_vllm_b.py", STARTS), ("test_c.py", "import nothing_of_this_name")):
        (tmp_path / name).write_text(text)
    command = [sys.executable, str(TESTS / "gpu" / "gpu_tests.py"), "log", ".", "--gpus", "2"]
    told = subprocess.run([*command, "--limit", "8"], cwd=tmp_path, capture_output=True, text=True)
    assert told.returncode == 1, told.stderr
    assert "test_a.py: 2 passed, 1 failed, status 1" in told.stdout
    both = [line for line in told.stdout.splitlines() if line.startswith("test_vllm_b.py::TestBoth::test_two:")]
    assert [line.split(": ")[1].split(",")[0] for line in both] == ["1 skipped", "1 passed"], told.stdout
    failed = told.stdout.rpartition("3 failed")[2]
    for name in ("test_a.py::test_fails", "test_vllm_b.py::test_hangs: not done in time", "ERROR test_c.py"):
        assert name in failed, told.stdout
    assert not Path("/proc", (tmp_path / "child").read_text()).exists() or _is_zombie(tmp_path / "child")
    assert "assert 0" in (tmp_path / "log").read_text()


def _is_zombie(file: Path) -> bool:
    return Path("/proc", file.read_text(), "stat").read_text().rpartition(")")[2].split()[0] == "Z"
