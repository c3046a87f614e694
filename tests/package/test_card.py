"""`benchmarks/card.py`, for cards that were never run: from the first line to the file that is sent, on a CPU."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import card

    return card


def test_one_command(card: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """What fails is in the file, too: a size without room, a test."""
    failing = tmp_path / "test_failing.py"
    failing.write_text("import pytest\n\n@pytest.mark.gpu\ndef test_it():\n    assert 1 == 2, 'the kernel is wrong'\n")
    monkeypatch.setattr(card, "TESTS", [str(failing), "-c", str(ROOT / "pyproject.toml")])
    monkeypatch.setattr(card, "SHAPES", ["like-kimi-k2", "tiny"])
    monkeypatch.setattr(card, "JOBS", {"some": ["--rank", "5"]})
    monkeypatch.setattr(Path, "home", lambda: ROOT)
    out = tmp_path / "deeper" / "card.json"
    monkeypatch.setattr(sys, "argv", ["card.py", "--device", "cpu", "--out", str(out)])
    card.main()
    record = json.loads(out.read_text())
    assert record["card"]["device_name"]
    assert dict(record["doctor"]["rows"])["lora_merge"].endswith("~/lora_merge")
    assert str(ROOT) not in out.read_text()
    assert record["tests"]["status"] == "1"
    assert re.match(r"1 failed", record["tests"]["summary"])
    assert "the kernel is wrong" in record["tests"]["output"]
    assert [(found["shape"], found["rank"]) for found in record["measured"].values()] == [("tiny", 5)]
    printed = capsys.readouterr().out
    assert len(re.findall(r"lora_merge in place: [0-9.]+ ms, exact", printed)) == 1
    assert "nothing to do" in printed or "to do:" in printed


def test_its_own_tests_and_sizes_are_there(card: Any) -> None:
    assert all((ROOT / file).exists() for file in card.TESTS)
    assert set(card.SHAPES) <= set(card.job.shapes.SHAPES)


def test_nothing_that_fits_and_no_gpu(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "SHAPES", ["like-kimi-k2"])
    shape, found = card.measure([], card.torch.device("cpu"))
    assert not shape
    assert "InvalidInput: like-kimi-k2" in found["error"]
    assert list(card.lines_of(found)) == [f"  {found['error']}"]
    if not card.torch.cuda.is_available():
        monkeypatch.setattr(sys, "argv", ["card.py"])
        with pytest.raises(SystemExit):
            card.main()
