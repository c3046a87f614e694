"""The release of verl that is installed, those that are known, and its switch for merging."""

from __future__ import annotations

from typing import Any

from ..compat import Release

RELEASE = Release("verl", "verl", ("0.9.1",))


def merges(model_config: Any, engine_config: Any) -> bool:
    """Return True if an engine of this configuration trains an adapter that verl is told to merge."""
    lora = model_config.lora
    rank = max(model_config.lora_rank, lora.get("rank", 0) or 0)
    return bool(rank > 0 and lora.get("merge", False) and not engine_config.forward_only)
