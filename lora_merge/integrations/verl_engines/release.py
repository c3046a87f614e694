"""The release of verl that is installed, those that are known, and its switch for merging."""

from __future__ import annotations

from typing import Any

from ..compat import Release

RELEASE = Release("verl", "verl", ("0.9.1",))


def merges(model_config: Any, engine_config: Any) -> bool:
    """Return True if an engine of this configuration is to train an adapter that verl is told to merge."""
    wanted = model_config.lora.get("merge", False) and not engine_config.forward_only
    return bool(wanted and any(ranks(model_config).values()))


def ranks(model_config: Any) -> dict[str, int]:
    """Return the rank by each of verl's settings for it: FSDP engines read the first, Megatron's the second."""
    return {"lora_rank": model_config.lora_rank, "lora.rank": model_config.lora.get("rank", 0) or 0}
