"""Operations of workers: whoever calls one by its name finds it registered under that name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import lora_merge.engine
from lora_merge.engine.worker.commands import OPERATIONS

ENGINE = Path(lora_merge.engine.__file__).parent
CALLS = {"rpc", "make_call", "tell", "ask", "ask_own", "LocalOp", "WorkerOp", "Call"}
"""What takes the name of an operation."""


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted([*ENGINE.rglob("*.py"), ENGINE.parent / "verify.py"]):
        yield path, ast.parse(path.read_text())


def name_of(function: ast.expr) -> str:
    return getattr(function, "attr", "") or getattr(function, "id", "")


def registered() -> set[str]:
    """By the source, as vLLM's and SGLang's are not imported here."""
    return {
        node.name
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator) == "OPERATIONS.register" for decorator in node.decorator_list)
    }


def called() -> Iterator[tuple[str, str]]:
    """Where an operation is called, and its name."""
    for path, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            function, args = node.func, node.args
            if name_of(function) in ("partial", "bind") and args:
                function, args = args[0], args[1:]
            if name_of(function) == "Call":  # a method of `Control`; of "rpc" the arguments begin with the operation
                rpc = args and isinstance(args[0], ast.Constant) and args[0].value == "rpc"
                args = args[1].elts if rpc and isinstance(args[1], ast.Tuple) else []
            if name_of(function) in CALLS:
                for found in (arg for arg in args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)):
                    yield f"{path.relative_to(ENGINE.parent)}:{node.lineno}", found.value


def test_every_operation_that_is_called_is_registered() -> None:
    names, calls = registered(), list(called())
    assert set(OPERATIONS) <= names, "and under the function's own name"
    assert len(calls) >= 20
    assert [(where, name) for where, name in calls if name not in names] == []
