"""A fingerprint of many tensors from a sample of their elements, which shows changes by others."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..kernels.plan import Plan
from ..kernels.segments import Segment

SAMPLES = 64
"""Elements of each tensor that a sampled fingerprint reads."""
_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


class Sampler:
    """A sampled fingerprint of many tensors: one launch gathers some elements of each, one copy brings them over.

    The plan is kept as long as the tensors stay where they are.
    """

    def __init__(self) -> None:
        self._key: Any = None
        self._kinds = b""
        self._plan: Plan | None = None
        self._out = torch.empty(0, dtype=torch.uint8, device="cpu")

    def __call__(self, tensors: Sequence[Tensor], known: list[Any] | None = None) -> str:
        """Return a hex digest over shapes, dtypes and sampled elements.

        Args:
            known: `facts` of the tensors, where the caller has them.
        """
        key = facts(tensors) if known is None else known
        if key != self._key:
            # Parts that an engine was started without lie on the meta device, and hold nothing.
            chosen = [t.detach() for t in tensors if t.numel() and not t.is_meta]
            self._prepare(chosen)
            self._key, self._kinds = key, repr([(tuple(t.shape), t.dtype) for t in chosen]).encode()
        if self._plan is not None:
            self._plan.run()
        digest = hashlib.blake2b(self._kinds, digest_size=16)
        digest.update(self._out.cpu().numpy().tobytes())
        return digest.hexdigest()

    def _prepare(self, tensors: list[Tensor]) -> None:
        views = [spread(t) for t in tensors]
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


def spread(tensor: Tensor) -> Tensor:
    """Return an `[n, 1]` view of up to `SAMPLES` elements spread over a tensor."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    step = max(1, last // (SAMPLES - 1))
    return tensor.as_strided((last // step + 1, 1), (step, 1))


def facts(tensors: Sequence[Tensor]) -> list[Any]:
    """Return addresses, shapes, strides and dtypes, to be compared with `==`; without Python for each tensor."""
    with torch._C.DisableTorchFunctionSubclass():  # vLLM's parameters are of classes that would see every call
        return [
            *map(Tensor.data_ptr, tensors), *map(_SHAPE, tensors), *map(Tensor.stride, tensors), *map(_DTYPE, tensors)
        ]  # fmt: skip
