"""Imported before verl, which imports Ray everywhere: where Ray is not installed, something takes its place that can be
imported, and that nothing may call."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest import mock


class _Absent(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == "ray" else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return mock.MagicMock(__path__=[], __spec__=spec)

    def exec_module(self, module: ModuleType) -> None: ...


if "ray" not in sys.modules and find_spec("ray") is None:
    sys.meta_path.append(_Absent())
