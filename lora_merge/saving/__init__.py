"""Merged checkpoints on disk: out of a base and adapters that lie there, or out of a live model."""

from .live import save_merged
from .merge import Saved, merge_checkpoint

__all__ = ["Saved", "merge_checkpoint", "save_merged"]
