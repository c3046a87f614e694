"""Merged weights and adapters into engines: what all share. `vllm/` runs in vLLM's workers, or calls its API."""

from .replica import SyncReport
from .sync import VllmSync

__all__ = ["SyncReport", "VllmSync"]
