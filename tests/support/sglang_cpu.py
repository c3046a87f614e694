"""SGLang for tests: a plugin of SGLang's own; and SGLang on a CPU without compiled kernels, where there is no GPU: what
that takes in the plugin, and a `sitecustomize` for each of its processes.

SGLang 0.5.17 from an index expects CUDA's wheels beside it. Without them it runs on a CPU, if torchvision's operators
are declared (the wheel for CUDA brings none that a torch for CPUs could load), its rotary embedding knows that it is on
a CPU, and no memory is pinned. What it computes is its own code on PyTorch's operators.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

BROKEN = "LORA_MERGE_TEST_BROKEN"
"""The environment variable that names modules, comma-separated, which SGLang's processes fail to import."""
_LIBRARY: list[Any] = []
_SITE = """import os, sys
if any("spawn_main" in argument or "sglang" in argument for argument in sys.orig_argv):
    import sglang_cpu
    os.environ.pop("SGLANG_USE_CPU_ENGINE", None)
    sglang_cpu.operators()
"""


def operators() -> None:
    """Declare what torchvision decorates when it is imported."""
    if not _LIBRARY and not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARY.append(library)


def folder(path: Path) -> None:
    """Have SGLang's processes, which this one starts, find this module, and SGLang load it as a plugin.

    Args:
        path: of a new folder.
    """
    found = path / "sglang_cpu-0.1.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-cpu\nVersion: 0.1\n")
    (found / "entry_points.txt").write_text("[sglang.srt.plugins]\ncpu = sglang_cpu:register\n")
    if not torch.cuda.is_available():
        (path / "sitecustomize.py").write_text(_SITE)
        operators()
    paths = [str(path), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.path.insert(0, str(path))


def register() -> None:
    """The plugin: in the process that starts an engine, and in each of its schedulers."""
    import first_calls  # noqa: F401
    import sglang_faulty

    sglang_faulty.register()
    for name in filter(None, os.environ.get(BROKEN, "").split(",")):
        sys.modules[name] = None  # type: ignore[assignment]
    if torch.cuda.is_available():
        return
    import sglang.srt.layers.rotary_embedding.base as rotary

    rotary._is_cpu = True
    # `with torch.device(...)` looks for these as they are now, and would pass over others.
    torch.utils._device._device_constructors()
    for name in ("tensor", "empty", "full", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self.clone()


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    def without(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return without
