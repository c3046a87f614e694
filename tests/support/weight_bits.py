"""Extends vLLM's workers: the bits of their parameters, to be compared."""

from __future__ import annotations

import hashlib

import first_calls
import torch
from torch import Tensor

from lora_merge.stream.buckets import checksum


def bits_of(tensor: Tensor) -> str:
    """A digest of its bits; on a GPU computed there, as a CPU takes half a minute for 16 GB."""
    if tensor.is_cuda:
        return f"{checksum(tensor):x}"
    raw = tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(raw.tobytes(), digest_size=8).hexdigest()


class Bits(first_calls.Settled):
    """Methods for `collective_rpc`."""

    def bits(self, buffers: bool = False) -> dict[str, str]:
        """A digest of each parameter's bits, and of each buffer's."""
        model = self.get_model()  # type: ignore[attr-defined]
        named = dict(model.named_parameters()) | (dict(model.named_buffers()) if buffers else {})
        return {name: bits_of(tensor) for name, tensor in named.items()}

    def allocated(self) -> int:
        """Bytes of tensors on this worker's GPU."""
        return torch.cuda.memory_allocated()
