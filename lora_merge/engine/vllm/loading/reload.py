"""Layers that vLLM lays out anew after loading: opened for the first of their tensors, processed after the last.

vLLM's own reload counts what passes through a parameter's `weight_loader`. A model that copies into parameters by
itself (GPT-OSS, its experts) then loads into nothing, without a word. The dry run sees every copy, so here a layer has
real memory while its tensors are loaded, and vLLM's own code processes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from .. import internals
from .formats import QuantisingPeers, quantises

_HANDLER = "dnnl_handler"
"""The attribute in which vLLM's INT8 kernel for CPUs holds a layer's weights."""


class Reload:
    """The layers of one load.

    Args:
        layers: outermost layers, each with the names of the stream that it is made of.
        touched: modules in them that get something of the stream, by `id`; the others stay as they are.
        device: type of the worker's.
        peers: the workers that quantise with this one.
    """

    def __init__(
        self,
        layers: Sequence[tuple[nn.Module, frozenset[str]]],
        touched: frozenset[int],
        device: str,
        peers: QuantisingPeers,
    ) -> None:
        self._touched, self._device, self._peers = touched, device, peers
        self._waiting = [(layer, set(names)) for layer, names in layers if names]
        self._layers_of: dict[str, list[tuple[Any, set[str]]]] = {}
        for entry in self._waiting:
            for name in entry[1]:
                self._layers_of.setdefault(name, []).append(entry)
        self._open: dict[int, tuple[Any, Any]] = {}
        self.began = False
        """True once anything was loaded by vLLM's own code."""
        self.done = 0
        """Layers that were processed."""

    def open_layers(self, names: Iterable[str]) -> None:
        """Open the layers that these tensors are part of."""
        self.began = True
        for name in names:
            for layer, _ in self._layers_of.get(name, ()):
                if id(layer) not in self._open:
                    self._open_layer(layer)

    def process_complete(self, names: Iterable[str]) -> None:
        """Process the layers that have all of their tensors, now that these are loaded."""
        for name in names:
            for layer, waiting in self._layers_of.get(name, ()):
                waiting.discard(name)
                if not waiting and id(layer) in self._open:
                    self._process(layer)

    def written(self, names: Iterable[str]) -> None:
        """Note that these tensors were written where they lie, so that their layers are not processed. All of a layer's
        tensors come this way, or none."""
        for name in names:
            for layer, waiting in self._layers_of.get(name, ()):
                if id(layer) in self._open:
                    raise RuntimeError(f"{name} was written to a layer of which another tensor is loaded")
                waiting.discard(name)

    @property
    def lacking(self) -> list[str]:
        """Return the names that did not come."""
        return sorted({name for _, names in self._waiting for name in names})

    def abort(self) -> None:
        """Put the engine's own tensors back into layers that are open."""
        for root, kernel in self._open.values():
            for layer in root.modules():
                _put_back(layer, internals.get_layerwise_info(layer))
            if kernel is not None:
                root.quant_method.moe_kernel = kernel
        self._open = {}

    def _open_layer(self, root: Any) -> None:
        self._open[id(root)] = root, getattr(root.quant_method, "moe_kernel", None)
        if self._device == "cpu" and hasattr(root.quant_method, "moe_kernel"):
            # vLLM's CPU experts prepack once, when their kernel is made: have it made again.
            root.quant_method.moe_kernel = None
        for layer in root.modules():
            internals.materialize_layer(layer, _as_loaded(layer))
            _own_loaders(layer)

    def _process(self, root: Any) -> None:
        for layer in root.modules():
            info = internals.get_layerwise_info(layer)
            if id(layer) not in self._touched:
                _put_back(layer, info)
                continue
            for name, parameter in layer._parameters.items():
                if parameter is not None and name not in info.kernel_tensors[0] | info.restore_metadata[0]:
                    info.kernel_tensors[0][name] = parameter  # made while loading: the bias of a head
            if quantises(layer):
                self._peers.wait()
            with _keeping_what_kernels_read(layer):
                internals._layerwise_process(layer, info)
        del self._open[id(root)]
        self.done += 1


@contextmanager
def on_meta(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Give layers the tensors that they are loaded with, on the meta device; restore their live tensors after."""
    opened = []
    try:
        for layer in (layer for root in roots for layer in root.modules()):
            opened.append((layer, _as_loaded(layer)))
            _own_loaders(layer)
        yield
    finally:
        for layer, info in opened:
            _put_back(layer, info)


def same_layout(module: nn.Module) -> bool:
    """Return True if a layer's live parameters look as they did when it was made."""
    recorded, _ = internals.get_layerwise_info(module).restore_metadata
    return all(
        (live := module._parameters.get(name)) is not None
        and (live.shape, live.stride(), live.dtype) == (meta.shape, meta.stride(), meta.dtype)
        for name, meta in recorded.items()
    )


def _as_loaded(layer: nn.Module) -> Any:
    """Give a layer the tensors that it is loaded with, on the meta device, and return its own."""
    info = internals.get_layerwise_info(layer)
    info.lora_merge_empty = [name for name, parameter in layer._parameters.items() if parameter is None]
    info.kernel_tensors = internals.get_layer_params_buffers(layer)
    info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    internals.restore_layer_on_meta(layer, info)
    return info


def _own_loaders(layer: nn.Module) -> None:
    """Restore the loaders of recorded tensors: vLLM's own reload leaves its loader there, which passes over what it is
    given."""

    for tensor in internals.get_layer_tensors(layer).values():
        if hasattr(tensor, "weight_loader"):
            tensor.weight_loader = internals._get_original_loader(tensor)


@contextmanager
def _keeping_what_kernels_read(layer: Any) -> Iterator[None]:
    """Keep memory alive that oneDNN's INT8 kernel on CPUs reads: scales where they lay when it was made. vLLM copies
    these back to where they lay before, and frees the new memory (0.32; log-probs were NaN)."""
    kernel: Any = getattr(getattr(layer, "scheme", None), "kernel", None)
    if not hasattr(kernel, _HANDLER):
        yield
        return
    process = kernel.process_weights_after_loading

    def keeping(made: nn.Module) -> None:
        process(made)
        getattr(kernel, _HANDLER).lora_merge_keeps = [p for p in made._parameters.values() if p is not None]

    kernel.process_weights_after_loading = keeping
    try:
        yield
    finally:
        del kernel.process_weights_after_loading


def packed_kernels(modules: Iterable[Any]) -> list[Any]:
    """Return the INT8 kernels on a CPU that hold their layers' weights, which are no parameters there."""
    kernels = (getattr(getattr(module, "scheme", None), "kernel", None) for module in modules)
    return [getattr(kernel, _HANDLER) for kernel in kernels if hasattr(kernel, _HANDLER)]


def _put_back(layer: nn.Module, info: Any) -> None:
    if info.kernel_tensors is not None:
        internals._place_kernel_tensors(layer, info)
        for name in info.lora_merge_empty:  # which vLLM forgets: a weight that a kernel has packed
            layer.register_parameter(name, None)
    info.reset()
