"""Files of the package import each other one way: no circles. (`test_imports.py` holds the floors of `engine`.)"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TypeAlias

import pytest

PACKAGE = Path(__file__).parents[2] / "lora_merge"
NOT_IMPORTED = PACKAGE / "integrations" / "ms_swift" / "plugin"
"""swift puts this folder on sys.path; it is no package."""
Graph: TypeAlias = Mapping[str, set[str]]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, name: str, modules: Mapping[str, Path]) -> Iterator[str]:
    """The modules that a file imports, wherever in it: inside of functions and for annotations, too."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                yield from [one for one in (f"{module}.{alias.name}", module) if one in modules][:1]


@pytest.fixture(scope="module")
def graph() -> Graph:
    modules = {module_name(path): path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(NOT_IMPORTED)}
    return {name: {other for other in imported(path, name, modules) if other != name} for name, path in modules.items()}


def test_no_files_import_each_other_in_a_circle(graph: Graph) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
