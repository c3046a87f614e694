"""benchmarks/timeline.py: one push into a real engine, event by event."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from repository import ROOT


def test_events_of_a_push(tmp_path: Path) -> None:
    root, data = ROOT, tmp_path / "timeline.json"
    command = [sys.executable, str(root / "benchmarks" / "timeline.py"), "--device", "cpu", "--shape", "tiny"]
    command += ["--repeats", "3", "--json", str(data)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    record = json.loads(data.read_text())
    begins = [begin for _, begin, _ in record["events_ms"]]
    assert begins == sorted(begins)
    assert all(0 <= begin <= end <= record["push_ms"] for _, begin, end in record["events_ms"])
    names = [name for name, _, _ in record["events_ms"] if name.startswith(("trainer", "worker"))]
    told = [name for name in names if name not in ("worker: waits for its GPU", "worker: launches")]
    assert told == [
        "trainer: collective_rpc", "worker: hello", "trainer: lora_merge_calls", "worker: note_pause", "worker: pull",
        "worker: commit", "worker: end",
    ]  # fmt: skip
