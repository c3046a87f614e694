"""What is passed over of racecheck's reports. The logs are made up, in its format: it runs on GPU machines."""

from __future__ import annotations

import pytest
import racecheck

WORDS = next(line for (file, line), what in racecheck.marked().items() if what == "words of a segment")
END = "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"


def report(first: str, second: str) -> str:
    return (
        f"========= Error: Race reported between {first}\n=========     and {second} [16 hazards]\n"
        f"=========     and {second} [4 hazards]\n=========\n"
    )


def access(kind: str, file: str, line: int) -> str:
    kernel = "void lora_merge::hopper::merge_kernel<__nv_bfloat16, 2, true>(lora_merge::HopperLaunch, T3)"
    return f"{kind} access at {kernel}+0x3f0 in /src/csrc/cuda/{file}:{line}"


def test_marks() -> None:
    marks = racecheck.marked()
    assert {file for file, _ in marks} == {"producer.cuh", "ptx.cuh"}
    assert len(set(marks.values())) == 4
    assert len(marks) < 50, "marks are for single writes, not for whole files"


@pytest.mark.parametrize(("first", "second", "left"), [
    (access("Write", "sm90/producer.cuh", WORDS), access("Read", "sm90/merge.cuh", 400), False),
    (access("Read", "tiles.cuh", 70), access("Write", "sm90/producer.cuh", WORDS), False),
    (access("Read", "sm90/producer.cuh", WORDS), access("Write", "sm90/merge.cuh", 400), True),
    (access("Write", "sm90/merge.cuh", 200), access("Read", "sm90/merge.cuh", 210), True),
    (access("Write", "merge.cuh", WORDS), access("Read", "merge.cuh", 10), True),
    ("Write access at void hopper()+0x10", "Read access at void hopper()+0x20", True),
])  # fmt: skip
def test_reports(first: str, second: str, left: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert racecheck.main(report(first, second) + END) == left
    out = capsys.readouterr().out
    assert (first in out) == left
    assert ("passed over: 1 of words of a segment" in out) != left


def test_a_log_without_an_end() -> None:
    assert racecheck.main("") == 1
    assert racecheck.main("========= RACECHECK SUMMARY: 0 hazards displayed\n") == 0
