"""CUDA's calls and Triton's name where there is a CPU alone, for trainers that ask for no other device."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class OnCPU(TorchFunctionMode):
    """What is made on "cuda" is made on the CPU, and its type says that it lies on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = kwargs | {"device": _CPU}
        return func(*(_CPU if isinstance(a, str) and a == "cuda" else a for a in args), **kwargs)


class _Stream:
    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: self


def be_a_gpu() -> None:
    """Let the rest of this process take its CPU for a GPU; what it makes there needs `OnCPU`, too."""
    cuda: Any = torch.cuda
    Tensor.cuda = nn.Module.cuda = lambda self, *args, **options: self  # type: ignore[assignment]
    cuda.current_device = lambda: _CPU
    cuda.Stream, cuda.current_stream = _Stream, lambda *args, **options: _Stream()
    cuda.stream = lambda *args, **options: contextlib.nullcontext()
    for name in ("synchronize", "empty_cache", "memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **options: 0)


@contextlib.contextmanager
def triton() -> Iterator[None]:
    """Let modules import Triton where it is not installed; none of its kernels runs. Its name is gone afterwards."""
    absent = [] if "triton" in sys.modules or find_spec("triton") else ["triton", "triton.language"]
    sys.modules.update(dict.fromkeys(absent, mock.MagicMock(__version__="3.6.0")))
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
