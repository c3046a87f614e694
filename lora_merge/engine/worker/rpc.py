"""How a worker answers a request: JSON in, JSON out. `operations.py` says what it can be asked; how a request reaches
it, and what is particular to its engine, is in the engine's folder (`Worker`)."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from ..state import State
from ..transport.liveness import error_text, process_id
from .lease import LeaseLost, Stepped
from .operations import Operation
from .session import WorkerSession

_log = logging.getLogger(__name__)


class Worker(Protocol):
    """A worker, as far as it differs from engine to engine."""

    @property
    def rank(self) -> int: ...  # among the workers of its engine

    @property
    def device(self) -> torch.device: ...

    def session(self) -> WorkerSession:
        """Return what is kept here between calls."""

    def stepped(self) -> int:
        """Return how often the model has computed something for requests, counted from the first call on."""

    def working(self, op: str) -> AbstractContextManager[Any]:
        """Return the context in which an operation runs."""

    def about(self, session: WorkerSession) -> dict[str, Any]:
        """Return what the worker says of itself in `hello`.

        Returns:
            `rank`; `world` (workers of the engine); `launcher` (whether each has a handle of its own); `unfit` (why no
            push can reach the engine, in words that follow its name; "" if one can); `dtype` (of its model); `lora`
            (`max_rank` and `dtype` of its adapters; None if it serves none); `connector` (name of what keeps cached
            blocks outside of the engine, too; "" for none); `multimodal` (whether caches of encoders have to be reset);
            `no_adapters` (why it can take none whatever its `lora`; None, or left out, if it can);
            `computing` (how its configuration says that it computes: configs.py). If checkpoints can be quantised,
            `quantised` (a layer that its own checkpoint holds quantised; "" for none). If caches can have scales of a
            checkpoint, `calibrated` (the layers that have, in words; "" for none). If somebody else can load adapters,
            `others` (what these are called). If KV caches can stay over a push, `unkept` (why this engine's cannot; ""
            if it can). If engines can compute their experts together, `shares` (as for `Replica`). If calls of workers
            may bring several calls of the engine in one message, `chains`.
        """

    def served(self, session: WorkerSession, state: State) -> State:
        """Return what the worker holds if its weights are in `state`: an adapter may have been evicted since."""

    def settle(self, session: WorkerSession, weights: bool) -> None:
        """Remove adapters that do not belong to the weights any more; called when a push is over."""

    def unserved(self, modules: Sequence[str]) -> tuple[list[str], str]:
        """Return those modules (HF names) that the worker cannot adapt, and in words that follow them with what setting
        it could; "" for none."""

    def load_adapter(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        """Put an adapter in the place of the one before; scalings are in lora_B."""


_DEVICE_BUSY = frozenset({"commit"})
"""Operations that begin while the device may still be at the work of the one before (`WorkerSession.leave_running`):
what they do on it comes after that, and they wait before they answer."""

_turn = threading.RLock()
"""Held by the call that is under way: several threads may call engines in this process, and the context of such a call
(vLLM's current configuration) is the process's."""


def _renew() -> None:
    """Make a new lock in a forked process, where the thread that held the other does not exist."""
    global _turn
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_renew)


def respond(
    worker: Worker, ops: Mapping[str, Operation], request: str, raised: tuple[type[Exception], ...] = ()
) -> str:
    """Run the operation that a request names.

    Args:
        ops: the operations of this engine, by name.
        request: `{"op": ..., "call": ..., "trainer": ..., "push": ..., "still": ..., "sessions": ..., **arguments}`;
            `trainer` and `push` for a call of a push (`Lease`), `still` if that push has paused the engine, and
            `sessions` if buckets come in it: those of the channels through which they come.
        raised: errors that are no answer.

    Returns:
        `{"rank": ..., "call": ..., "process": ..., **answer}`; `call` is the request's, so that an answer to another
        one shows, and `process` is the same as long as this process lives. An error is the answer `{"error": ...}`,
        with `why` for those that a push has to know: "lost" (`LeaseLost`) and "stepped" (`Stepped`).
    """
    call, rank = None, -1
    try:
        rank = worker.rank
        message = json.loads(request)
        call = message.pop("call", None)
        session = worker.session()
        with _turn:
            reply = session.answered.to(call)
            if reply is None:
                reply = session.answered.keep(call, _reply(rank, call, _answer(worker, session, ops, message, raised)))
        return reply
    except raised:
        raise
    except Exception as error:
        _log.exception("lora_merge")
        return _reply(rank, call, {"error": error_text(error)})


def _answer(
    worker: Worker,
    session: WorkerSession,
    ops: Mapping[str, Operation],
    message: dict[str, Any],
    raised: tuple[type[Exception], ...],
) -> dict[str, Any]:
    """Run the operation of a message, and return its answer, or its error as one."""
    try:
        return _run(worker, session, ops, message)
    except raised:
        raise
    except (LeaseLost, Stepped) as error:
        return {"error": str(error), "why": "lost" if isinstance(error, LeaseLost) else "stepped"}
    except Exception as error:
        _log.exception("lora_merge")
        return {"error": error_text(error)}


def _reply(rank: int, call: Any, answer: Mapping[str, Any]) -> str:
    return json.dumps({"rank": rank, "call": call, "process": process_id(), **answer})


def _run(
    worker: Worker, session: WorkerSession, ops: Mapping[str, Operation], message: dict[str, Any]
) -> dict[str, Any]:
    """Run the operation of a message, and return its answer."""
    op, of_push, still = message.pop("op"), "trainer" in message, message.pop("still", False)
    sessions = message.pop("sessions", None) if of_push else None
    if op not in _DEVICE_BUSY:
        session.wait_for_device()
    with worker.working(op):
        if of_push:  # a call that another push has left behind must not touch what this one brings
            session.lease.check(message.pop("trainer"), message.pop("push", None))
        with nullcontext() if sessions is None else session.transfer(sessions):
            if still:
                session.lease.check_still(worker.stepped())
            answer = ops[op](worker, session, **message) or {}
        if of_push:  # it may have taken long
            session.lease.hear()
    return answer
