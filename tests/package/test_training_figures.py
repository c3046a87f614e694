"""benchmarks/train.py on small models: every case has figures, and the base comes back."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from repository import ROOT


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a benchmark as its own scripts do."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")

    def by_name(name: str) -> ModuleType:
        return __import__(name)

    return by_name


def test_steps_on_merged_weights(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain and with checkpointing; the experts may be refused, by name. The picture again from the JSON alone."""
    train = load("train")
    data, picture, again = tmp_path / "train.json", tmp_path / "train.png", tmp_path / "again.png"
    run = ["train.py", "--shape", "tiny", "--device", "cpu", "--json", str(data), "--plot", str(picture), "--profile"]
    monkeypatch.setattr(sys, "argv", run)
    train.main()
    printed, record = capsys.readouterr().out, json.loads(data.read_text())
    assert [(case["part"], case["adapters"]) for case in record["cases"]] == [
        (part, dtype) for part in ("layers4", "whole", "experts") for dtype in ("fp32", "bf16")
    ]
    for case in record["cases"]:
        assert case["restored"]
        for way, found in case["ways"].items():
            if "error" in found:
                assert (case["part"], way) == ("experts", "merged")
                assert found["error"].startswith("UnsupportedAdapter: ")
                assert found["error"] in " ".join(printed.split()), "said in the table, too"
            else:
                assert 0 < found["forward_ms"] < found["step_ms"], way
                assert ("merge_ms" in found) == (way == "merged")
    assert train.ratio(record["cases"][0], "base") > 0
    assert "layers4, rank 4, fp32 adapters: kernels" in printed
    monkeypatch.setattr(sys, "argv", ["train.py", "--draw", str(data), "--plot", str(again)])
    train.main()
    assert json.loads(data.read_text()) == record
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert again.read_bytes() == picture.read_bytes()


def test_parts_are_joined(load: Any) -> None:
    """Where a time limit takes one part at a time; never of two devices."""
    train = load("train")
    records = [
        {"device_name": "a GPU", "commit": "abc", "shape": "full", "command": [part], "cases": [part]}
        for part in ("layers4", "whole")
    ]
    assert train.joined(records)["cases"] == ["layers4", "whole"]
    assert train.joined(records[:1]) == records[0]
    with pytest.raises(SystemExit, match="device_name"):
        train.joined([records[0], records[1] | {"device_name": "another GPU"}])


def test_what_was_asked_for(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A step that takes more than was asked for is told, and a way that failed has a reason in the place of figures."""
    train = load("train")
    ways = {"base": 100.0, "peft": 160.0, "merged": 104.0}
    figures = {way: {"step_ms": ms, "forward_ms": ms / 2, "peak_bytes": 1 << 30} for way, ms in ways.items()}
    common = {"rank": 32, "adapters": "fp32", "tokens": 8192, "restored": True}
    failed = figures | {"peft": {"error": "OutOfMemoryError: too much"}}
    cases = [common | {"part": "layers4", "ways": figures}, common | {"part": "whole", "ways": failed}]
    train.show({"device_name": "a GPU", "device": "cuda", "versions": {}, "cases": cases})
    printed = capsys.readouterr().out
    assert "missed: layers4, rank 32, fp32 adapters: step beside the base alone: 1.040, asked 1.03" in printed
    assert "step beside PEFT's: 0.650, asked 0.62" in printed
    assert "whole, rank 32, fp32 adapters, PEFT's forward: OutOfMemoryError: too much" in printed
    assert "missed: whole" not in printed
