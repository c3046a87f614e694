"""A sync of weights in a real trainer, beside its own way: `benchmarks/trainers.py --trainer swift`."""

from __future__ import annotations

from pathlib import Path

from trainer_benchmark import measured


def test_row(tmp_path: Path) -> None:
    ways = measured("swift", tmp_path)
    assert list(ways) == ["swift's own", "lora_merge"]
    assert next(iter(ways.values()))["drift"] > 0.1
