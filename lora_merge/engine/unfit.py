"""The form of the engines' lists of reasons why an engine takes no push.

A reason is a function of what an engine shows of itself. It returns why no push can reach the engine, in words that
follow the engine's name, with what to do; "" where a push can. All reasons are asked before the first byte of a push.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

Reason: TypeAlias = Callable[[Any], str]


def where(applies: Callable[[Any], Any], why: str) -> Reason:
    """Return the reason that gives `why` where a setting applies.

    Args:
        applies: returns whether an engine has the setting.
        why: the reason's words.
    """
    return lambda asked: why if applies(asked) else ""


def first(reasons: Iterable[Reason], asked: Any) -> str:
    """Return the first reason that an engine gives; "" for none."""
    return next((why for reason in reasons if (why := reason(asked))), "")
