"""Import what is optional, tell what is not installed from what is installed and fails to import, and wait for what
others import."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from .errors import MissingExtra


@contextmanager
def needed(what: str, install: str, *packages: str) -> Iterator[None]:
    """Turn a failure of the imports in the block into a `MissingExtra` that says what is wrong.

        with needed("VllmSync needs vLLM", "'lora-merge[vllm]'", "vllm"):
            import vllm

    A library that is there can fail in other ways than by an ImportError: a torchvision of another torch raises a
    RuntimeError in the middle of transformers, which `pip install` does not mend.

    Args:
        what: what needs it, in words: the beginning of the message.
        install: what brings it, as `pip install` takes it.
        packages: top-level names of the modules; one of these that is not found is not installed.
    """
    try:
        yield
    except MissingExtra:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in packages:
            raise MissingExtra(f"{what}: pip install {install}") from error
        raise MissingExtra(
            f"{what}, and {' or '.join(packages)} is installed here but fails to import ({root_of(error)}): mend or "
            "reinstall what that names, in versions that fit together"
        ) from error


def root_of(error: BaseException) -> str:
    """Return the error that began it, in one line: libraries that import lazily raise others on top of it."""
    seen = {id(error)}
    while (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        if id(cause) in seen:
            break
        seen.add(id(cause))
        error = cause
    told = str(error).strip().splitlines()
    return f"{type(error).__name__}: {told[0]}" if told else type(error).__name__


def after_import(name: str, call: Callable[[ModuleType], object]) -> None:
    """Call a function with a module: now if it is imported, else as soon as it is."""
    if (module := sys.modules.get(name)) is not None:
        call(module)
    else:
        sys.meta_path.insert(0, _Awaited(name, call))


class _Awaited(MetaPathFinder):
    """Finds one module as the other finders do, and has a function called after its import. It stays where it is: other
    threads may be going through the list of finders."""

    def __init__(self, name: str, call: Callable[[ModuleType], object]) -> None:
        self._name, self._call, self._asks = name, call, False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._asks:
            return None
        self._asks = True
        try:
            spec = find_spec(fullname)
        finally:
            self._asks = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._call(module)

            vars(spec.loader)["exec_module"] = exec_module
        return spec
