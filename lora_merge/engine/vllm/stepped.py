"""How often a worker's model has computed something: whether an engine stood still, however it was paused and resumed,
and whoever is asked."""

from __future__ import annotations

from typing import Any

_COUNT = "_lora_merge_steps"


class Counted:
    """A model runner's `execute_model`, which counts.

    Args:
        execute: what it was.
        count: one number, kept where this is made anew.
    """

    def __init__(self, execute: Any, count: list[int]) -> None:
        self.execute, self.count = execute, count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        scheduled = args[0] if args else kwargs.get("scheduler_output")
        # A step without tokens tells the runner which requests have gone.
        self.count[0] += getattr(scheduled, "total_num_scheduled_tokens", 1) > 0
        return self.execute(*args, **kwargs)


def stepped(runner: Any) -> int:
    """How often a model runner has executed its model since this was first asked."""
    counted = vars(runner).get("execute_model")
    if not isinstance(counted, Counted):
        counted = Counted(runner.execute_model, vars(runner).setdefault(_COUNT, [0]))
        runner.execute_model = counted
    return counted.count[0]
