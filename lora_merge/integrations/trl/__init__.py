"""TRL: the sync of its vLLM engine is a push. One call after the trainer is made, or LORA_MERGE=1."""

from .attach import attach
from .engine import engine_options

__all__ = ["attach", "engine_options"]
