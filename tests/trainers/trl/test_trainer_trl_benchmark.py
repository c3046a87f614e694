"""A sync of weights in a real trainer, beside its own way: `benchmarks/trainers.py --trainer trl`; and whole steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer_benchmark import measured, ran


def test_row(tmp_path: Path) -> None:
    ways = measured("trl", tmp_path)
    assert list(ways) == ["TRL's own", "lora_merge"]
    assert next(iter(ways.values()))["drift"] > 0.1


def test_whole_steps(tmp_path: Path) -> None:
    options = ("--shape", "tiny", "--device", "cpu", "--layers", "1", "--steps", "1", "--ways", "merged")
    record, printed = ran("step", tmp_path, *options)
    assert {"commit", "command", "device_name", "completions", "cuda_graphs"} <= record.keys()
    assert {"trl", "vllm"} <= record["versions"].keys()
    [way] = record["ways"].values()
    assert way["seconds"].keys() == {"rollout", "sync", "update"}
    assert all(seconds > 0 for seconds in way["seconds"].values()), way
    assert len(way["steps"]) == 3, "one, and two that warm up"
    assert way["drift"] == 0
    assert "lora_merge" in printed


def test_whole_steps_in_all_ways(tmp_path: Path) -> None:
    record, printed = ran("step", tmp_path, "--shape", "tiny", "--device", "cpu", "--steps", "2")
    drift = {name: way["drift"] for name, way in record["ways"].items()}
    assert drift.keys() == {"trl", "adapter", "merged", "trained", "shared"}
    assert drift.pop("trl") > 0.1
    assert not any(drift.values()), drift
    assert printed.count("%)") == 4, "each is compared with TRL's own way"


@pytest.mark.whole
def test_one_copy(tmp_path: Path) -> None:
    options = ("--shape", "tiny", "--device", "cpu", "--repeats", "2", "--steps", "2", "--ways", "shared")
    record, printed = ran("one_copy", tmp_path, *options)
    ways = record["memory"]
    assert list(ways) == ["one copy, bf16 adapters", "one copy, float32 adapters", "two copies, float32 adapters"]
    assert [way["moved_bytes"] == 0 for way in ways.values()] == [True, True, False]
    assert all(way["gap"] < 0.05 for way in ways.values()), ways
    assert len(record["grpo"]["shared"]["steps_s"]) == 2
    assert "error" not in record["grpo"]["shared"]
    assert "lora_merge, one copy" in printed
