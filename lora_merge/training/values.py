"""Whether adapters in a larger buffer hold what was merged of them.

Optimizers that keep parameters in one flat buffer (DeepSpeed's ZeRO, FSDP1's flat parameter) write through it, which no
version counter of a parameter tells of. So their bits are compared with a copy of what was merged.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress
from operator import attrgetter, ne

import torch
from torch import Tensor

from ..kernels.segments import raw

_NBYTES = attrgetter("nbytes")


class Values:
    """The bits of tensors that lie in larger buffers, as they are when this is made.

    Args:
        tensors: what is here of adapters; those with memory of their own are left out.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors: dict[torch.device, list[Tensor]] = {}
        there = list({id(t): t for t in tensors}.values())
        held = map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, there))
        for tensor in compress(there, map(ne, held, map(_NBYTES, there))):
            if tensor.numel() and not tensor.is_meta:
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
