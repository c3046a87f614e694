"""Runs of examples/grpo.py on two processes, and what every step of them must show."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from repository import ROOT

PROCESSES = 2


def grpo(out: Path, *options: str) -> str:
    """Run the example; returns what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(PROCESSES), str(ROOT / "examples" / "grpo.py"), "--out", str(out), "--prompts", "8", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=500)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def records(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def break_off_and_go_on(out: Path, options: list[str], before: list[str], after: list[str], *, seeded: bool) -> None:
    """Every token of every step comes from the policy, and so it is after a resume.

    Four steps, a checkpoint after three: what the fourth did is lost, as in a crash, and done again.

    Args:
        options: of both runs; `before` and `after`: of one.
        seeded: whether requests have seeds, so that the lost step comes again.
    """
    options = [*options, "--pretrain", "40", "--save-every", "3"]
    printed = grpo(out, *options, *before, "--steps", "4")
    shutil.rmtree(out / "checkpoint-000004")
    lost = records(out)[3]
    printed += grpo(out, *options, *after, "--steps", "6", "--resume")
    steps = records(out)
    assert [step["step"] for step in steps] == list(range(6))
    assert [step["resumed"] for step in steps] == [False, False, False, True, False, False]
    for step in steps:
        # In float32 a log-prob of a few units carries some ten roundings of 2^-24 on either side; 1e-4 is far below the
        # 0.02 that training needs, and far below what a missing or doubled adapter does.
        assert step["ratio_off"] < 1e-4, f"step {step['step']}: {step}"
        assert step["tokens"] >= 64, "one token an answer at least"
    assert printed.count("gap max") == 7, "the gap of every step is printed"
    mode = options[options.index("--mode") + 1]
    assert printed.count(f"{mode}@") == 7
    for run, count in ((before, 4), (after, 3)):
        if "--merge" in run:
            assert printed.count(f"by the {run[-1]} pushed") == count
    if seeded:  # the same prompts, seeds and weights: the resumed run does what the lost step did
        assert steps[3]["reward"] == pytest.approx(lost["reward"], abs=0.05)
    kept = torch.load(out / "checkpoint-000006" / "trainer.pt", weights_only=True)
    assert kept["step"] == 6
