"""Among verl's `VERL_USE_EXTERNAL_MODULES`: Megatron-Bridge without TransformerEngine and ModelOpt, in each process.

TransformerEngine's modules are PyTorch's (te_cpu.py), and ModelOpt says that nothing is quantised. Where verl's
platform is a CPU, CUDA's calls and Triton are stood in for, too; on a GPU both are the real ones.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

BEFORE = "verl.models.mcore", "verl.utils.megatron", "verl.workers.engine.megatron"
"""Beginnings of the names of verl's modules that import Megatron."""
os.environ.setdefault("NO_VCS_VERSION", "1")
os.environ.setdefault("MEGATRON_SUPPRESS_FUSION_WARNINGS", "1")


def _refuse(*args: Any, **options: Any) -> None:
    raise NotImplementedError("ModelOpt is stood in for")


def _stand_in() -> None:
    """Put what is not installed in its place, before Megatron is imported."""
    import te_cpu

    te_cpu.install()
    if importlib.util.find_spec("modelopt") is None:
        for name in ("modelopt", "modelopt.torch", "modelopt.torch.quantization", "modelopt.torch.opt"):
            te_cpu.stand_in(name)
        te_cpu.stand_in("modelopt.torch.quantization.utils", is_quantized=lambda model: False)
        names = "restore_modelopt_state", "save_modelopt_state", "save_sharded_modelopt_state"
        te_cpu.stand_in("modelopt.torch.opt.plugins", **dict.fromkeys(names, _refuse))
    import torch.utils  # noqa: F401

    te_cpu.stand_in("torch.utils.tensorboard", SummaryWriter=object)  # an installed one may not fit its protobuf
    te_cpu.stand_in("torch.utils.tensorboard.writer", SummaryWriter=object)


def _import_megatron() -> None:
    """Import it without what torch.compile would fuse: nothing is compiled in the first step."""
    import torch

    compiled: Any = torch.compile
    torch.compile = lambda model=None, **options: model or (lambda function: function)  # type: ignore[assignment]
    try:
        import megatron.bridge
        import megatron.bridge.training.checkpointing  # noqa: F401
    finally:
        torch.compile = compiled


def _on_cpu() -> None:
    """Have Megatron believe that a CPU is its GPU."""
    import typing

    import cuda_cpu
    import typing_extensions

    if not hasattr(typing, "override"):  # Python 3.11
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    cuda_cpu.be_a_gpu()
    import vllm  # noqa: F401 - before there is a Triton

    with cuda_cpu.triton():
        _import_megatron()
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    cuda_cpu.OnCPU().__enter__()


class _Finder:
    """Finds nothing; prepares once, where verl's first module of Megatron's is looked for."""

    ready = False

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> None:
        if not cls.ready and name.startswith(BEFORE):
            cls.ready = True
            _stand_in()
            if os.environ.get("VERL_PLATFORM") == "cpu":
                _on_cpu()
            else:
                _import_megatron()


sys.meta_path.insert(0, _Finder)
