"""Extends vLLM's workers: the bits of their parameters, to be compared."""

from __future__ import annotations

import hashlib

import first_calls
import torch


class Bits(first_calls.Settled):
    """Methods for `collective_rpc`."""

    def bits(self) -> dict[str, str]:
        """A digest of each parameter's bits."""
        named = self.get_model().named_parameters()  # type: ignore[attr-defined]
        raw = ((name, p.detach().reshape(-1).view(torch.uint8).cpu().numpy()) for name, p in named)
        return {name: hashlib.blake2b(bits.tobytes(), digest_size=8).hexdigest() for name, bits in raw}

    def allocated(self) -> int:
        """Bytes of tensors on this worker's GPU."""
        return torch.cuda.memory_allocated()
