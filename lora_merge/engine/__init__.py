"""Merged weights and adapters into vLLM engines. Worker side: plugin, worker, loader, state. Trainer side: sync."""

from .replica import SyncReport
from .sync import VllmSync

__all__ = ["SyncReport", "VllmSync"]
