"""Whether the tensors of a model are plain weights, element by element: not quantised, packed or sparse."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidInput, UnsupportedAdapter
from ..names import NamedTensor, lineage
from ..shards import quantised
from ..shards.fsdp2 import is_dtensor_kind

_PACKED_CLASSES = {
    "bitsandbytes.nn.modules.Params4bit": "4-bit, bitsandbytes",
    "bitsandbytes.nn.modules.Int8Params": "8-bit, bitsandbytes",
}
_PARAMETRISED = "bitsandbytes.nn.parametrize.Bnb4bitParametrization"
"""What lies beside the codes of a parameter that is decoded whenever it is read."""
_PACKED_NAMES = {"qweight", "qzeros", "weight_packed"}
"""What GPTQ, AWQ and compressed-tensors call the integers into which they pack several weights each."""
_HIDDEN = ("torch.ao.nn.quantized.", "torch.ao.nn.sparse.quantized.")
"""Modules whose weights are in no parameter and no buffer."""
_FACTORS = {"lora_A", "lora_B", "lora_a", "lora_b", "lora_embedding_A", "lora_embedding_B", "lora_down", "lora_up"}
"""What LoRA layers call their factors. Those of PEFT and Megatron-Bridge are read as adapters and are no weights."""
_LOAD = "load the base in bfloat16, float16 or float32"


def remedy(method: str = "") -> str:
    """Return what to do about a base that is quantised: the end of an error's text.

    Args:
        method: what transformers calls the format (`quant_method`); "" where that is not known. transformers is asked
            whether it can dequantise it: a loaded model, or a checkpoint as it loads it.
    """
    unquantised = f"{_LOAD}, from a checkpoint that is not quantised"
    try:
        from transformers.quantizers import HfQuantizer, auto
    except ImportError:
        return unquantised
    key = f"{method}_4bit" if method == "bitsandbytes" else method
    quantizer: Any = auto.AUTO_QUANTIZER_MAPPING.get(key)
    config: Any = auto.AUTO_QUANTIZATION_CONFIG_MAPPING.get(key)
    if quantizer is not None and quantizer._dequantize is not HfQuantizer._dequantize:
        return f"{_LOAD}, or dequantise it first (transformers: model.dequantize())"
    if config is not None and "dequantize" in signature(config).parameters:
        return (
            f"{_LOAD}: transformers dequantises it while it loads it, with "
            f"quantization_config={config.__name__}(dequantize=True)"
        )
    return unquantised


def check_plain(modules: Iterable[tuple[str, nn.Module]], tensors: Iterable[NamedTensor]) -> None:
    """Raise `InvalidInput`, naming the first tensor or module of a model whose elements are no weights, or
    `UnsupportedAdapter`, naming the first LoRA layer of a library that is not known. What `shards/quantised.py` knows
    passes.

    Args:
        modules: of the model, with their names; each may come several times.
        tensors: its parameters and buffers.
    """
    for t in tensors:
        if not quantised.how(t.owner, t.attribute):
            _check_tensor(t, modules)
        _check_no_factor(t)
    for name, module in modules:
        hidden = next((path for path in lineage(type(module)) if path.startswith(_HIDDEN)), None)
        if hidden is not None:
            raise InvalidInput(f"{name}: the base is quantised (a {hidden}); {remedy()}")
        method = _method(module)
        if method not in ("", *quantised.METHODS):  # of a kind that was not known above
            raise InvalidInput(f"{name or 'the model'}: the base is quantised ({method}); {remedy(method)}")


def _method(module: nn.Module) -> str:
    """Return the format by which transformers has quantised a model; "" where it has not."""
    quantizer = module.__dict__.get("hf_quantizer")
    if quantizer is None:
        return ""
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", type(quantizer).__name__)
    return str(getattr(method, "value", method))


def _check_tensor(t: NamedTensor, modules: Iterable[tuple[str, nn.Module]]) -> None:
    if isinstance(t.tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        raise InvalidInput(f"{t.name}: a lazy module that has not been initialised yet: run a forward first")
    how = _quantised(t)
    if how is not None:
        held = f"{t.tensor.dtype} {tuple(t.tensor.shape)}"
        what = remedy(next(filter(None, (_method(module) for _, module in modules)), ""))
        raise InvalidInput(f"{t.name}: the base is quantised ({how}): what it holds, {held}, are no weights; {what}")
    if t.tensor.is_nested:
        raise InvalidInput(f"{t.name}: expected a dense tensor, got a nested one; call to_padded_tensor() first")
    if t.tensor.layout is not torch.strided:
        raise InvalidInput(f"{t.name}: expected a dense tensor, got layout {t.tensor.layout}; call to_dense() first")
    if t.tensor.is_conj() or t.tensor.is_neg():
        raise InvalidInput(f"{t.name}: a conjugate or negative still to be computed: resolve_conj(), resolve_neg() do")


def _check_no_factor(t: NamedTensor) -> None:
    """Refuse a LoRA layer of another library: it would be streamed as its base and its factors, and served as the
    base."""
    parts = t.name.split(".")
    found = next((part for part in parts if part in _FACTORS), None)
    if found is not None:
        layer = ".".join(parts[: parts.index(found)]) or "the model"
        raise UnsupportedAdapter(
            f"{layer} holds {found}, and is no LoRA layer of PEFT's or Megatron-Bridge's (it lies in a "
            f"{lineage(type(t.owner))[0]}): its adapter cannot be read, and without it the base alone would be served; "
            "train the adapter with PEFT, or merge it first"
        )


def _quantised(t: NamedTensor) -> str | None:
    """Return the format by which the elements of a tensor stand for others; None where they are what they seem."""
    local: Tensor = getattr(t.tensor, "_local_tensor", t.tensor)
    for cls in {type(t.tensor), type(t.tensor.data), type(local)}:
        known = next((_PACKED_CLASSES[path] for path in lineage(cls) if path in _PACKED_CLASSES), None)
        if known is not None:
            return known
        if cls.__torch_dispatch__ is not Tensor.__torch_dispatch__ and not is_dtensor_kind(cls):
            return f"a {lineage(cls)[0]}"
    if any(_PARAMETRISED in lineage(type(part)) for part in t.owner._modules.values()):
        return "4-bit, bitsandbytes"
    if local.is_quantized:
        return f"{local.dtype}"
    if t.attribute in _PACKED_NAMES and not local.is_floating_point():
        return f"{t.attribute} of a {type(t.owner).__name__}"
    if _is_byte(local) and (_holds_weight(t) or (local.is_floating_point() and _among_codes(t))):
        return f"{local.dtype}"
    return None


def _is_byte(t: Tensor) -> bool:
    return t.dtype.itemsize == 1 and t.dtype != torch.bool


def _holds_weight(t: NamedTensor) -> bool:
    """Return True if a tensor of bytes is in the place of a weight: scales of these may be anywhere. A power of two
    without a sign (e8m0), or a single row, is none."""
    if t.attribute not in t.owner._parameters:
        return t.attribute == "weight"
    exponents = t.tensor.dtype == getattr(torch, "float8_e8m0fnu", None)
    return t.attribute == "weight" or not t.tensor.is_floating_point() or not (exponents or t.tensor.dim() < 2)


def _among_codes(t: NamedTensor) -> bool:
    """Return True if a floating-point tensor beside bytes is, or has, scales: by its module's names, or by other bytes
    there."""
    beside = {**t.owner._parameters, **t.owner._buffers}
    return any(
        "scale" in name.lower() or (name != t.attribute and _is_byte(tensor))
        for name, tensor in beside.items()
        if tensor is not None
    )
