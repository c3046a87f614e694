"""lora_merge: add LoRA adapters to base weights where they lie, at copy speed, and get them into a rollout engine."""

from . import restore, verify
from .context import merged
from .delta import Delta
from .engine import SyncReport, VllmSync
from .errors import (
    AlreadyMerged,
    BackendUnavailable,
    InvalidInput,
    LoraMergeError,
    MissingExtra,
    NotRestored,
    PushFailed,
    PushRefused,
    UnsupportedAdapter,
)
from .lora import read_deltas
from .ops import merge, merge_, run_segments, unmerge_
from .plan import Plan
from .segments import Segment
from .weights import MergedWeights

__version__ = "0.1.0"

__all__ = [
    "AlreadyMerged",
    "BackendUnavailable",
    "Delta",
    "InvalidInput",
    "LoraMergeError",
    "MergedWeights",
    "MissingExtra",
    "NotRestored",
    "Plan",
    "PushFailed",
    "PushRefused",
    "Segment",
    "SyncReport",
    "UnsupportedAdapter",
    "VllmSync",
    "merge",
    "merge_",
    "merged",
    "read_deltas",
    "restore",
    "run_segments",
    "unmerge_",
    "verify",
]
