"""Options whose values are fixed words: their types, which editors and type checkers know, and the check of a value."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch

from .errors import InvalidInput

Rounding: TypeAlias = Literal["nearest", "stochastic"]
"""How a sum becomes an element of the result: to nearest, ties to even; or drawn, with the unrounded value as mean."""
Strategy: TypeAlias = Literal["unshard"]
"""How a sharded model is merged, where it is not merged as it lies."""
Mode: TypeAlias = Literal["merged", "adapter"]
"""What a push brings to an engine."""
Merge: TypeAlias = Literal["auto", "trainer", "engine"]
"""Who adds the adapters to the base."""
Pause: TypeAlias = Literal["keep", "wait", "abort"]
"""What becomes of requests in flight."""
Cache: TypeAlias = Literal["reset", "keep"]
"""What becomes of the KV cache of requests that go on over a push."""

Lost: TypeAlias = Literal["refuse", "skip"]
"""What a push does about an engine that does not answer, or dies in the middle of it."""
Train: TypeAlias = Literal["adapters", "merged"]
"""What a trainer's forward computes with."""
Tokenizer: TypeAlias = Literal["base", "adapter"]
"""Whose tokenizer goes along with a merged checkpoint."""
DType: TypeAlias = torch.dtype | Literal["bfloat16", "bf16", "float16", "fp16", "float32", "fp32"]
"""dtype of results: bfloat16, float16 or float32, also by its name."""


DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
}


def check_choice(name: str, value: object, known: Any, hint: str = "") -> None:
    """Raise `InvalidInput` unless a value is one of the words of a type above.

        check_choice("pause", pause, Pause)

    Args:
        hint: end of the message.
    """
    words = known.__args__  # not `get_args`, whose frames each launch would pay for
    if value not in words:
        raise InvalidInput(f"{name} must be one of {', '.join(words)}, got {value!r}{hint}")
