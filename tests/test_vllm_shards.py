"""A sharded trainer of two real processes, and a real engine in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import engines
import pytest
import torch
from processes import spawn
from sharded_trainer import every_layout, pushes
from test_shards_merge import fsdp1, fsdp2

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers


@pytest.mark.parametrize("wrap", [fsdp2, fsdp1])
def test_pushes_of_a_sharded_trainer(wrap: object, tmp_path: Path) -> None:
    spawn(2, pushes, wrap, tmp_path, torch.float32, [""], {}, 12e-6, timeout=timedelta(minutes=8))


def test_every_layout_and_what_is_refused(tmp_path: Path) -> None:
    spawn(4, every_layout, tmp_path, timeout=timedelta(minutes=8))


def test_the_benchmark(tmp_path: Path) -> None:
    """Pushes of benchmarks/fsdp.py and of the peer beside it, into one engine."""
    root, data = Path(__file__).parents[1], tmp_path / "fsdp.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(root / "benchmarks" / "fsdp.py"), "--device", "cpu", "--shape", "tiny", "--tp", "1"]
    command += ["--parts", "push", "peer", "--bucket-bytes", "200000", "--repeats", "1", "--json", str(data)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    environment |= {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    record = json.loads(data.read_text())
    assert record["push"]["tensors"] == 27
    assert record["push"]["phases_ms"].keys() == {"check", "pause", "transfer", "finish", "resume"}
    assert record["peer"]["phases_ms"].keys() == {"backup", "merge", "send and load", "restore"}
    assert record["peer"]["times_faster"] == record["peer"]["total_ms"] / record["push"]["total_ms"]
