"""Extends vLLM's workers: which adapters lie there."""

from __future__ import annotations

import weight_bits


class Sliced(weight_bits.Bits):
    """Methods for `collective_rpc`."""

    def kept(self) -> list[str]:
        """Names of the factors that lie here."""
        merger = self.get_model().__dict__["_lora_merge"].merger  # type: ignore[attr-defined]
        return sorted(merger._plan._tensors)
