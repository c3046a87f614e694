"""An older import path of `lora_merge.megatron`, which stays."""

from ..megatron import Chunks, adapters_off, read

__all__ = ["Chunks", "adapters_off", "read"]
