"""Whether adapters in a larger buffer hold what was merged of them.

Optimizers that keep parameters in one flat buffer (DeepSpeed's ZeRO, FSDP1's flat parameter) write through it, which no
version counter of a parameter tells of. So their bits are compared with a copy of what was merged.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..kernels.segments import raw


class Values:
    """The bits of tensors that lie in larger buffers, as they are when this is made.

    Args:
        tensors: what is here of adapters; those with memory of their own are left out.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors: dict[torch.device, list[Tensor]] = {}
        for tensor in {id(t): t for t in tensors if t.numel() and not t.is_meta}.values():
            if tensor.untyped_storage().nbytes() != tensor.nbytes:
                self._tensors.setdefault(tensor.device, []).append(tensor)
        self._bits = self._now()

    def same(self) -> bool:
        """Return True if the tensors hold these bits. Waits for the device where there are any."""
        now = self._now()
        return all(torch.equal(bits, now[device]) for device, bits in self._bits.items())

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
