"""lora_merge: add LoRA adapters to base weights where they lie, at copy speed, and get them into a rollout engine."""

from .context import merged
from .delta import Delta
from .errors import (
    AlreadyMerged,
    BackendUnavailable,
    InvalidInput,
    LoraMergeError,
    MissingExtra,
    UnsupportedAdapter,
)
from .lora import read_deltas
from .ops import merge, merge_, run_segments, unmerge_
from .plan import Plan
from .segments import Segment

__version__ = "0.1.0"

__all__ = [
    "AlreadyMerged",
    "BackendUnavailable",
    "Delta",
    "InvalidInput",
    "LoraMergeError",
    "MissingExtra",
    "Plan",
    "Segment",
    "UnsupportedAdapter",
    "merge",
    "merge_",
    "merged",
    "read_deltas",
    "run_segments",
    "unmerge_",
]
