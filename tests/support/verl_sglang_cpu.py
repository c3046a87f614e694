"""verl_cpu.py for rollouts with SGLang, in each process of verl's: what stands in for CUDA IPC, and for a package.

SGLang sends weights as handles of CUDA memory, and patches torch's way of making these, which knows no memory of CPUs.
Here tensors go as torch itself sends them, in files of shared memory, which need no key that processes have in common.

SGLang needs an accelerator even where it only sends requests, and verl imports it as a build for CPUs in the process
that runs the task. So it is one in verl's processes, which compute nothing with it: no index has a wheel with the
kernels of such a build. Schedulers, which compute, are other processes: there it is none (tests/support/sglang_cpu.py).
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import sglang_cpu
import torch.multiprocessing
import verl_cpu  # noqa: F401
from torch.multiprocessing import reductions


class _Kernels(ModuleType):
    """Has whatever is imported from it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


sys.modules["sgl_kernel"] = _Kernels("sgl_kernel")
sys.modules["sgl_kernel"].__spec__ = ModuleSpec("sgl_kernel", None)
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
sglang_cpu.operators()
torch.multiprocessing.set_sharing_strategy("file_system")
reductions._reduce_tensor_original = reductions.reduce_tensor  # SGLang takes its patch for made
