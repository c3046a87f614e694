"""The code blocks of README and of the documentation pages: as names to call, and as calls to check."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from repository import ROOT

DOCS = ROOT / "docs"
_ROOT = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
ROOT_PAGES = tuple(ROOT / name for name in _ROOT)
PAGES = (*ROOT_PAGES, *sorted(DOCS.glob("*.md")))
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
    """`lora_merge.this.that` anywhere in a page; modules of files (`lora_merge/...`) and of imports aside."""
    return set(re.findall(r"(?<!from )(?<!import )\blora_merge(?:\.[A-Za-z]\w*)+", text))


def named_files(text: str) -> set[str]:
    """Pages, records, pictures and scripts that a page names, `*` as a shell has it. Runs make benchmarks/work."""
    folder = r"\b(?:docs|results|benchmarks(?!/work)|examples|tests)/"
    return set(re.findall(folder + r"[\w./*-]+\.(?:md|json|png|py|sh)\b", text))


def links_of(text: str) -> Iterator[tuple[str, str]]:
    """(file, heading) of each link and picture of a page that leads to no other host; code does not link."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            file, _, anchor = target.partition("#")
            yield file, anchor


def anchors_of(text: str) -> set[str]:
    """The names under which a page's headings can be linked to, as GitHub and the site make them."""
    headings = re.findall(r"^#+ +(.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def resolve(dotted: str) -> Any:
    """What a reader gets who writes `import lora_merge` and then this; integrations are imported by name."""
    found: Any = importlib.import_module("lora_merge")
    path = "lora_merge"
    for name in dotted.split(".")[1:]:
        path = f"{path}.{name}"
        ours = path.startswith("lora_merge.integrations") and _is_module(path)
        found = module(path) if ours else getattr(found, name)
    return found


def module(name: str) -> Any:
    """A module of this package. Of an integration whose trainer is not installed here: functions and classes with the
    signatures that its source gives them."""
    try:
        return importlib.import_module(name)
    except ImportError:
        spec = importlib.util.find_spec(name)
        if not name.startswith("lora_merge.integrations.") or spec is None or spec.origin is None:
            raise
    names: dict[str, Any] = {}
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.ClassDef):
            made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
            names[node.name] = _like(made[0]) if made else object
        elif isinstance(node, ast.FunctionDef):
            names[node.name] = _like(node)
    return SimpleNamespace(**names)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # inside of a module, or of one whose trainer is not installed
        return False


def _like(node: ast.FunctionDef) -> Any:
    """A function that takes what this one takes, and does nothing; of a method, without `self`."""
    taken = ast.parse(f"def f({ast.unparse(node.args)}): ...").body[0]
    assert isinstance(taken, ast.FunctionDef)
    arguments = taken.args
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        argument.annotation = None
    arguments.args = [a for a in arguments.args if a.arg != "self"]
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [None if d is None else ast.Constant(None) for d in arguments.kw_defaults]
    names: dict[str, Any] = {}
    exec(ast.unparse(taken), names)
    return names["f"]


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
            found = module(str(node.module))
            self.names |= {alias.asname or alias.name: getattr(found, alias.name) for alias in node.names}

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


def unimported(text: str) -> Iterator[str]:
    """Modules that a block takes something of, and that no block up to it imports. Blocks without imports are parts of
    a program that a reader has."""
    imported: set[str] = set()
    for block in code_of(text):
        nodes = list(ast.walk(ast.parse(block)))
        found = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        imported |= {(alias.asname or alias.name).partition(".")[0] for node in found for alias in node.names}
        taken = {n.value.id for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
        yield from (taken & {"torch", "ray", "os", "lora_merge"}) - imported if found else ()


def uses(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each block of a page and the calls in it that were checked. Blocks of a page share their variables."""
    found = Uses()
    for block in code_of(text):
        before = len(found.calls)
        found.visit(ast.parse(block))
        yield block, found.calls[before:]


def messages_of(folder: Path) -> list[str]:
    """Every string in the sources of a package, adjacent ones joined; what is filled in is `{}`."""
    found: list[str] = []
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))
    return found
