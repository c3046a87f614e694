"""Engines whose weights are quantised: which layers vLLM quantises as it loads them, so that a push can load them
again, and what is refused.

A layer that quantises takes plain weights and computes with values of a few bits and their scales (`uses_meta_device`
of vLLM's methods). It is one more layer that is laid out anew after loading (reload.py): vLLM's own code makes of a
push what it makes of a checkpoint, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..modules import Modules
from . import internals
from .compressed import Scheme, scheme_of

_PLAIN = "Unquantized"
"""How the names of vLLM's methods begin that compute with weights as they were loaded."""
_INSTEAD = (
    "start the engine on the unquantised checkpoint and let vLLM quantise it as it loads "
    '(quantization="fp8_per_block", "fp8_per_channel" and their like), or without quantization'
)


def refusal(modules: Modules) -> str:
    """Why merged weights cannot be loaded into a model, in words that follow the engine's name: "" where they can."""
    for path, layer, method in _methods(modules):
        if type(method).__name__.startswith(_PLAIN) or _has_scales_alone(layer):
            continue
        scheme = scheme_of(path, layer)
        if isinstance(scheme, Scheme):
            continue
        if scheme is not None:
            return scheme
        if not quantises(layer):
            kind = type(getattr(layer, "scheme", method)).__name__
            return (
                f"makes something of {path} ({kind}) after loading that is not known to be made again when weights "
                f"come; {_INSTEAD}"
            )
        if _shared_with_other_engines(method):
            return (
                f"quantises {path} together with other data-parallel engines, and a push to this one would wait for "
                "them: start it with enable_expert_parallel=True"
            )
    return ""


def quantised_checkpoint(modules: Modules) -> str:
    """The first layer that is loaded with quantised weights; "" where none is."""
    return next((path for path, layer, _ in _methods(modules) if isinstance(scheme_of(path, layer), Scheme)), "")


def _methods(modules: Modules) -> Iterator[tuple[str, Any, Any]]:
    """Layers with vLLM's methods for them. (LoRA's wrappers show that of the layer inside, which comes by itself.)"""
    for path, layer in modules.paths():
        method = method_of(layer)
        if method is not None and not isinstance(layer, internals.BaseLayerWithLoRA):
            yield path, layer, method


def stale_scales(config: Any, calibrated: str) -> str:
    """Why scales of the KV cache would be those of nothing that a push brings, in words as of `refusal`.

    Args:
        config: vLLM's, of everything.
        calibrated: as of `calibrated_scales`.
    """
    if getattr(config.cache_config, "calculate_kv_scales", False):  # vLLM 0.26
        return (
            "computes the scales of its KV cache from the first request that it gets (calculate_kv_scales), and keeps "
            "them whatever weights come: start it without calculate_kv_scales"
        )
    if calibrated and config.load_config.load_format == "dummy":
        return (
            f'filled the scales of its KV cache with random numbers as it started (load_format="dummy"): {calibrated}; '
            "vLLM takes no others while it runs, and a push brings none: start it with load_format=\"auto\", or on a "
            "checkpoint whose config has no kv_cache_scheme"
        )
    return ""


def calibrated_scales(modules: Modules) -> str:
    """The attention layers whose quantised KV cache has scales from the engine's checkpoint, in words; "" where there
    are none. vLLM computes with them as long as it runs, and takes no others.

    They were calibrated for the weights of that checkpoint. A push into such an engine is not refused: numbers of FP8
    keep their relative error under any scale, unlike integers, and what outgrows the calibrated range is cut off there.
    """
    found = {
        path: (layer._k_scale, layer._v_scale)
        for path, layer in modules.paths()
        if str(getattr(layer, "kv_cache_dtype", "")).startswith("fp8") and hasattr(layer, "_k_scale")
    }
    other = [path for path, scales in found.items() if any(bool((scale != 1).any()) for scale in scales)]
    if not other:
        return ""
    k, v = (f"{float(scale.max()):.3g}" for scale in found[other[0]])
    more = f" and {len(other) - 1} more layers" if len(other) > 1 else ""
    return f"{other[0]} (k_scale {k}, v_scale {v}){more}"


def method_of(layer: Any) -> Any:
    """vLLM's method for a layer, None where it has none; of experts under LoRA, around whose method vLLM 0.26 puts
    another one, the method inside."""
    method = getattr(layer, "quant_method", None)
    return getattr(method, "old_quant_method", method)


def quantises(layer: Any) -> bool:
    """Whether vLLM quantises this layer as it loads it."""
    return bool(getattr(getattr(layer, "quant_method", None), "uses_meta_device", False))


def _has_scales_alone(layer: nn.Module) -> bool:
    """Whether what a method quantises here is the cache of an attention layer, whose scales are no weights."""
    return hasattr(layer, "kv_cache_dtype")


def _shared_with_other_engines(method: Any) -> bool:
    """Whether scales of experts are agreed on by more workers than those of this engine."""
    parts = getattr(getattr(method, "moe", None), "tp_size", 1)
    return bool(parts > internals.get_tp_group().world_size)


class Together:
    """The workers that quantise a layer together: of a matrix that is cut, each scale is of the whole, and vLLM (0.32)
    takes the largest element over all of them. Who failed does not come, and the others would wait for ever; so before
    each of these layers everybody says that he is there, and who fails says so instead.

    Args:
        modules: of the worker's model.
    """

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._group: Any = None
        self._last: Any = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """One operation of the worker method, on all workers of the engine. If it fails on one, it fails on all of them
        that share scales."""
        self._group = self._modules.kept(_sharing)
        try:
            yield
            self.go_on()
        except BaseException:
            self._leave()
            raise
        finally:
            self._group = None

    def go_on(self) -> None:
        """Wait for the other workers before a layer that is quantised together with them.

        Raises:
            RuntimeError: another worker has failed.
        """
        if self._group is None:
            return
        failed = torch.zeros(1, dtype=torch.int32, device="cpu")
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._group)
        if failed.item():
            self._group = None
            raise RuntimeError("another worker of this engine failed, with which this one quantises its weights")

    def _leave(self) -> None:
        """Tell the workers that wait, or will wait, that this one has failed. Nobody is waited for: the others may wait
        for this process."""
        if self._group is not None:
            failed = torch.ones(1, dtype=torch.int32, device="cpu")
            with suppress(RuntimeError):  # they are gone
                self._last = dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._group, async_op=True)


def _sharing(modules: Modules) -> Any:
    """The process group of the workers over which matrices are cut, where some layer quantises; else None."""
    if not any(map(quantises, modules)) or (group := internals.get_tp_group()).world_size == 1:
        return None
    return group.cpu_group
