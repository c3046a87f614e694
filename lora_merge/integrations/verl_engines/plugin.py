"""What verl loads through its `verl.plugins` entry point, in each of its processes, while `import verl` is under way.

verl's engines ask for the accelerator as they are imported, and other plugins may yet bring one. So nothing of verl is
imported here: the engines are registered as soon as verl itself has imported its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

ENGINES = "verl.workers.engine"


class _AfterEngines(MetaPathFinder):
    """Sees verl's engines being imported, once, and steps aside."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != ENGINES:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


class _Registering(Loader):
    """Imports verl's engines as their own loader does, and registers this package's after them."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        from .registry import take_over_quietly

        take_over_quietly()


def register() -> None:
    """Have the engines registered when verl imports its own; harmless when called twice."""
    if ENGINES not in sys.modules and not any(isinstance(finder, _AfterEngines) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterEngines())


register()
