"""How a worker answers a request: JSON in, JSON out. What it can be asked is in questions.py and operations.py; how a
request reaches it, and what is particular to its engine, in the engine's folder (`Worker`)."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from ..state import State
from ..transport.liveness import error_text, process_id
from .lease import LeaseLost, Stepped
from .session import WorkerSession

_log = logging.getLogger(__name__)


class Worker(Protocol):
    """A worker, as far as it differs from engine to engine.

    Attributes:
        rank: among the workers of its engine.
        device: on which its weights are.
    """

    @property
    def rank(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def session(self) -> WorkerSession:
        """What is kept here between calls."""

    def stepped(self) -> int:
        """How often the model has computed something for requests here; from the first question on."""

    def working(self, op: str) -> AbstractContextManager[Any]:
        """What an operation runs in."""

    def about(self, session: WorkerSession) -> dict[str, Any]:
        """What it says of itself in `hello`: `rank`, `world` (workers of the engine), `launcher` (whether each has a
        handle of its own), `unfit` (why no push can reach the engine, in words that follow its name; "" where one can),
        `dtype` (of its model), `lora` (`max_rank` and `dtype` of its adapters, None where it serves none), `connector`
        (what keeps cached blocks outside of the engine, too, by name; "" for nothing) and `multimodal` (whether caches
        of encoders have to be reset); where checkpoints can be quantised also `quantised` (a layer that its own
        checkpoint holds quantised, "" where none is), where caches can have scales of a checkpoint `calibrated` (the
        layers that have, in words, "" where none has), and where engines can compute their experts together `shares`
        (as of `Replica`). And `computing`: how its configuration says that it computes (configs.py)."""

    def served(self, session: WorkerSession, state: State) -> State:
        """What it holds, where the weights are in `state`: an adapter may have gone since."""

    def settle(self, session: WorkerSession, weights: bool) -> None:
        """Called when a push is over: remove adapters that do not belong to the weights any more.

        Args:
            weights: whether it brought weights.
        """

    def unserved(self, modules: Sequence[str]) -> list[str]:
        """Those modules (HF names) that it cannot adapt."""

    def load_adapter(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        """Put an adapter in the place of the one before; scalings are in lora_B."""


Op: TypeAlias = Callable[..., dict[str, Any]]
_FLYING = frozenset({"commit"})
"""Operations that begin while the device is still at what the one before has left under way (`WorkerSession.fly`):
what they do on it comes after that, and they wait before they answer."""

_turn = threading.RLock()
"""Held by the call that is under way in this process: threads call engines that are in it, and what such a call works
in (vLLM's current configuration) is the process's."""


def _renew() -> None:
    """In a process that was forked: the thread that held it is not there."""
    global _turn
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_renew)


def respond(worker: Worker, ops: Mapping[str, Op], request: str, raised: tuple[type[Exception], ...] = ()) -> str:
    """Run the operation that a request names.

    Args:
        ops: the operations of this engine, by name.
        request: `{"op": ..., "call": ..., "trainer": ..., "push": ..., "still": ..., "sessions": ..., **arguments}`;
            `trainer` and `push` where it is a call of one (`Lease`), `still` where that one has paused the engine,
            and `sessions` where buckets come in it: those of the channels through which they come.
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
            answer = _done(worker, session, ops, message)
        return json.dumps({"rank": rank, "call": call, "process": process_id(), **answer})
    except raised:
        raise
    except (LeaseLost, Stepped) as error:
        why = "lost" if isinstance(error, LeaseLost) else "stepped"
        return json.dumps({"rank": rank, "call": call, "process": process_id(), "error": str(error), "why": why})
    except Exception as error:
        _log.exception("lora_merge")
        return json.dumps({"rank": rank, "call": call, "process": process_id(), "error": error_text(error)})


def _done(worker: Worker, session: WorkerSession, ops: Mapping[str, Op], message: dict[str, Any]) -> dict[str, Any]:
    """Run the operation of a message, and return its answer."""
    op, ours, still = message.pop("op"), "trainer" in message, message.pop("still", False)
    sessions = message.pop("sessions", None) if ours else None
    if op not in _FLYING:
        session.land()
    with worker.working(op):
        if ours:  # what another push has left behind must not touch what comes to this one
            session.lease.check(message.pop("trainer"), message.pop("push", None))
        with nullcontext() if sessions is None else session.taking(sessions):
            if still:
                session.lease.check_still(worker.stepped())
            answer = ops[op](worker, session, **message)
        if ours:  # it may have taken long
            session.lease.hear()
    return answer
