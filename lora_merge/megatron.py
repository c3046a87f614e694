"""What docs/megatron.md names: a Megatron model as its chunks, its adapters' layouts, its names in HF checkpoints."""

from .models.megatron.adapters import Half, Pair, Style, adapters_off, cut_of, register
from .models.megatron.names import bridge_names
from .models.megatron.read import Chunks, read

__all__ = ["Chunks", "Half", "Pair", "Style", "adapters_off", "bridge_names", "cut_of", "read", "register"]
