"""docs/tutorial.md does what it says: each block runs, and prints what stands below it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from docs_code import DOCS

from lora_merge import cli

NUMBER = re.compile(r"-?[\d,]+(?:\.\d+)?(?:e-?\d+)?")


def steps(text: str) -> list[tuple[str, str, str]]:
    """(kind, what to run, what it prints): blocks of Python, and commands, up to those that need vLLM."""
    found: list[tuple[str, str, str]] = []
    for part in re.finditer(
        r"^```(python|text)\n(.*?)^```|^    (lora-merge [^\n]*)$", text, flags=re.DOTALL | re.MULTILINE
    ):
        kind, body, command = part.groups()
        if kind == "text":
            found[-1] = (*found[-1][:2], body)
        else:
            found.append(("command", command, "") if command else ("python", body, ""))
    return [step for step in found if "vllm" not in step[1] and "push.py" not in step[1]]


def assert_printed(got: str, said: str) -> None:
    """Line by line, up to times and to what a machine's arithmetic decides: floats may be a fifth off."""
    lines, wanted = got.strip().splitlines(), said.strip().splitlines()
    if "..." in wanted:
        middle = wanted.index("...")
        behind = len(wanted) - middle - 1
        lines, wanted = lines[:middle] + lines[len(lines) - behind :], wanted[:middle] + wanted[middle + 1 :]
    assert len(lines) == len(wanted), got
    for line, right in zip(lines, wanted, strict=True):
        words = [re.sub(r"\s+", " ", NUMBER.sub("#", text)) for text in (line, right)]
        assert words[0].endswith(words[1]), (line, right)
        for mine, its in zip(NUMBER.findall(line)[::-1], NUMBER.findall(right)[::-1], strict=False):
            if "." not in its:
                assert mine == its, (line, right)
            elif f"{its} s," not in right:
                assert float(mine) == pytest.approx(float(its), rel=0.2), (line, right)


@pytest.mark.filterwarnings("ignore")
def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    seen = []
    for kind, what, said in steps((DOCS / "tutorial.md").read_text()):
        capsys.readouterr()
        if kind == "command":
            assert cli.main(shlex.split(what)[1:]) == 0
        else:
            exec(compile(what, "tutorial.md", "exec"), names)
        assert_printed(capsys.readouterr().out, said)
        seen.append(kind)
    assert seen.count("python") >= 6
    assert seen.count("command") == 2


def test_the_check_of_what_is_printed() -> None:
    assert_printed("x 1.01 of 3\n", "x 1.0 of 3\n")
    assert_printed("/tmp/a: 3 in 9.1 s, b\n", "a: 3 in 4.2 s, b\n")
    for wrong in ("x 1.5 of 3", "x 1.0 of 4", "y 1.0 of 3", "x 1.0 of 3\nmore"):
        with pytest.raises(AssertionError):
            assert_printed(wrong, "x 1.0 of 3\n")
