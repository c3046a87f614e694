"""The code blocks of README and of the documentation pages: as names to call, and as calls to check."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
OURS = re.compile(r"\blora_merge\.|from lora_merge|\b(VllmSync|MergedWeights|Chunks)\(")


def names_of(page: str, *, vllm: bool = False) -> dict[str, Any]:
    """Run the python blocks of a page that need vLLM, or those that do not; returns what they define."""
    chosen = [block for block in fenced((DOCS / page).read_text()) if ("from vllm" in block) == vllm]
    assert chosen, f"{page} has no such block"
    names: dict[str, Any] = {}
    for block in chosen:
        exec(compile(block, page, "exec"), names)
    return names


def fenced(text: str) -> list[str]:
    """The blocks that are marked as Python."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def code_of(text: str) -> list[str]:
    """These, and what is indented and speaks of this package."""
    rest = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"(?:^\n|\A)((?: {4}.*\n|\n)+)", rest, flags=re.MULTILINE)
    return fenced(text) + [textwrap.dedent(block) for block in indented if OURS.search(block)]


def named_in(text: str) -> set[str]:
    """`lora_merge.this.that` anywhere in a page, modules of files (`lora_merge/...`) aside."""
    return set(re.findall(r"\blora_merge(?:\.[A-Za-z]\w*)+", text))


def named_files(text: str) -> set[str]:
    """Pages, records, pictures and scripts that a page names, `*` as a shell has it. Runs make benchmarks/work."""
    folder = r"\b(?:docs|results|benchmarks(?!/work)|examples|tests)/"
    return set(re.findall(folder + r"[\w./*-]+\.(?:md|json|png|py|sh)\b", text))


def resolve(dotted: str) -> Any:
    """What a reader gets who writes `import lora_merge` and then this; or a module of an integration, which nothing
    imports by itself."""
    found: Any = importlib.import_module("lora_merge")
    if dotted.startswith("lora_merge.integrations."):
        return importlib.import_module(dotted)
    for name in dotted.split(".")[1:]:
        found = getattr(found, name)
    return found


class Uses(ast.NodeVisitor):
    """What code takes from this package: names are resolved, and calls held against signatures.

    Variables that are assigned from a class of the package are known to be of it. `calls` are those that were checked.
    """

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.types: dict[str, type] = {}
        self.calls: list[str] = []

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").partition(".")[0] == "lora_merge":
            module = importlib.import_module(str(node.module))
            self.names |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._of(node)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        made = self._of(node.value.func) if isinstance(node.value, ast.Call) else None
        for target in node.targets:
            if isinstance(target, ast.Name) and isinstance(made, type):
                self.types[target.id] = made

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        called, given = self._of(node.func), [None for _ in node.args]
        if called is None and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            owner = self.types.get(node.func.value.id)
            if owner is not None:
                called, given = getattr(owner, node.func.attr), [None, *given]  # and self
        if called is not None and not any(isinstance(a, ast.Starred) for a in node.args):
            inspect.signature(called).bind(*given, **{str(k.arg): None for k in node.keywords if k.arg})
            self.calls.append(ast.unparse(node))

    def _of(self, node: ast.expr) -> Any:
        """What an expression is, if it is the package's."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        dotted = ast.unparse(node)
        return resolve(dotted) if re.fullmatch(r"lora_merge(\.\w+)+", dotted) else None


def uses(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each block of a page and the calls in it that were checked. Blocks of a page share their variables."""
    found = Uses()
    for block in code_of(text):
        before = len(found.calls)
        found.visit(ast.parse(block))
        yield block, found.calls[before:]
