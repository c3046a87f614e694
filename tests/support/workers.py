"""What a worker says of itself, for tests of the trainer's side."""

from __future__ import annotations

from typing import Any

from lora_merge.engine.messages import WorkerInfo
from lora_merge.engine.state import State


def hello(**known: Any) -> dict[str, Any]:
    """Return a whole answer to `hello`, as JSON values."""
    return {
        "host": "here/1", "pid": 7, "device": "cpu", "cumem": "", "rank": 0, "world": 1, "launcher": False,
        "unfit": "", "dtype": "float32", "lora": None, "connector": "", "multimodal": False, "name": "", "tied": False,
        "busy": "", "asleep": 0, "paused": False, "waking": False, "served": "merged", "session": None,
        "state": State().to_json(), "fits": {}, "base": "", "ready": [],
    } | known  # fmt: skip


def worker(**known: Any) -> WorkerInfo:
    """Return the same as a trainer reads it."""
    return WorkerInfo.read(hello(**known))
