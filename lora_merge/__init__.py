"""lora_merge: add LoRA adapters to base weights where they lie, at copy speed, and get them into a rollout engine."""

from . import megatron, restore, serve, verify
from .context import merged
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
from .kernels.ops import merge, merge_, run_segments, unmerge_
from .kernels.plan import Plan
from .kernels.segments import Segment
from .models.delta import Delta
from .models.peft.read import read_deltas
from .stream.weights import MergedWeights

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
    "megatron",
    "merge",
    "merge_",
    "merged",
    "read_deltas",
    "restore",
    "run_segments",
    "serve",
    "unmerge_",
    "verify",
]
