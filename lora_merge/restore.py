"""Merging in place and back, bit for bit: `TrackedPlan` (docs/restore.md)."""

from .kernels.tracked.plan import TrackedPlan

__all__ = ["TrackedPlan"]
