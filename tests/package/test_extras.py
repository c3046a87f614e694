"""What waits for modules that others import."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from lora_merge.extras import after_import


def test_what_is_called_after_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "waited_for.py").write_text("DONE = True\n")
    seen: list[tuple[str, bool]] = []
    for who in ("one", "other"):
        after_import("waited_for", lambda module, who=who: seen.append((who, module.DONE)))  # type: ignore[misc]
    assert find_spec("waited_for") is not None
    assert find_spec("waited_for_not") is None
    assert seen == [], "nobody has imported it yet"
    waited_for = import_module("waited_for")
    assert sorted(seen) == [("one", True), ("other", True)]
    after_import("waited_for", lambda module: seen.append(("late", module is waited_for)))
    assert seen[2:] == [("late", True)]
    monkeypatch.delitem(sys.modules, "waited_for")
