"""The registry of worker operations: what the workers of an engine can be asked to do, by name.

An operation that does not change the weights is in `queries.py`, a step of a push in `commands.py`; what one engine has
besides is in its own folder, in a registry that extends theirs:

    OPERATIONS = Operations(commands.OPERATIONS)

    @OPERATIONS.register
    def flush_cache(worker: SglangWorker, session: WorkerSession, hard: bool) -> dict[str, Any]:
        ...

The trainer then calls `await control.rpc("flush_cache", hard=True)`, which runs the function in every worker and
returns their answers in rank order. Arguments and answers are JSON values.

An operation that raises is answered by its error (`rpc.respond`), and the push fails in that engine. What it leaves:

- A query leaves the weights and their state as they were.
- A command that writes first calls `WorkerSession.begin`: the engine is dirty until `commit`, `merge` or
  `receive_adapter` has ended well, also where a worker dies.
- The trainer then calls `abort` and `end` (`push/sequence.py`). If it died, see `session.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

Operation: TypeAlias = Callable[..., dict[str, Any] | None]
"""Returns the answer; None for an empty one."""
_F = TypeVar("_F", bound=Operation)


class Operations(dict[str, Operation]):
    """Operations by name. Each is called with the worker, its session, and the arguments of the message."""

    def register(self, operation: _F) -> _F:
        """Add a function under its own name; a decorator."""
        self[operation.__name__] = operation
        return operation
