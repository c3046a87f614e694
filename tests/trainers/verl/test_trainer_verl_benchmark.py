"""A sync of weights in a real trainer, beside its own way: `benchmarks/trainers.py --trainer verl`."""

from __future__ import annotations

from pathlib import Path

from trainer_benchmark import measured


def test_row(tmp_path: Path) -> None:
    ways = measured("verl", tmp_path)
    assert list(ways) == ["verl's own", "lora_merge, verl's transport", "lora_merge, pushed"]
