"""Counts the steps of a worker's model, which shows whether an engine stood still, whoever paused and resumed it; and
has requests that are computed anew forget what they gathered before."""

from __future__ import annotations

from typing import Any

_COUNT = "_lora_merge_steps"


class StepCounter:
    """A model runner's `execute_model` that counts its calls.

    Args:
        runner: the model runner.
        count: one number, kept when another counter takes this one's place.
    """

    def __init__(self, runner: Any, count: list[int]) -> None:
        self.runner, self.execute, self.count = runner, runner.execute_model, count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        scheduled = args[0] if args else kwargs.get("scheduler_output")
        # A step without tokens tells the runner which requests have gone.
        self.count[0] += getattr(scheduled, "total_num_scheduled_tokens", 1) > 0
        _forget_rows(self.runner, getattr(scheduled, "scheduled_cached_reqs", None))
        return self.execute(*args, **kwargs)


def count_steps(runner: Any) -> int:
    """Return how often a model runner has executed its model since the first call of this function."""
    counter = vars(runner).get("execute_model")
    if not isinstance(counter, StepCounter):
        counter = StepCounter(runner, vars(runner).setdefault(_COUNT, [0]))
        runner.execute_model = counter
    return counter.count[0]


def _forget_rows(runner: Any, known: Any) -> None:
    """Drop the rows of pooling requests whose blocks were taken in the middle of their prompt, as each push does.

    vLLM gathers rows chunk by chunk, and keeps them when it computes the prompt anew: those of the old weights came in
    front of all of the new ones. (Read in 0.26 and 0.32; the runner `gpu/model_runner.py` forgets by itself.)

    Args:
        known: what a step says of requests that the runner knows.
    """
    for name in getattr(known, "resumed_req_ids", ()):
        rows = getattr(runner.requests[name], "pooling_states", None) if hasattr(runner, "requests") else None
        if rows is not None:
            rows.clean()
