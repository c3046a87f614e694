"""`benchmarks/trainers.py`, `rollout.py`, `step.py` and `verl_step.py` on tiny shapes, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import vllm_name
from repository import ROOT


def ran(script: str, folder: Path, *options: str, limit: float = 300) -> tuple[dict[str, Any], str]:
    """Run a benchmark, with vLLM under the name that trainers ask for.

    Args:
        limit: seconds that it may take.

    Returns:
        its record, and what it printed.
    """
    named = vllm_name.folder(folder / "named")
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep), str(named)]
    data = folder / "out.json"
    command = [sys.executable, f"benchmarks/{script}.py", *options, "--json", str(data)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}, text=True,
        capture_output=True, timeout=limit,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return json.loads(data.read_text()), done.stdout


def measured(trainer: str, folder: Path) -> dict[str, Any]:
    """Run `trainers.py`; its ways by name, after what holds for ours on any machine."""
    record, printed = ran("trainers", folder, "--trainer", trainer, "--repeat", "2")
    assert record["bytes"] > 0
    assert all(name in printed for name in record["ways"])
    for name, way in record["ways"].items():
        assert way["ms"] > 0, name
        assert way["drift"] == 0 or "lora_merge" not in name
    return record["ways"]
