"""What imports what in `lora_merge/engine`, as the paragraph "Imports" of ARCHITECTURE.md says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ENGINE = Path(__file__).resolve().parents[2] / "lora_merge" / "engine"
FLOORS = (
    {"state", "tenants", "configs", "fingerprint", "stamps", "unfit"},
    {"messages", "transport", "adapter_versions"},
    {"lease", "control", "payload"},
    {"worker", "push"},
    {"sync"},
    {"vllm", "sglang"},
    {"handles"},
    {"load_adapter"},
)
"""Files and folders of `engine`, each of which imports only what stands before it, and nothing beside it."""


def room_of(file: Path) -> str:
    return file.relative_to(ENGINE).parts[0].removesuffix(".py")


def imported(file: Path) -> Iterator[str]:
    """Yield the files and folders of `engine` that a file imports, anywhere in it."""
    package = ["lora_merge", *file.relative_to(ENGINE.parent).parent.parts]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = [*above, *(node.module.split(".") if node.module else [])]
            names = [[*module, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        else:
            continue
        yield from (name[2] for name in names if name[:2] == ["lora_merge", "engine"] and len(name) > 2)


def test_every_file_and_folder_has_a_floor() -> None:
    rooms = {room_of(file) for file in ENGINE.rglob("*.py")} - {"__init__"}
    assert rooms == set().union(*FLOORS)


@pytest.mark.parametrize("room", sorted(set().union(*FLOORS)))
def test_a_package_imports_only_what_stands_before_it(room: str) -> None:
    floor = next(number for number, rooms in enumerate(FLOORS) if room in rooms)
    allowed = {room}.union(*FLOORS[:floor])
    files = [file for file in ENGINE.rglob("*.py") if room_of(file) == room]
    wrong = [
        f"{file.relative_to(ENGINE)} imports {name}" for file in files for name in imported(file) if name not in allowed
    ]
    assert files
    assert not wrong
