"""Which trainer's push an engine is in the middle of; a second trainer is told, and refused. And whether the engine has
stood still since that push paused it."""

from __future__ import annotations

import time
from collections.abc import Collection

from ..lease import SILENT_S
from ..transport.liveness import alive, host_id


class LeaseLost(RuntimeError):
    """A trainer asks for something in an engine that is not in the middle of its push (any more)."""


class Stepped(RuntimeError):
    """An engine has generated in the middle of a push that had paused it."""


class Lease:
    """A worker's reservation for one trainer, from the first call of a push to the last, or until that trainer dies.

    Attributes:
        owner: name of the trainer; "" where no push is under way.
    """

    def __init__(self) -> None:
        self.owner, self._host, self._pid, self._born, self._push = "", "", 0, 0, ""
        self._heard, self._at = 0.0, 0
        self._steps: int | None = None

    def take(
        self, owner: str, host: str, pid: int, push: str = "", born: int = 0, at: int = 0, living: Collection[str] = ()
    ) -> str:
        """Take the lease for a push that begins.

        Args:
            owner: name of the trainer.
            host, pid: process that makes its control calls.
            push: name of the push; calls that an earlier one has left behind are refused from here on.
            born: when that process began.
            at, living: when that process wrote this, and which of its trainers were in a push then; older than what
                another of its trainers wrote, it says nothing about that one.

        Returns:
            who else is in the middle of a push, in words; the lease is then not taken. "" if it is.
        """
        same = (host, pid, born) == (self._host, self._pid, self._born)
        over = same and at > self._at and self.owner not in living  # its end was never heard here
        if self.owner not in ("", owner) and not over and self._owner_lives():
            return f"process {self._pid} on {self._host.partition('/')[0]}"
        self.owner, self._host, self._pid, self._born, self._push = owner, host, pid, born, push
        self._at, self._steps = at, None
        self.hear()
        return ""

    def check(self, owner: str, push: str | None = None) -> None:
        """Raise `LeaseLost` unless this trainer has the lease, for this push or, with None, for any. Every call of a
        push checks that."""
        if owner == self.owner and push not in (None, self._push):
            raise LeaseLost("this call was left behind by a push that was broken off; another one has begun")
        if owner != self.owner:
            whose = "another" if self.owner else "no"
            raise LeaseLost(
                f"this engine is not in the middle of this trainer's push: {whose} trainer holds it now; push again "
                "when nobody else does"
            )
        self.hear()

    def hear(self) -> None:
        """Note that the trainer lives."""
        self._heard = time.monotonic()

    def check_still(self, steps: int) -> None:
        """Raise `Stepped` if the engine has generated since the push first checked, when it had just paused the engine.
        `steps` says how many steps it has made until now."""
        if self._steps is None:
            self._steps = steps
        if steps != self._steps:
            raise Stepped(
                "the engine has generated in the middle of this push, which had paused it: somebody has resumed it (a "
                "rollout's own controller?). What it answered meanwhile comes from weights that are neither the old "
                "ones nor the new ones. Resume it when the push has ended, or leave that to the push"
            )

    def end(self, owner: str, push: str | None = None) -> bool:
        """Give the lease back; return whether the trainer had it, for this push or, with None, for any."""
        held = owner == self.owner and push in (None, self._push)
        if held:
            self.owner = ""
        return held

    def _owner_lives(self) -> bool:
        if self._host == host_id():
            return alive(self._pid, self._born)
        return time.monotonic() - self._heard < SILENT_S
