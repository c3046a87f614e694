"""benchmarks/disaggregated.py on a CPU: two ranks under FSDP2, and an engine of two workers beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from repository import ROOT


def test_a_dry_run(tmp_path: Path) -> None:
    data = tmp_path / "out.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "benchmarks" / "disaggregated.py"), "--device", "cpu", "--shape", "tiny"]
    command += ["--requests", "2", "--new-tokens", "64", "--repeats", "2", "--bucket-bytes", "200000"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--json", str(data)], env=environment, text=True, capture_output=True, timeout=400)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    record = json.loads(data.read_text())
    assert (record["trainer_ranks"], record["tp"]) == (2, 2)
    for part in ("merged", "engine"):
        found = record[part]
        for when in ("phases_ms", "idle_phases_ms"):
            assert found[when].keys() == {"check", "pause", "transfer", "finish", "resume"}
        assert (found["transports"], found["coverage"]) == (["shm"], 1.0), found
        assert found["longest_ms"][1] > 0, "requests were in flight"
    assert record["engine"]["bytes"] < record["merged"]["bytes"]
    assert record["published"]["bytes"] > 0
    assert record["vllm"] == {"skipped": "NCCL wants GPUs"}
