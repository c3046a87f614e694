"""Merged weights and adapters into engines: what all share. `vllm/` and `sglang/` run in these engines' workers, or
call their API."""

from .push.replica import SyncReport
from .sglang.sync import SglangSync
from .vllm.sync import VllmSync

__all__ = ["SglangSync", "SyncReport", "VllmSync"]
