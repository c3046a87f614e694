"""The Triton kernels compile for Hopper, with the accesses that they are meant to have; no GPU is needed for that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


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
