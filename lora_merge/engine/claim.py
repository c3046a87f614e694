"""Whose push an engine is in the middle of: of two at the same time only one can win, and the other has to know."""

from __future__ import annotations

import time

from .waiting import alive, host_id

SILENT_S = 60.0
"""Seconds without a call, after which a trainer that cannot be looked up from here counts as dead."""


class Claim:
    """A worker's word to one trainer. It lasts from the first call of a push to the last, or until its trainer dies."""

    def __init__(self) -> None:
        self._owner, self._host, self._pid = "", "", 0
        self._heard = 0.0

    @property
    def owner(self) -> str:
        """Name of the trainer; "" where no push is under way."""
        return self._owner

    def take(self, owner: str, host: str, pid: int) -> str:
        """A push begins.

        Args:
            owner: name of the trainer.
            host, pid: process that makes its control calls.

        Returns:
            who else is in the middle of one, in words; the claim is then not taken.
        """
        if self._owner not in ("", owner) and self._there():
            return f"process {self._pid} on {self._host.partition('/')[0]}"
        self._owner, self._host, self._pid = owner, host, pid
        self._heard = time.monotonic()
        return ""

    def check(self, owner: str) -> None:
        """A call of a push: is it still that one's turn?

        Raises:
            RuntimeError: it is not.
        """
        if owner != self._owner:
            whose = "another" if self._owner else "no"
            raise RuntimeError(
                f"this engine is not in the middle of this trainer's push: {whose} trainer holds it now; push again "
                "when nobody else does"
            )
        self._heard = time.monotonic()

    def end(self, owner: str) -> bool:
        """A push is over. Whether it was this one's turn until now."""
        held = owner == self._owner
        if held:
            self._owner = ""
        return held

    def _there(self) -> bool:
        if self._host == host_id():
            return alive(self._pid)
        return time.monotonic() - self._heard < SILENT_S
