"""Which forwards of base modules are linear in the weight.

PEFT's layers add the adapter beside the base's forward; merging adds it to the weight. Both are the same only if that
forward does nothing to the weight but multiply by it (or look rows of it up), and nothing to the input before. No
forward can be asked for that, so those that were read are listed here, by the code that runs: a subclass that inherits
one passes, a class with its own does not. Hooks are not looked at: accelerate, FSDP and `parallelize_module` work by
them.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

from torch import Tensor, nn

_CONV = "torch.nn.modules.conv."
_IDEFICS = "transformers.models.idefics.modeling_idefics.IdeficsDecoupled"
_LINEAR = {
    "torch.nn.modules.linear.Linear.forward",
    "torch.nn.modules.sparse.Embedding.forward",
    *(f"{_CONV}Conv{n}d.{method}" for n in (1, 2, 3) for method in ("forward", "_conv_forward")),
    "transformers.pytorch_utils.Conv1D.forward",
    "transformers.models.falcon.modeling_falcon.FalconLinear.forward",
    # These multiply by what the codes of the weight stand for.
    *(
        f"bitsandbytes.nn.modules.{kind}.forward"
        for kind in ("Linear4bit", "Linear8bitLt", "Embedding4bit", "Embedding8bit")
    ),
    *(f"hqq.core.quantize.HQQLinear.forward_{kind}" for kind in ("pytorch", "pytorch_backprop")),
    # What these have beside the weight is for other outputs and other rows.
    _IDEFICS + "Linear.forward",
    _IDEFICS + "Embedding.forward",
}


_PEFTS = ("peft.tuners.lora.", "peft.tuners.trainable_tokens.layer.")
"""Packages of PEFT's with the forwards of layers that are read."""


class _ScaledWordEmbedding(nn.Embedding):
    """The forwards of transformers' scaled embeddings; each model has its own copy. PEFT's layer scales the adapter by
    `embed_scale` too."""

    embed_scale: Any

    def plain(self, input_ids: Tensor) -> Any:
        return super().forward(input_ids) * self.embed_scale

    def cast(self, input_ids: Tensor) -> Any:
        return super().forward(input_ids) * self.embed_scale.to(self.weight.dtype)


def _code(function: Any) -> tuple[bytes, tuple[str, ...]]:
    """Return what runs, whatever its place in a file and its annotations."""
    return function.__code__.co_code, function.__code__.co_names


_SCALED = {_code(_ScaledWordEmbedding.plain), _code(_ScaledWordEmbedding.cast)}


_SWIFT, _SWIFT_KEEPS = "swift.tuners.peft.keep_device_forward", "forward_origin"
"""ms-swift's forward of lora_A and lora_B, which brings the input to the weight's device, and where it keeps the one
that it calls then."""
OWN = frozenset({"forward", "_old_forward", "_conv_forward", _SWIFT_KEEPS})
"""Attributes in which a module keeps a forward of its own, which comes before that of its class."""


def strange_forward(module: nn.Module) -> str | None:
    """Return the dotted path of the code in a module's forward that is not known to be linear in its weight; None if
    all is."""
    scales = isinstance(module, nn.Embedding) and hasattr(module, "embed_scale")
    return _strange([*_own(module), *_defined(type(module), "forward")], scales) or _strange(_convolves(module))


def strange_factor(part: nn.Module) -> str | None:
    """Return `strange_forward` of a lora_A or lora_B, of which there are thousands: by its class, unless it has its own
    forward."""
    kind: type = type(part)
    if OWN.isdisjoint(part.__dict__):
        return _strange_class(kind)
    own = [part.__dict__.get(_SWIFT_KEEPS) if _path(_function(f)) == _SWIFT else f for f in _own(part)]
    return _strange([*own, *_defined(kind, "forward")]) or _strange(_convolves(part))


def strange_layer(layer: nn.Module) -> str | None:
    """Return the dotted path of the forward of a layer of PEFT's that is not PEFT's own, on the layer or on its class;
    None if it is."""
    path = _path(_function([*_own(layer), *_defined(type(layer), "forward")][0]))
    return None if path.startswith(_PEFTS) else path


def _own(module: nn.Module) -> list[Any]:
    """Return the forward that is set on a module itself; accelerate calls it from one of its own, and keeps it."""
    inside = module.__dict__
    return [inside[name] for name in ("_old_forward", "forward") if name in inside][:1]


def _function(found: Any) -> Any:
    return getattr(found, "__func__", found)


@cache
def _strange_class(cls: type) -> str | None:
    return _strange(_defined(cls, "forward")) or _strange(_defined(cls, "_conv_forward"))


def _convolves(module: nn.Module) -> list[Any]:
    defined = _defined(type(module), "_conv_forward")
    own = module.__dict__.get("_conv_forward") if defined else None
    return defined if own is None else [own, *defined]


def _defined(cls: type, method: str) -> list[Any]:
    """Return a method as a class and its ancestors define it, the one that is called first in front."""
    return [base.__dict__[method] for base in cls.__mro__ if method in base.__dict__]


def _strange(functions: list[Any], scales: bool = False) -> str | None:
    """Return the first strange path of functions each of which may call the next one.

    Args:
        scales: whether the adapter is scaled by `embed_scale`; then the base has to be, and else it must not.
    """
    scaled = False
    # accelerate keeps what the class has: it runs once.
    for function in dict.fromkeys(map(_function, functions)):
        path = _path(function)
        if path in _LINEAR:
            return None if scaled == scales else f"{path}, which leaves out its embed_scale"
        if not scales or scaled or not isinstance(function, FunctionType) or _code(function) not in _SCALED:
            return path
        scaled = True
    return None


def _path(function: object) -> str:
    """Return the dotted path of the code itself: decorators take over names."""
    if isinstance(function, FunctionType):
        return f"{function.__globals__['__name__']}.{function.__code__.co_qualname}"
    return f"{type(function).__module__}.{type(function).__qualname__}"
