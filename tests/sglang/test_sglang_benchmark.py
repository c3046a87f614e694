"""benchmarks/sync.py with SGLang, small, and its row of the table beside vLLM's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import sglang_engines  # noqa: F401 - SGLang runs on a CPU
from repository import ROOT

BENCHMARKS = ROOT / "benchmarks"


def test_buckets(tmp_path: Path) -> None:
    file = tmp_path / "sync-sglang.json"
    options = ["--device", "cpu", "--shape", "tiny", "--rank", "4", "--repeats", "1", "--parts", "buckets"]
    command = [sys.executable, str(BENCHMARKS / "sync.py"), "--engine", "sglang", *options, "--json", str(file)]
    subprocess.run(command, check=True, timeout=300)
    record = json.loads(file.read_text())["buckets"]
    assert record["transports"] == ["shm"]
    assert "cannot be mapped" in record["buckets"]
    assert len(record["answer"]) == 8
    table = subprocess.check_output(
        [sys.executable, str(BENCHMARKS / "beside_vllm.py"), "--results", str(tmp_path)], text=True
    )
    row = next(line for line in table.splitlines() if line.startswith("| the trainer merges, in buckets"))
    assert f"| {record['total_ms']:.0f} |" in row
