"""Quantised engines: which layers vLLM quantises as it loads them, so that a push can load them again, and what is
refused.

A layer that quantises takes plain weights and computes with values of a few bits and their scales (`uses_meta_device`
of vLLM's methods). It is laid out anew after loading (reload.py), so vLLM's own code makes the same bits of a push as
of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from ...worker.modules import Modules
from .. import internals
from .compressed import Scheme, scheme_of

_PLAIN = "Unquantized"
"""Begins the names of vLLM's methods that compute with weights as they were loaded."""
_SCALED_CACHES = ("fp8", "nvfp4")
"""Begins vLLM's names for dtypes of a KV cache with scales; those by token and head have 1 there."""
_INSTEAD = (
    "start the engine on the unquantised checkpoint and let vLLM quantise it as it loads "
    '(quantization="fp8_per_block", "fp8_per_channel" and their like), or without quantization'
)


def refusal(modules: Modules) -> str:
    """Return why merged weights cannot be loaded into a model, in words that follow the engine's name; "" where they
    can."""
    for path, layer, method in _methods(modules):
        if type(method).__name__.startswith(_PLAIN) or hasattr(layer, "kv_cache_dtype"):
            continue  # attention, where a method quantises the cache, whose scales are no weights
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
    """Return the path of the first layer that is loaded with quantised weights; "" for none."""
    return next((path for path, layer, _ in _methods(modules) if isinstance(scheme_of(path, layer), Scheme)), "")


def _methods(modules: Modules) -> Iterator[tuple[str, Any, Any]]:
    """Yield layers with vLLM's methods for them. LoRA's wrappers are passed over: they show the method of the layer
    inside."""
    for path, layer in modules.paths():
        method = method_of(layer)
        if method is not None and not isinstance(layer, internals.BaseLayerWithLoRA):
            yield path, layer, method


def caches(modules: Modules) -> list[tuple[str, Any]]:
    """Return the attention layers whose KV cache is quantised, with a scale for keys and one for values."""
    return [
        (path, layer)
        for path, layer in modules.paths()
        if str(getattr(layer, "kv_cache_dtype", "")).startswith(_SCALED_CACHES) and hasattr(layer, "_k_scale_float")
    ]


def calibrated_scales(modules: Modules) -> str:
    """Name the layers whose KV cache has scales of the engine's checkpoint; "" where all are 1.

    These scales were calibrated for that checkpoint's weights, and a push brings no others. The push is not refused:
    floating-point numbers keep their relative error under any scale, and only what outgrows the calibrated range is cut
    off. The values are read on the host, as weights may be asleep.
    """
    found = [
        (path, layer._k_scale_float, layer._v_scale_float)
        for path, layer in modules.kept(caches)
        if (layer._k_scale_float, layer._v_scale_float) != (1.0, 1.0)
    ]
    if not found:
        return ""
    path, k, v = found[0]
    return f"{path} (k_scale {k:.3g}, v_scale {v:.3g}){f' and {len(found) - 1} more layers' if found[1:] else ''}"


def stale_scales(cache_config: Any, load_format: str, calibrated: str) -> str:
    """Return why scales of the KV cache belong to no weights, or to others than a push brings; "" where they do not.

    Args:
        cache_config, load_format: vLLM's.
        calibrated: what `calibrated_scales` returned.
    """
    if getattr(cache_config, "calculate_kv_scales", False):  # vLLM 0.26
        return (
            "computes the scales of its KV cache from the first request that it gets (calculate_kv_scales), and keeps "
            "them whatever weights come: start it without calculate_kv_scales"
        )
    if calibrated and load_format == "dummy":
        return (
            'filled the scales of its KV cache with random numbers as it started (load_format="dummy"), and a push '
            f'brings none: {calibrated}; start it with load_format="auto", or on a checkpoint whose config has no '
            "kv_cache_scheme"
        )
    return ""


def bring_scales_back(modules: Modules) -> None:
    """Restore the scales of the KV cache. vLLM 0.26 (compressed-tensors) has them as parameters, which sleep at level 2
    loses like weights, and no stream has them.

    Raises:
        RuntimeError: they are lost, and were several for one layer: vLLM keeps only the largest on the host.
    """
    for path, layer in modules.kept(caches):
        for name in ("_k_scale", "_v_scale", "_q_scale"):
            scale, known = layer._parameters.get(name), getattr(layer, f"{name}_float", None)
            if scale is None or known is None:
                continue
            if scale.numel() == 1:
                scale.data.fill_(known)
            elif float(scale.max()) != known:
                raise RuntimeError(
                    f"{path}: the scales of its KV cache, one for each head, were lost, as in sleep at level 2: start "
                    "the engine anew, and let it sleep at level 1"
                )


def method_of(layer: Any) -> Any:
    """Return vLLM's method for a layer, or None. vLLM 0.26 wraps that of experts under LoRA; this is the one inside."""
    method = getattr(layer, "quant_method", None)
    return getattr(method, "old_quant_method", method)


def quantises(layer: Any) -> bool:
    """Return True if vLLM quantises this layer as it loads it."""
    return bool(getattr(getattr(layer, "quant_method", None), "uses_meta_device", False))


def _shared_with_other_engines(method: Any) -> bool:
    """Return True if more workers than this engine's agree on the scales of experts."""
    parts = getattr(getattr(method, "moe", None), "tp_size", 1)
    return bool(parts > internals.get_tp_group().world_size)


class QuantisingPeers:
    """The workers that quantise a layer together: a scale belongs to the whole of a matrix that is cut, and vLLM (0.32)
    takes the largest element over all of them. A worker that failed would leave the others waiting for ever, so before
    each of these layers every worker reports that it is there, or that it has failed."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._group: Any = None
        self._last: Any = None

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Run one operation of the worker method on all workers of the engine: if it fails on one, it fails on all that
        share scales."""
        self._group = self._modules.kept(_sharing)
        try:
            yield
            self.wait()
        except BaseException:
            self._report_failure()
            raise
        finally:
            self._group = None

    def wait(self) -> None:
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
            raise RuntimeError(
                "this worker quantises its weights together with another one of its engine, which failed"
            )

    def _report_failure(self) -> None:
        """Tell the workers that wait, now or later, that this one has failed; wait for none, as they may wait for this
        process."""
        if self._group is not None:
            failed = torch.ones(1, dtype=torch.int32, device="cpu")
            with suppress(RuntimeError):  # they are gone
                self._last = dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._group, async_op=True)


def _sharing(modules: Modules) -> Any:
    """Return the process group over which matrices are cut, if some layer quantises; else None."""
    if not any(map(quantises, modules)) or (group := internals.get_tp_group()).world_size == 1:
        return None
    return group.cpu_group
