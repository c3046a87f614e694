"""Counts the steps of a worker's model, which shows whether an engine stood still, whoever paused and resumed it."""

from __future__ import annotations

from typing import Any

_COUNT = "_lora_merge_steps"


class StepCounter:
    """A model runner's `execute_model` that counts its calls.

    Args:
        execute: the method in whose place it stands.
        count: one number, kept when another counter takes this one's place.
    """

    def __init__(self, execute: Any, count: list[int]) -> None:
        self.execute, self.count = execute, count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        scheduled = args[0] if args else kwargs.get("scheduler_output")
        # A step without tokens tells the runner which requests have gone.
        self.count[0] += getattr(scheduled, "total_num_scheduled_tokens", 1) > 0
        return self.execute(*args, **kwargs)


def count_steps(runner: Any) -> int:
    """Return how often a model runner has executed its model since the first call of this function."""
    counter = vars(runner).get("execute_model")
    if not isinstance(counter, StepCounter):
        counter = StepCounter(runner.execute_model, vars(runner).setdefault(_COUNT, [0]))
        runner.execute_model = counter
    return counter.count[0]
