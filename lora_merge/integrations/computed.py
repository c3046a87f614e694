"""The stream of a policy that is trained on merged weights, for a trainer's own transport."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..stream.weights import MergedWeights


class ComputedWeights(MergedWeights):
    """The merged checkpoint in the bits that a forward in another dtype computes with.

    Autocast and FSDP's mixed precision round a weight that was merged in float32 once more. `MergedWeights` rounds
    once, from the exact sum; of float32 weights in bf16 that gives other bits in about one element of 2^17, where the
    first rounding ends half-way between two values of bf16. This takes both steps.

    Args:
        model: as for `MergedWeights`.
        dtype: that the forward computes in; None: the weights' own.

    Raises:
        as `MergedWeights`.
    """

    def __init__(self, model: Any, dtype: torch.dtype | None) -> None:
        super().__init__(model, dtype=dtype)
        self._own = MergedWeights(model)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the merged checkpoint. Collective."""
        dtypes = {name: dtype for name, dtype, _ in self.metadata()}  # of buffers it stays
        for name, tensor in self._own:
            yield name, tensor.to(dtypes[name])


def stream_of(model: Any, dtype: torch.dtype | None, rounding: str, trained: bool) -> MergedWeights:
    """Return the stream of a policy in a dtype.

    Args:
        trained: whether it is trained on its merged weights.
    """
    return ComputedWeights(model, dtype) if trained else MergedWeights(model, dtype=dtype, rounding=rounding)
