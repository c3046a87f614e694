"""Penalties of requests that a push has sent back to the queue.

SGLang counts an answer's tokens as they come, for its penalties (frequency, presence, repetition) and `min_new_tokens`.
When a request begins anew it counts from nothing: tokens from before the push would be penalised no more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def count_again(original: Any, orchestrator: Any, *args: Any, **kwargs: Any) -> None:
    """Make the penalties of a batch, then count the tokens that its requests have said before, as SGLang did.

    Args:
        original, args, kwargs: `BatchedPenalizerOrchestrator.__init__` and its arguments.
    """
    original(orchestrator, *args, **kwargs)
    if not orchestrator.is_required:
        return
    said = [_counted(request, orchestrator.batch.enable_overlap) for request in orchestrator.reqs()]
    longest_first = sorted(range(len(said)), key=lambda row: len(said[row]), reverse=True)
    lengths = [len(said[row]) for row in longest_first]
    if not lengths[0]:
        return
    counts = [torch.tensor(said[row], dtype=torch.int64) for row in longest_first]
    tokens = torch.nn.utils.rnn.pad_sequence(counts, batch_first=True).to(orchestrator.device)
    order = torch.tensor(longest_first, device=orchestrator.device)
    for penalizer in orchestrator.penalizers.values():
        # All that is counted has a row for each request. Each step counts into the rows of those that go on.
        rows = {name: value[order] for name, value in vars(penalizer).items() if isinstance(value, Tensor)}
        for step in range(lengths[0]):
            going_on = sum(length > step for length in lengths)
            vars(penalizer).update({name: value[:going_on] for name, value in rows.items()})
            penalizer.cumulate_output_tokens(tokens[:going_on, step])
        back = order.argsort()
        vars(penalizer).update({name: value[back] for name, value in rows.items()})


def _counted(request: Any, overlap: bool) -> list[int]:
    """Return the tokens that SGLang had counted, or would have by now, if the request had not begun anew. With overlap
    it counts at each step the one before the last, and at the first step the end of the prompt."""
    said = list(request.output_ids)
    return [*request.origin_input_ids[-1:], *said][: len(said)] if overlap else said
