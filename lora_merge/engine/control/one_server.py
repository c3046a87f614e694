"""Checks that the engine behind a URL is one process. A load balancer in front of several would spread the calls of a
push over them: one would be paused, another one written to. So every answer has the worker's process, and a push ends
when that changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .base import TIMEOUT_S, Control
from .http import Server, Unfit

HELLO_S = 120
"""Seconds for the answer to `hello`, which waits at most for the step that the engine is computing."""
LOOKS = 8
"""How often a new server is asked for its process: a balancer, in turn or by chance, then shows another one."""


class Another(Unfit):
    """Another process answers than the one before."""


class OneServer(Control):
    """A server that is the same throughout a push. Between pushes, another engine may be started at the same URL."""

    _server: Server
    _process: tuple[str, ...] | None = None

    async def rpc(self, op: str, **message: Any) -> list[dict[str, Any]]:
        if self._process is None:
            await self._meet()  # before any engine is leased
        try:
            return await self._limited(op, **message)
        except Another:
            if op != "hello":
                raise
        self._process = None
        await self._meet()
        return await self._limited(op, **message)

    async def _meet(self) -> None:
        for _ in range(LOOKS):
            await self._limited("hello")

    async def _limited(self, op: str, **message: Any) -> list[dict[str, Any]]:
        self._server.answer_s = HELLO_S if op == "hello" else TIMEOUT_S
        try:
            return await super().rpc(op, **message)
        finally:
            self._server.answer_s = TIMEOUT_S

    def _answers(self, call: str, replies: Sequence[str]) -> list[dict[str, Any]]:
        # Checked first: errors of another engine say nothing about this one.
        answers = [json.loads(reply) for reply in replies]
        here = tuple(sorted(f"{answer.get('rank')}: {answer.get('process')}" for answer in answers))
        before, self._process = self._process or here, self._process or here
        if here != before:
            raise Another(
                f"{self._server.url} is answered by more than one engine (process {_first(before)}, then "
                f"{_first(here)}): is a load balancer or a service in front of replicas, or was the engine started "
                "anew in the middle of a push? Give a list with the URL of each replica, by a way that leads to it "
                "alone"
            )
        return super()._answers(call, replies)


def _first(processes: tuple[str, ...]) -> str:
    return processes[0].partition(": ")[2] if processes else "of no worker"
