"""What tests bring to ms-swift by --external_plugins: a reward, and conversations of several turns."""

from __future__ import annotations

from typing import Any

from swift.rewards import ORM, orms
from swift.rollout import MultiTurnScheduler, multi_turns


class Letters(ORM):
    """The share of letters among the characters of an answer."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [sum(c.isalpha() for c in text) / max(len(text), 1) + 0.01 * len(text) for text in completions]


orms["letters"] = Letters


class Again(MultiTurnScheduler):
    """Asks once more after each answer."""

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        tokens = list(response_choice.token_ids)
        infer_request.messages.append({"role": "user", "content": "again"})
        return {
            "infer_request": infer_request,
            "response_token_ids": tokens,
            "response_loss_mask": [1] * len(tokens),
            "rollout_logprobs": self._extract_logprobs_from_choice(response_choice),
        }


multi_turns["again"] = Again
