"""What an engine holds, kept in the worker beside the weights; and how a change behind its back shows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..plan import Plan
from ..segments import Segment

SAMPLES = 64
"""Elements of each tensor that a sampled fingerprint reads."""


@dataclass(frozen=True, slots=True)
class State:
    """What the weights of one engine are.

    Args:
        kind: "nothing" (what the engine started with), "base", "adapter" (base + adapter@version), "merged"
            (merged@version) or "dirty".
        version: number of the push that brought it, counted by the engine; 0 before the first.
        base: fingerprint of the base weights, for "base" and "adapter".
        reason: why it is dirty.
    """

    kind: str = "nothing"
    version: int = 0
    base: str = ""
    reason: str = ""

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
        self._plan: Plan | None = None
        self._out = torch.empty(0, dtype=torch.uint8)

    def __call__(self, tensors: Iterable[Tensor]) -> str:
        """Hex digest over shapes, dtypes and sampled elements."""
        chosen = [t.detach() for t in tensors if t.numel()]
        key = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in chosen]
        if key != self._key:
            self._prepare(chosen)
            self._key = key
        if self._plan is not None:
            self._plan.run()
        digest = hashlib.blake2b(repr([(tuple(t.shape), t.dtype) for t in chosen]).encode(), digest_size=16)
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


class Modules:
    """What an engine's model is made of, found once and kept until `forget`.

    A push asks a dozen times, a walk over 28 layers takes half a millisecond, and within one call to a worker nobody
    changes modules but this package. So every call forgets first.

    Args:
        model: the live vLLM model, LoRA wrappers and all.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._paths: list[tuple[str, nn.Module]] = []
        self._each: list[nn.Module] = []

    def forget(self) -> None:
        """Modules may have changed."""
        self._paths, self._each = [], []

    def paths(self) -> list[tuple[str, nn.Module]]:
        """Every module under every path, in the order of `named_modules(remove_duplicate=False)`, whose nested
        generators take ten times as long."""
        rest: list[tuple[str, nn.Module]] = [] if self._paths else [("", self.model)]
        while rest:
            path, module = rest.pop()
            self._paths.append((path, module))
            below = [
                (f"{path}.{key}" if path else key, child) for key, child in module._modules.items() if child is not None
            ]
            rest.extend(reversed(below))
        return self._paths

    def __iter__(self) -> Iterator[nn.Module]:
        """Every module once, as `Module.modules()`."""
        self._each = self._each or list({id(module): module for _, module in self.paths()}.values())
        return iter(self._each)

    def tensors(self) -> list[Tensor]:
        """Live parameters, then persistent buffers, each once."""
        found: dict[int, Tensor] = {
            id(p): p for module in self for p in module._parameters.values() if p is not None and p.numel()
        }
        for module in self:
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.numel() and key not in module._non_persistent_buffers_set:
                    found[id(buffer)] = buffer
        return list(found.values())

    def kernels(self) -> list[Any]:
        """What vLLM's CPU layers compute with instead of their parameters; made anew whenever weights are processed."""
        return [module.__dict__["cpu_linear"] for module in self if "cpu_linear" in module.__dict__]
