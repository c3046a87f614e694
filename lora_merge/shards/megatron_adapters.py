"""An older import path of `lora_merge.megatron`, which stays."""

from ..megatron import Half, Pair, Style, cut_of, register

__all__ = ["Half", "Pair", "Style", "cut_of", "register"]
