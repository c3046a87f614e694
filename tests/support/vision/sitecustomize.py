"""torchvision beside a torch for CPUs: the wheel of an index brings operators that such a torch cannot load, and
decorates them when it is imported. With this folder on PYTHONPATH they are declared before that, in every process,
those too that vLLM starts. Images of PIL need none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_LIBRARY: list[Any] = []


class _Declared:
    """Finds no module; declares torchvision's operators when that is looked for."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision" and not _LIBRARY:
            import torch

            if torch.version.cuda is None:
                library = torch.library.Library("torchvision", "FRAGMENT")
                _LIBRARY.append(library)
                for operator in ("nms", "qnms"):
                    library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _Declared())
