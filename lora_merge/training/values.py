"""Whether adapters hold what was merged of them, also where optimizers write past the version counters of tensors.

Fused kernels (bitsandbytes, DeepSpeed, apex, Transformer Engine) write by address, and optimizers that keep parameters
in one flat buffer (DeepSpeed's ZeRO, Megatron's) write through the buffer: neither bumps a version. So the bits are
compared with a copy of what was merged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..kernels.segments import raw

_stepped = [0]
"""How many optimizers have stepped in this process."""


def _count(*_: Any) -> None:
    _stepped[0] += 1


register_optimizer_step_post_hook(_count)


class Values:
    """The bits of some tensors as they are when this is made.

    Args:
        tensors: what is here of adapters.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors: dict[torch.device, list[Tensor]] = {}
        for tensor in {id(t): t for t in tensors if t.numel() and not t.is_meta}.values():
            self._tensors.setdefault(tensor.device, []).append(tensor)
        self._bits = self._now()
        self._buffered = any(
            tensor.untyped_storage().nbytes() != tensor.nbytes for some in self._tensors.values() for tensor in some
        )
        self._steps = _stepped[0]

    @property
    def stepped(self) -> bool:
        """Whether an optimizer, of whatever model, has stepped since the bits were last seen to be these."""
        return self._steps != _stepped[0]

    def same(self) -> bool:
        """Return True if the tensors hold these bits.

        Tensors with memory of their own are looked at after a step of an optimizer; those in a larger buffer, which
        others may write to, each time.
        """
        if not (self._buffered or self.stepped):
            return True
        steps, now = _stepped[0], self._now()
        if any(not torch.equal(bits, now[device]) for device, bits in self._bits.items()):
            return False
        self._steps = steps
        return True

    def equal(self, other: Values) -> bool:
        """Return True if others were the same bits, of tensors of the same sizes."""
        mine, others = self._bits, other._bits
        return mine.keys() == others.keys() and all(torch.equal(mine[device], others[device]) for device in mine)

    def _now(self) -> dict[torch.device, Tensor]:
        with torch.no_grad():
            return {
                device: torch.cat([raw(tensor.detach()).reshape(-1).view(torch.uint8) for tensor in some])
                for device, some in self._tensors.items()
            }
