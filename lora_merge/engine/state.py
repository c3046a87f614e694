"""What an engine holds, kept in the worker beside the weights; and how a change behind its back shows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..kernels.plan import Plan
from ..kernels.segments import Segment

SAMPLES = 64
"""Elements of each tensor that a sampled fingerprint reads."""
_T = TypeVar("_T")
_MODULES, _PARAMETERS = attrgetter("_modules"), attrgetter("_parameters")
_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


@dataclass(frozen=True, slots=True)
class State:
    """What the weights of one engine are.

    Args:
        kind: "nothing" (what the engine started with), "base", "adapter" (base + adapter@version), "merged"
            (merged@version) or "dirty".
        version: number of the push that brought it, counted by the engine; 0 before the first.
        base: fingerprint of the base weights, for "base" and "adapter".
        reason: why it is dirty.
        trainer: name of the `VllmSync` that pushed it: engines count versions for all of them.
    """

    kind: str = "nothing"
    version: int = 0
    base: str = ""
    reason: str = ""
    trainer: str = ""

    def dirty(self, reason: str) -> State:
        return State("dirty", self.version, "", reason)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"dirty ({self.reason})" if self.kind == "dirty" else f"{self.kind}@{self.version}"


class Sampler:
    """A sampled fingerprint of many tensors: one launch gathers some elements of each, one copy brings them over.

    The plan is kept as long as the tensors stay where they are.
    """

    def __init__(self) -> None:
        self._key: Any = None
        self._kinds = b""
        self._plan: Plan | None = None
        self._out = torch.empty(0, dtype=torch.uint8)

    def __call__(self, tensors: Sequence[Tensor]) -> str:
        """Hex digest over shapes, dtypes and sampled elements."""
        key = facts(tensors)
        if key != self._key:
            chosen = [t.detach() for t in tensors if t.numel()]
            self._prepare(chosen)
            self._key, self._kinds = key, repr([(tuple(t.shape), t.dtype) for t in chosen]).encode()
        if self._plan is not None:
            self._plan.run()
        digest = hashlib.blake2b(self._kinds, digest_size=16)
        digest.update(self._out.cpu().numpy().tobytes())
        return digest.hexdigest()

    def _prepare(self, tensors: list[Tensor]) -> None:
        views = [_spread(t) for t in tensors]
        starts = [0]
        for view in views:
            starts.append(starts[-1] + -(-view.numel() * view.element_size() // 16) * 16)
        device = tensors[0].device if tensors else torch.device("cpu")
        self._out = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
        segments = []
        for view, start in zip(views, starts, strict=False):
            place = self._out[start : start + view.numel() * view.element_size()].view(view.dtype)
            segments.append(Segment("sample", view, place.view(-1, 1)))
        self._plan = Plan(segments)
        self._plan.release()  # addresses are compared before every run; memory that its owner lets go of is freed


def _spread(tensor: Tensor) -> Tensor:
    """`[n, 1]` view of up to `SAMPLES` elements spread over a tensor."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    step = max(1, last // (SAMPLES - 1))
    return tensor.as_strided((last // step + 1, 1), (step, 1))


def facts(tensors: Sequence[Tensor]) -> list[Any]:
    """Addresses, shapes, strides and dtypes, without Python for each tensor: to be compared with `==`."""
    with torch._C.DisableTorchFunctionSubclass():  # vLLM's parameters are of classes that would see every call
        return [
            *map(Tensor.data_ptr, tensors), *map(_SHAPE, tensors), *map(Tensor.stride, tensors), *map(_DTYPE, tensors)
        ]  # fmt: skip


class Modules:
    """What an engine's model is made of. A walk over 28 layers takes half a millisecond; within one call to a worker
    nobody changes modules but this package; after `doubt` whoever asks first sees whether somebody did.

    Args:
        model: the live vLLM model, LoRA wrappers and all.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._paths: list[tuple[str, nn.Module]] = []
        self._each: list[nn.Module] = []
        self._below: list[Any] = []
        self._kept: dict[Any, Any] = {}
        self._sure = False

    def forget(self) -> None:
        """Modules have changed."""
        self._paths, self._each, self._below, self._kept = [], [], [], {}

    def doubt(self) -> None:
        """A new call: modules may have changed."""
        self._sure = False

    def _children(self) -> list[Any]:
        """Of every module that was found how many are below, their names, and which they are (they are alive, so an
        `id` stands for one module)."""
        below = list(map(_MODULES, self._each))
        return [*map(len, below), *chain(*below), *map(id, chain.from_iterable(map(dict.values, below)))]

    def paths(self) -> list[tuple[str, nn.Module]]:
        """Every module under every path, in the order of `named_modules(remove_duplicate=False)`, whose nested
        generators take ten times as long."""
        if not self._sure and self._children() != self._below:
            self.forget()
        self._sure = True
        if not self._paths:
            rest: list[tuple[str, nn.Module]] = [("", self.model)]
            while rest:
                path, module = rest.pop()
                self._paths.append((path, module))
                below = [
                    (f"{path}.{key}" if path else key, child)
                    for key, child in module._modules.items()
                    if child is not None
                ]
                rest.extend(reversed(below))
            self._each = list({id(module): module for _, module in self._paths}.values())
            self._below = self._children()
        return self._paths

    def __iter__(self) -> Iterator[nn.Module]:
        """Every module once, as `Module.modules()`."""
        self.paths()
        return iter(self._each)

    def kept(self, find: Callable[[Modules], _T]) -> _T:
        """What a function finds here; it is asked again when modules have changed."""
        self.paths()
        if find not in self._kept:
            self._kept[find] = find(self)
        return self._kept[find]

    def tensors(self) -> list[Tensor]:
        """Live parameters, then persistent buffers, each once."""
        found = {id(p): p for p in chain.from_iterable(map(dict.values, map(_PARAMETERS, self)))}
        for module in self:
            for key, buffer in module._buffers.items():
                if key not in module._non_persistent_buffers_set:
                    found[id(buffer)] = buffer
        with torch._C.DisableTorchFunctionSubclass():
            return [t for t in found.values() if t is not None and t.numel()]

    def kernels(self) -> list[Any]:
        """What vLLM's CPU layers compute with instead of their parameters; made anew whenever weights are processed."""
        return [module.__dict__["cpu_linear"] for module in self if "cpu_linear" in module.__dict__]
