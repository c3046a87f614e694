"""What tests bring to ms-swift by --external_plugins: a reward."""

from __future__ import annotations

from typing import Any

from swift.rewards import ORM, orms


class Letters(ORM):
    """The share of letters among the characters of an answer."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [sum(c.isalpha() for c in text) / max(len(text), 1) + 0.01 * len(text) for text in completions]


orms["letters"] = Letters
