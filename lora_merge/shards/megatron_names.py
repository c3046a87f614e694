"""An older import path of `lora_merge.megatron`, which stays."""

from ..megatron import bridge_names

__all__ = ["bridge_names"]
