"""Scripts of examples/ that need no engine, short."""

from __future__ import annotations

import sys

import pytest
from repository import ROOT

EXAMPLES = ROOT / "examples"


def run(name: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    """The main function of a script, with these options."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
    __import__(name).main()


def test_merge_speed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("merge_speed", monkeypatch, "--repeat", "1")
    printed = capsys.readouterr().out
    assert "28 matrices, 30 MB of bfloat16" in printed
    assert all(name in printed for name in ("one copy  ", "lora_merge  ", "PEFT's merge_adapter  "))
    changed = printed.rpartition("after PEFT ")[2].strip().removesuffix("%")
    assert "after lora_merge 0.0%" in printed
    assert float(changed) > 1


def test_generate_merged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("generate_merged", monkeypatch, "--answers", "2", "--tokens", "4")
    printed = capsys.readouterr().out
    assert "greedy tokens that agree        100.0%" in printed
    assert printed.rstrip().endswith("yes")
