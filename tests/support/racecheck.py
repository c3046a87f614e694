"""Reads the log of compute-sanitizer's racecheck, and passes over what it reports of writes that sources mark.

python tests/support/racecheck.py LOG        (1 if a report is left)

A mark is a pair of comments in csrc/cuda, `// racecheck: begin WHAT` and `// racecheck: end`;
csrc/cuda/sm90/producer.cuh says why racecheck cannot follow what lies between. A report names two accesses by file
and line (the extension is built with -lineinfo): it is passed over if a write of the two is marked.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

from repository import ROOT

SOURCES = ROOT / "csrc" / "cuda"
_ACCESS = re.compile(r"(Read|Write) access at .*? in (?:\S*/)?([\w.]+):(\d+)")


def marked() -> dict[tuple[str, int], str]:
    """What is written on a line of a file."""
    found: dict[tuple[str, int], str] = {}
    for path in sorted(SOURCES.rglob("*.*")):
        what = ""
        for number, line in enumerate(path.read_text().splitlines(), 1):
            mark = re.search(r"// racecheck: (begin (.*)|end)$", line)
            if mark:
                assert bool(what) != bool(mark[2]), f"{path.name}:{number}: marks are pairs"
                what = mark[2] or ""
            elif what:
                found[path.name, number] = what
        assert not what, f"{path.name}: a mark without its end"
    return found


def reports(log: str) -> list[str]:
    """Each with the lines that go on about it."""
    lines = [line.removeprefix("=========").strip() for line in log.splitlines() if line.startswith("=========")]
    found: list[str] = []
    for line in lines:
        if "Race reported" in line:
            found.append(line)
        elif found and line.startswith("and "):
            found[-1] += " " + line
    return found


def explanation(report: str, marks: dict[tuple[str, int], str]) -> str | None:
    """What it is about, if that is marked."""
    writes = [(file, int(line)) for kind, file, line in _ACCESS.findall(report) if kind == "Write"]
    return next((marks[place] for place in writes if place in marks), None)


def main(log: str) -> int:
    marks, passed, left = marked(), Counter[str](), []
    for report in reports(log):
        what = explanation(report, marks)
        if what is None:
            left.append(report)
        else:
            passed[what] += 1
    for what, count in passed.items():
        sys.stdout.write(f"passed over: {count} of {what}\n")
    sys.stdout.writelines(f"{report}\n" for report in left)
    if "RACECHECK SUMMARY" not in log:
        sys.stdout.write("the log has no summary: racecheck did not end\n")
        return 1
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).read_text()))
