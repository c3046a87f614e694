"""Which trainer's push an engine is in the middle of; a second trainer is told, and refused."""

from __future__ import annotations

import time

from .waiting import alive, host_id

SILENT_S = 60.0
"""Seconds without a call, after which a trainer that cannot be looked up from here counts as dead."""


class Claim:
    """A worker's reservation for one trainer, from the first call of a push to the last, or until that trainer dies."""

    def __init__(self) -> None:
        self._owner, self._host, self._pid, self._push = "", "", 0, ""
        self._heard = 0.0

    @property
    def owner(self) -> str:
        """Name of the trainer; "" where no push is under way."""
        return self._owner

    def take(self, owner: str, host: str, pid: int, push: str = "") -> str:
        """Claim the engine for a push that begins.

        Args:
            owner: name of the trainer.
            host, pid: process that makes its control calls.
            push: which one of its pushes begins: calls that one before has left behind are refused from here on.

        Returns:
            who else is in the middle of one, in words; the claim is then not taken.
        """
        if self._owner not in ("", owner) and self._there():
            return f"process {self._pid} on {self._host.partition('/')[0]}"
        self._owner, self._host, self._pid, self._push = owner, host, pid, push
        self._heard = time.monotonic()
        return ""

    def check(self, owner: str, push: str | None = None) -> None:
        """Raise unless this trainer has the claim; every call of a push asks.

        Args:
            push: of which the call is; None for any of the trainer's.

        Raises:
            RuntimeError: it has not, or another of its pushes has begun.
        """
        if owner == self._owner and push not in (None, self._push):
            raise RuntimeError("this call was left behind by a push that was broken off; another one has begun")
        if owner != self._owner:
            whose = "another" if self._owner else "no"
            raise RuntimeError(
                f"this engine is not in the middle of this trainer's push: {whose} trainer holds it now; push again "
                "when nobody else does"
            )
        self._heard = time.monotonic()

    def end(self, owner: str, push: str | None = None) -> bool:
        """End a push, as of `check`; returns whether the trainer had the claim for it until now."""
        held = owner == self._owner and push in (None, self._push)
        if held:
            self._owner = ""
        return held

    def _there(self) -> bool:
        if self._host == host_id():
            return alive(self._pid)
        return time.monotonic() - self._heard < SILENT_S
