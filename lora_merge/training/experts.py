"""Parameters that a module reads by itself (PEFT's `target_parameters`): fused experts above all.

The parameter `[E, rows, columns]` holds the merged experts. PEFT's forward would add a delta of its size to it. Here
the module reads a stand-in under the parameter's name while it computes: the same memory, with the way back to the
adapters. Products with the stand-in, whole (`grouped_mm`, `bmm`) or expert by expert, give the adapters their gradients
without one of the parameter's size (`expert_products.py`). Whatever else is done with it takes autograd's own way: one
gradient of the parameter's size, which is projected on the factors and freed before the layer below is reached.

The parameter itself stays where it is, and never requires a gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..errors import UnsupportedAdapter
from ..kernels.plan import untraced
from ..models.peft.layer import PARAMETER, SWAPPED
from ..names import innermost, path_of
from . import expert_products as products
from .expert_products import Factors
from .layers import Acting
from .through import Through


class Holders:
    """Modules whose parameters adapters change. Their forwards are called through here from `cover` to `release`.

    Args:
        standing: returns what a backward pass asks before it reads the parameters; None where a forward that begins now
            has no merged parameters or no gradients.
    """

    def __init__(self, standing: Callable[[], Callable[[], object] | None]) -> None:
        self._standing = standing
        self._adapted: dict[nn.Module, list[Acting]] = {}
        self._through = Through()

    def cover(self, adapted: Iterable[Acting]) -> None:
        """Take over the forwards of the modules that are adapted now."""
        self._adapted = {}
        for found in adapted:
            if path_of(type(found.layer)) == PARAMETER:
                self._adapted.setdefault(innermost(found.layer), []).append(found)
        for holder in self._adapted:
            self._through.take(holder, self._call)

    def release(self) -> None:
        """Give the modules their own forwards back."""
        self._through.release()
        self._adapted.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        """Let modules of a copied model call their own forwards."""
        return Holders, (_nothing,)

    @untraced
    def _call(self, holder: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        ready = self._standing()
        if ready is None or holder not in self._adapted:
            return forward(*args, **kwargs)

        def ask(gradient: Tensor) -> None:
            ready()

        with _standing_in(holder, self._adapted[holder]):
            output = forward(*args, **kwargs)
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                # A hook, not a function that passes the output on: models add to it in place.
                tensor.register_hook(ask)
        return output


def _nothing() -> None:
    return None


@contextmanager
def _standing_in(module: nn.Module, adapted: Iterable[Acting]) -> Iterator[None]:
    inside = vars(module)  # before `_parameters` for whoever reads an attribute
    placed = []
    try:
        for found in adapted:
            name = found.layer.parameter_name
            stand_in = _stand_in(module._parameters[name], found)
            if stand_in is not None:
                placed.append(name)
                inside[name] = stand_in
        yield
    finally:
        for name in placed:
            inside.pop(name, None)


def _stand_in(parameter: Tensor | None, adapted: Acting) -> Tensor | None:
    """Return what a module reads in place of a parameter; None where nothing is trained."""
    assert parameter is not None
    factors = [_factors(adapted.layer, adapter, parameter.ndim) for adapter in adapted.adapters]
    scalings, tensors = products.flat(factors)
    if not any(tensor.requires_grad for tensor in tensors):
        return None
    whole: Tensor = products.Whole.apply(parameter, scalings, *tensors)
    # A parameter that is trained itself wants its whole gradient.
    return whole if parameter.requires_grad else _StandIn.of(whole, factors)


def _factors(layer: Any, adapter: str, ndim: int) -> Factors:
    """Return the factors of a parameter `[E, rows, columns]` or `[rows, columns]`.

    PEFT's layout: lora_A `[E * r, in]` has expert after expert, lora_B `[out, r * E]` rank after rank with the experts
    side by side.
    """
    lora_A, lora_B, experts = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight, layer.num_experts
    for half in (lora_A, lora_B):
        if half.ndim != 2 or type(half) not in (Tensor, nn.Parameter):
            raise UnsupportedAdapter(
                f"{layer.parameter_name}: adapter '{adapter}' has a {type(half).__name__} of shape {tuple(half.shape)} "
                "in the forward; on a parameter, adapters must be at hand whole there: shard the model with FSDP2"
            )
    lora_A = lora_A.reshape(experts, -1, lora_A.shape[-1])
    lora_B = lora_B.reshape(lora_B.shape[0], -1, experts).permute(2, 0, 1)
    factors = Factors(lora_B, lora_A, float(layer.scaling[adapter]))
    if experts > 1 and not getattr(layer, SWAPPED, False):
        factors = factors.transposed()
    return factors if ndim == 3 else Factors(factors.left[0], factors.right[0], factors.scaling)


class _StandIn(Tensor):
    """A weight `[E, rows, columns]` or `[rows, columns]` that knows what adapters add to it.

    It is a tensor with autograd's way to the factors, for code that takes tensors as they are. What goes through
    torch's functions goes a shorter way: products that are listed below, and views that lead to them, without a
    gradient of its size; others with one, from where it is used to where it is projected.
    """

    factors: Sequence[Factors]
    _apart: list[Sequence[Factors]] | None
    _whole: Tensor | None

    @staticmethod
    def of(tensor: Tensor, factors: Sequence[Factors]) -> _StandIn:
        found = tensor.as_subclass(_StandIn)
        found.factors, found._apart, found._whole = factors, None, None
        return found

    def expert(self, expert: int) -> Sequence[Factors]:
        """Return the factors of one expert."""
        if self._apart is None:  # once for all: each slice of its own would be a gradient of all experts' size
            apart = [(f.left.unbind(0), f.right.unbind(0), f.scaling) for f in self.factors]
            self._apart = [
                [Factors(lefts[number], rights[number], scaling) for lefts, rights, scaling in apart]
                for number in range(self.shape[0])
            ]
        return self._apart[expert]

    def whole(self) -> Tensor:
        """Return the weight for any use. Made when it is used first: autograd then frees its gradient earliest."""
        if self._whole is None:
            scalings, tensors = products.flat(self.factors)
            self._whole = products.Whole.apply(self.detach(), scalings, *tensors)
        return self._whole

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if not torch.is_grad_enabled() or (func not in _WAYS and isinstance(func, _Getter)):
                return func(*args, **kwargs)
            found = _WAYS[func](func, *args, **kwargs) if func in _WAYS else NotImplemented
            if found is not NotImplemented:
                return found
            args, kwargs = tree_map_only(_StandIn, _StandIn.whole, (tuple(args), kwargs))
            return func(*args, **kwargs)


_Getter = type(Tensor.shape.__get__)  # type: ignore[attr-defined]
"""Class of the functions that torch calls for attributes."""


def _multiply(x: Any, weight: _StandIn, ends: Tensor | None, multiply: products.Multiply) -> Tensor:
    scalings, tensors = products.flat(weight.factors)
    found: Tensor = products.Product.apply(x, weight.detach(), ends, multiply, scalings, *tensors)
    return found


def _matmul(func: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 2:
        return NotImplemented
    x, weight = args
    if isinstance(x, _StandIn) or not isinstance(weight, _StandIn) or x.ndim < 2:
        return NotImplemented
    if weight.ndim == 3 and (x.ndim != 3 or x.shape[0] != weight.shape[0]):
        return NotImplemented
    return _multiply(x, weight, None, func)


def _linear(func: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    if bias is not None or isinstance(x, _StandIn) or not isinstance(weight, _StandIn) or weight.ndim != 2:
        return NotImplemented
    return _multiply(x, _transposed(weight), None, lambda x, weight: func(x, weight.mT))


def _grouped_mm(func: Any, x: Any, weight: Any, *, offs: Any = None, **kwargs: Any) -> Any:
    fits = isinstance(weight, _StandIn) and weight.ndim == 3 and x.ndim == 2 and offs is not None
    if not fits or isinstance(x, _StandIn) or any(value is not None for value in kwargs.values()):
        return NotImplemented
    return _multiply(x, weight, offs, lambda x, weight: func(x, weight, offs=offs))


def _transpose(func: Any, weight: Any, *dims: Any, **kwargs: Any) -> Any:
    last = {weight.ndim - 2, weight.ndim - 1}
    if kwargs or (dims and {dim % weight.ndim for dim in dims} != last) or (not dims and weight.ndim != 2):
        return NotImplemented
    return _transposed(weight)


def _transposed(weight: _StandIn) -> _StandIn:
    return _StandIn.of(weight.mT, [f.transposed() for f in weight.factors])


def _getitem(func: Any, weight: Any, index: Any) -> Any:
    """Take one expert, by a number or by a tensor that holds one."""
    if isinstance(index, Tensor) and not (index.ndim == 0 and index.dtype in (torch.int64, torch.int32)):
        return NotImplemented
    if weight.ndim != 3 or isinstance(index, bool) or not isinstance(index, int | Tensor):
        return NotImplemented
    number = operator.index(index)
    return _StandIn.of(func(weight, number), weight.expert(number))


_WAYS: dict[Any, Callable[..., Any]] = {
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.matmul: _matmul,
    torch.bmm: _matmul,
    Tensor.bmm: _matmul,
    torch.mm: _matmul,
    Tensor.mm: _matmul,
    torch.nn.functional.linear: _linear,
    torch.transpose: _transpose,
    Tensor.transpose: _transpose,
    Tensor.t: _transpose,
    torch.t: _transpose,
    Tensor.T.__get__: _transpose,  # type: ignore[attr-defined]
    Tensor.mT.__get__: lambda func, weight, *_: _transposed(weight),  # type: ignore[attr-defined]
    Tensor.__getitem__: _getitem,
}
"""What torch calls on a stand-in -> how that is done without a gradient of its size."""
if hasattr(torch, "_grouped_mm"):
    _WAYS[torch._grouped_mm] = _grouped_mm
