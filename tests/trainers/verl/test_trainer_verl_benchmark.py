"""A sync of weights in a real trainer, beside its own way: `benchmarks/trainers.py --trainer verl`, and whole runs of
`main_ppo`: `benchmarks/verl_step.py`."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from trainer_benchmark import measured, ran

LIMIT_S = 400
OPTIONS = ("--device", "cpu", "--steps", "1", "--limit", str(LIMIT_S))


def test_row(tmp_path: Path) -> None:
    ways = measured("verl", tmp_path)
    assert list(ways) == ["verl's own", "lora_merge, verl's transport", "lora_merge, pushed"]


def running() -> set[str]:
    """Return the processes that work where `verl_step.py` runs verl."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if "/verl-step-" in str((process / "cwd").readlink()):
                found.add(process.name)
    return found


def test_a_way_that_does_not_end(tmp_path: Path) -> None:
    """It is a row that says so, of which no process is left."""
    before = running()
    record, printed = ran("verl_step", tmp_path, *OPTIONS, "--ways", "merge", "--limit", "10")
    assert record["ways"]["merge"]["failed"].startswith("no end after 10 s")
    assert "no end after 10 s" in printed
    assert not running() - before


@pytest.mark.timeout(6 * LIMIT_S)
def test_five_ways(tmp_path: Path) -> None:
    """Whole runs; verl 0.9.1's own way for adapters ends its server under vLLM 0.32."""
    record, _ = ran("verl_step", tmp_path, *OPTIONS, limit=5 * LIMIT_S)
    ways = record["ways"]
    assert list(ways) == ["merge", "adapter", "stream", "push", "engine"]
    assert "get_unstacked_mapper" in ways.pop("adapter")["failed"]
    for name, way in ways.items():
        assert "failed" not in way, (name, way)
        assert way["update_weights_s"] > 0, name
        assert abs(way["ratio"] - 1) < 0.02, name
        assert ("pushed_s" in way) == (name != "merge"), name
