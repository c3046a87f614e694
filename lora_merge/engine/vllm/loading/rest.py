"""Parameters that a push leaves as the engine has them: towers, where the trainer's class is the language model alone.

They have to be what the engine loaded from its checkpoint: random ones (load_format="dummy"), what sleep at level 2
has thrown away, or the tower that another trainer has pushed would be served. Tensors that lie as they were loaded are
compared with the files once, every element, as a push of adapters on large linears leaves all small tensors as they
were; after that a sample of all shows changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...fingerprint import Sampler
from ...worker.dry_run import Record


class Rest:
    """The part of a model outside of its language model, and whether it is what its checkpoint holds."""

    def __init__(self) -> None:
        self._sampler, self._sample = Sampler(), ""

    def note(self, tensors: Sequence[Tensor]) -> None:
        """Note what there is now."""
        self._sample = self._sampler(tensors)

    def same(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if it is what was noted last."""
        return bool(self._sample) and self._sampler(tensors) == self._sample


def outside(model: nn.Module, inside: str) -> list[Tensor]:
    """Return the parameters and buffers of a model outside of its language model."""
    held = [*model.named_parameters(), *model.named_buffers()]
    return [tensor for path, tensor in held if not path.startswith(f"{inside}.") and tensor.numel()]


def differing(records: Sequence[Record], paths: Collection[str], tensors: Mapping[str, Tensor]) -> str:
    """Return why parameters are not known to be what a checkpoint holds; "" where they are.

    Args:
        records: what loading the checkpoint would copy.
        paths: of the parameters.
        tensors: of the checkpoint, by name.
    """
    compared = 0
    for record in records:
        copy = record.copy
        if record.path not in paths or copy is None or copy.destination.is_meta:
            continue
        flat: Any = tensors[record.name].contiguous().view(-1)
        wanted = flat[copy.offset :].as_strided(copy.destination.shape, copy.stride).to(copy.destination.dtype)
        if not torch.equal(wanted, copy.destination.to(wanted.device)):
            return (
                f"{record.path} is not what the engine's checkpoint holds (sleep at level 2, a reload or a push has "
                "changed it since the engine was started)"
            )
        compared += 1
    return "" if compared else "none of its tensors lies in the engine as in the checkpoint, to be compared"
