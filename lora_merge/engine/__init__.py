"""Merged weights and adapters into vLLM engines. Worker side: plugin, worker, loader, state. Trainer side: sync."""

from .sync import SyncReport, VllmSync

__all__ = ["SyncReport", "VllmSync"]
