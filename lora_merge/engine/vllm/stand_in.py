"""Functions that stand in the place of methods of vLLM's and of trainers', and call these."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def stands_in(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function whose first argument is the method in whose place it stands, before the method's own.

    @stands_in
    def _counted(step, engine, *args): ...

    engine.step = _counted(engine.step)
    """

    def of(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return function(method, *args, **kwargs)

        return stand_in

    return of
