"""What only the Triton backend does: compiling without a GPU, and tables made while a CUDA graph is captured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import GPU, Backend
from helpers import assert_same_bits, make_segment, pairwise

from lora_merge import Plan

TRITON = [pytest.param(("triton", "cuda"), marks=pytest.mark.gpu)] if GPU else [("triton", "cpu")]


def test_compiles_for_hopper(tmp_path: Path) -> None:
    """Aligned tables move weights 16 bytes at a time, and adapters go through the matrix unit."""
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(here.parent),
    }
    command = [sys.executable, str(here / "compile_triton.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("backend", TRITON, indirect=True)
def test_tables_made_during_a_capture(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is built while a CUDA graph is captured holds the same table, without a copy from the host."""
    segments = [make_segment(f"{rows}", rows, 140, 3, pairwise(4), backend.device) for rows in (70, 1, 33)]
    Plan(segments).run()
    wanted = [s.destination.clone() for s in segments]
    for s in segments:
        s.destination.zero_()
    with monkeypatch.context() as patch:
        patch.setattr("lora_merge.kernels.triton_table._capturing", lambda device: True)
        plan = Plan(segments)
    plan.run()
    for s, result in zip(segments, wanted, strict=True):
        assert_same_bits(s.destination, result)
