"""Whether Kimi-Linear's step after loading counts, as vLLM 0.32's own class decides.

A process of its own: the class imports llvmlite, into whose names vLLM's dispatcher of kernels looks when an engine is
started on a CPU, and where it fails (`'_lib_fn_wrapper' object has no attribute 'get'`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.models.kimi_k3.nvidia import model as kimi

from lora_merge.engine.vllm.loading.loader import Loader
from lora_merge.engine.worker.modules import Modules


def check(mega: bool) -> None:
    hook = kimi.KimiLinearForCausalLM.process_weights_after_loading
    called: list[str] = []

    class Experts(kimi.KimiMoE):  # type: ignore[misc]
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.use_mega_moe = mega
            self.experts = SimpleNamespace(finalize_weights=lambda: called.append("experts"))

    class Inner(kimi.KimiLinearModel):  # type: ignore[misc]
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.layer = Experts()

    class Outer(nn.Module):
        process_weights_after_loading, load_weights = hook, list

    model: Any = Outer()
    model.model = Inner()
    type(model).__name__ = "KimiLinearForCausalLM"
    model.process_weights_after_loading()
    assert called == ["experts"] * mega
    config = SimpleNamespace(dtype=torch.bfloat16, hf_config=SimpleNamespace(architectures=["Modules"]))
    assert bool(Loader(Modules(model), config, torch.device("cpu"))._unreachable()) is mega


if __name__ == "__main__":
    check(False)
    check(True)
