"""Loads into SGLang's parameters: what differs from engine/worker/loader.py.

SGLang leaves unquantised weights as its own `load_weights` puts them, so all of them go straight. What it makes of
weights beside them, and what it lays out anew, is refused by name.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from ..worker import loader
from ..worker.modules import Modules, unwrapped, wrapped

_AS_LOADED = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
_EXPERTS = "UnquantizedFusedMoEMethod"
_COMPUTED = {"normalizer"}
"""Persistent buffers that SGLang makes of the configuration (Gemma's), and no checkpoint holds."""
_AFTER = "post_load_weights"
"""A model's method that makes something of weights beside them (the matrices of multi-head latent attention)."""


class Loader(loader.Loader):
    """Loads full weight sets into the model of one scheduler."""

    @property
    def ties(self) -> bool:
        with self._bare():
            return super().ties

    def _bare(self) -> AbstractContextManager[None]:
        """Return the model without SGLang's LoRA wrappers, which have the weights of their layers a second time."""
        return unwrapped(self.modules, _wrapped)

    def _filled(self, module: nn.Module) -> dict[str, Tensor | None]:
        return {key: tensor for key, tensor in super()._filled(module).items() if key not in _COMPUTED}

    def _unreachable(self) -> dict[str, str]:
        why = {}
        for path, module in self.modules.paths():
            if hasattr(module, _AFTER):
                why[path or type(module).__name__] = (
                    f"{type(module).__name__}.{_AFTER} makes something of weights after loading, which no push makes "
                    "again: roll out with vLLM, or start a new engine on a checkpoint instead"
                )
            elif reason := _laid_anew(module):
                why[path] = f"the engine holds it in another layout than it loads it in ({reason})"
        return why


def _wrapped(modules: Modules) -> list[tuple[nn.Module, str, Any]]:
    from sglang.srt.lora.layers import BaseLayerWithLoRA

    return wrapped(modules, BaseLayerWithLoRA)


def _laid_anew(module: Any) -> str:
    """Return why a layer is not as it is loaded, and what to do; "" where it is."""
    if getattr(module, "use_intel_amx_backend", False):
        return "packed for AMX: run on a GPU, or without SGLang's kernels for CPUs"
    method = getattr(module, "quant_method", None)
    kind = type(method).__name__
    if method is None or kind in _AS_LOADED:
        return ""
    if kind != _EXPERTS:
        return f"{kind}: start the engine without quantization"
    if getattr(method, "use_flashinfer_trtllm_moe", False):
        return 'moe_runner_backend="flashinfer_trtllm": start the engine with moe_runner_backend="triton"'
    if _aiter():
        return "shuffled for aiter: start the engine with SGLANG_USE_AITER=0"
    return ""


def _aiter() -> bool:
    from sglang.srt.layers.quantization import unquant

    return bool(getattr(unquant, "_use_aiter", False))
