"""Merge LoRA adapters into base weights at the speed of a copy, and get the result into a rollout engine.

- `merged(model)`: the base weights hold the adapters for the time of a `with` block, and come back bit for bit.
- `MergedWeights(model)`: the merged checkpoint as a stream of `(name, tensor)`; the model is only read.
- `VllmSync(model, engine).push()`: the merged weights, or the adapter, into running vLLM engines.
- `Publisher(model, url).publish()`: versions of the adapter in a store, which engines follow (`Follower`).
- `merge_`, `merge`, `unmerge_`, `run_segments`, `Plan`: the same on plain tensors.
- `serve`, `verify`, `restore`, `megatron`: adapters from folders, checks, exact restore, Megatron models.

Every error is a `LoraMergeError`.
"""

from . import megatron, restore, serve, verify
from .context import merged
from .engine import SglangSync, SyncReport, VllmSync
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
from .publish.follower import Follower
from .publish.publisher import Published, Publisher
from .saving import Saved, merge_checkpoint, save_merged
from .spans import Span, WeightSpans, weight_spans
from .stream.weights import MergedWeights
from .training import Training, train_merged

__version__ = "0.1.0"

__all__ = [
    "AlreadyMerged",
    "BackendUnavailable",
    "Delta",
    "Follower",
    "InvalidInput",
    "LoraMergeError",
    "MergedWeights",
    "MissingExtra",
    "NotRestored",
    "Plan",
    "Published",
    "Publisher",
    "PushFailed",
    "PushRefused",
    "Saved",
    "Segment",
    "SglangSync",
    "Span",
    "SyncReport",
    "Training",
    "UnsupportedAdapter",
    "VllmSync",
    "WeightSpans",
    "megatron",
    "merge",
    "merge_",
    "merge_checkpoint",
    "merged",
    "read_deltas",
    "restore",
    "run_segments",
    "save_merged",
    "serve",
    "train_merged",
    "unmerge_",
    "verify",
    "weight_spans",
]
