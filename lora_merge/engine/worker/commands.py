"""What a worker does in a push: begin, receive or read, merge, commit, and end, whatever became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...stream.buckets import Slot, extent, from_json
from ..payload.spec import ReceivedUpdate
from ..state import State
from ..transport.liveness import error_text
from ..transport.routing import Received
from .queries import QUERIES
from .rpc import Op, Worker
from .session import Coming, WorkerSession


def _start(
    worker: Worker,
    session: WorkerSession,
    digest: str,
    state: dict[str, Any],
    sent: bool,
    changed: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Begin a full push; what a broken one left open is closed. From the answer on the trainer may write to the places.

    Args:
        digest: of an examined table.
        state: that the push brings.
        sent: whether buckets follow; else the trainer writes everything by itself.
        changed: names of the tensors that updates will change, which are merged here onto what this push brings; None
            where none will come.
    """
    session.abort(None)
    session.begin("a push is under way or did not end")
    session.merger = None
    report, brought = session.loader.examine(digest, session.tables[digest]), State(**state)
    session.loader.begin(report)
    merger = None if changed is None else session.new_merger(digest, brought.base, frozenset(changed))
    session.coming = Coming(report, digest, brought, merger)
    if not sent:
        session.came()
    if worker.device.type == "cuda":  # nothing here reads the weights any more
        torch.cuda.synchronize(worker.device)
    return {}


def _receive(
    worker: Worker, session: WorkerSession, verify: bool, sent: Sequence[int] | None = None, placed: Sequence[int] = ()
) -> dict[str, Any]:
    """Take the buckets of a full push into the model.

    Args:
        verify: note checksums.
        sent: which buckets come; None for all.
        placed: which of these the trainer writes to their places by itself.
    """
    if session.coming is None:
        raise RuntimeError("a push has to begin before its buckets come")
    report, table = session.coming.report, session.tables[session.coming.digest]
    keep = _nothing if session.coming.merger is None else session.coming.merger.keep

    def load(slots: Sequence[Slot], received: Received) -> None:
        if received.placed:
            session.loader.written([slot.name for slot in slots])
        if received.data is None:
            return
        if not received.placed:
            session.loader.load(report, received.index, slots, received.data, keep)
        if verify:
            session.look(report, slots, received.data, received.placed and targets is report.near)

    # Of what is written to layers as they lie no base could be kept.
    targets = report.near if session.coming.merger is None else report.targets
    session.take(table, load, verify, targets, sent, placed)
    session.fly()
    session.came()
    return {}


def _pull(
    worker: Worker,
    session: WorkerSession,
    digest: str,
    state: dict[str, Any],
    changed: Sequence[str] | None,
    scalings: list[list[float]],
    run: Mapping[str, Any],
    verify: bool,
) -> dict[str, Any]:
    """Begin a full push, take what comes of it in buckets, and read the rest where the trainer has it: the device is
    still at that when this answers, and the trainer may write to its weights when the next operation has.

    Args:
        digest: under which it was offered.
        state, changed: as of `_start`.
        scalings: of each adapter of each delta.
        run: arguments of `Plan.run`.
        verify: note checksums of what comes in buckets.
    """
    with session.pulling:
        target = session.pulls.get(digest)
        if target is None or not session.ready(digest):
            raise RuntimeError("a push has to be offered before it is pulled; push again")
        _start(worker, session, target.table, state, True, changed)
        assert session.coming is not None
        spec, update = target.spec, ReceivedUpdate(target.spec, scalings)
        keep = _nothing if session.coming.merger is None else session.coming.merger.keep

        def take(slots: Sequence[Slot], received: Received) -> None:
            assert received.data is not None
            if received.index < spec.factors:
                update.data[received.index] = received.data[: extent(slots)].to(session.device, copy=True)
            else:
                session.loader.load(target.report, ("pulled", received.index), slots, received.data, keep)
                if verify:
                    session.look(target.report, slots, received.data)

        session.checksums, session.arrived = {}, {}
        if spec.table:
            session.take(spec.table, take, verify)
        target.merge(update, run)
        session.fly()
    session.came()
    return {}


def _nothing(name: str, tensor: Tensor) -> None:
    """Drop the kept base."""


def _update(
    worker: Worker,
    session: WorkerSession,
    digest: str,
    scalings: list[list[float]],
    verify: bool,
    comes: Mapping[str, Mapping[str, Sequence[int]]] | None = None,
) -> dict[str, Any]:
    """Receive an update; nothing of the engine changes before `merge`.

    Args:
        digest: under which it was told.
        scalings: of each adapter of each delta.
        comes: `Route.wire_spec` of each worker, by rank; None where every worker gets all buckets.
    """
    if not session.ready(digest):
        raise RuntimeError("this worker does not hold the base that the update belongs to (any more); push again")
    update = ReceivedUpdate(session.updates[digest], scalings)
    every = range(len(update.spec.table))
    told = {"sent": every, "own": every, "apart": ()} if comes is None else comes[str(worker.rank)]
    own = frozenset(told["own"])

    def keep(slots: Sequence[Slot], received: Received) -> None:
        assert received.data is not None
        if received.index in own:  # another worker of this host takes the others
            # A trainer in this process may be on another device.
            update.data[received.index] = received.data[: extent(slots)].to(session.device, copy=True)

    session.take(update.spec.table, keep, verify, sent=told["sent"], apart=told["apart"])
    session.update = update
    return {}


def _merge(worker: Worker, session: WorkerSession, state: dict[str, Any]) -> dict[str, Any]:
    """Merge the update that has come."""
    update, session.update = session.update, None
    before = session.state()
    if update is None or session.merger is None or session.merger.base != state["base"]:
        raise RuntimeError(f"an update needs its base, and has to come before it is merged; this engine holds {before}")
    session.begin("an update is being merged")
    try:
        session.merger.merge(update)
    except BaseException as error:
        session.abort(error_text(error))
        raise
    session.end(State(**state))
    return _settled(worker, session, state, weights=True)


def _adapter(
    worker: Worker, session: WorkerSession, table: Any, rank: int, state: dict[str, Any], verify: bool
) -> dict[str, Any]:
    """Receive an adapter and load it in the place of the one before."""
    before = session.state()
    if before.kind not in ("base", "adapter") or before.base != state["base"]:
        raise RuntimeError(f"an adapter needs the base that it was trained on; this engine holds {before}")
    session.begin("an adapter push is under way or did not end")
    tensors: dict[str, Tensor] = {}

    def keep(slots: Sequence[Slot], received: Received) -> None:
        assert received.data is not None
        tensors.update({slot.name: slot.view(received.data).clone() for slot in slots})

    session.take(from_json(table), keep, verify)
    worker.load_adapter(tensors, rank)
    session.end(State(**state))
    return {}


def _commit(worker: Worker, session: WorkerSession, full: bool, state: dict[str, Any]) -> dict[str, Any]:
    """End a push; an adapter that does not belong to the weights any more goes.

    Args:
        full: whether it brought weights.
        state: what is held now.
    """
    if full:
        if session.pending is None:
            raise RuntimeError("a push cannot end before all of its buckets came")
        session.loader.finish()
        session.end(session.pending)
    session.land()
    return _settled(worker, session, state, weights=full)


def _settled(worker: Worker, session: WorkerSession, state: dict[str, Any], weights: bool) -> dict[str, Any]:
    """What the engine holds after a push; adapters are settled with it.

    Args:
        state: what it has to be.
        weights: whether the push brought weights.
    """
    worker.settle(session, weights)
    held = worker.served(session, session.held)
    if held != State(**state):
        raise RuntimeError(f"the engine holds {held}, not {State(**state)}: push again")
    return {"state": held.to_json(), "elements": session.coverage, "reloaded": session.loader.reloaded}


def _verified(worker: Worker, session: WorkerSession) -> dict[str, Any]:
    """Checksums of what came in the last push, and whether what lies in the parameters equals it."""
    return {"checksums": session.checksums, "damaged": [name for name, same in session.arrived.items() if not same]}


def _abort(worker: Worker, session: WorkerSession, reason: str | None = None) -> dict[str, Any]:
    """Close what a broken push left open; with a reason, the engine is dirty."""
    session.abort(reason)
    return {}


def _note_pause(
    worker: Worker, session: WorkerSession, paused: bool | None = None, waking: bool | None = None
) -> dict[str, Any]:
    """Note that a push has paused generation, or left the KV cache asleep: if it fails, or its trainer dies, the next
    push resumes the engine."""
    session.paused = session.paused if paused is None else paused
    session.waking = session.waking if waking is None else waking
    return {}


def _end(
    worker: Worker, session: WorkerSession, owner: str, push: str | None = None, serves: bool = False, **notes: bool
) -> dict[str, Any]:
    """End a push, whatever its outcome; `notes` as in `note_pause`.

    Args:
        owner, push: as of `Lease.end`.
        serves: whether generation goes on with what is held now.
    """
    if session.lease.end(owner, push):
        session.update = None
        _note_pause(worker, session, **notes)
        if serves:
            session.served = session.held.kind
    return {}


def _claimed(worker: Worker, session: WorkerSession) -> dict[str, Any]:
    """Say that the engine is in the middle of the trainer's push: what comes behind this in a message is made only
    then. It also tells that the trainer lives."""
    return {}


def _steps(worker: Worker, session: WorkerSession) -> dict[str, Any]:
    """Say how often the model has computed something."""
    return {"steps": worker.stepped()}


def _disconnect(worker: Worker, session: WorkerSession, sessions: list[str], weights: str) -> dict[str, Any]:
    """Let go of a trainer's buffers, before the trainer frees them.

    Args:
        weights: the trainer whose weights are let go of, too; "" for none.
    """
    if session.receiver is not None and session.receiver.session in sessions:
        session.disconnect()
    if weights and weights == session.puller:
        session.drop_pulls()
    return {}


OPERATIONS: dict[str, Op] = {
    **QUERIES,
    "start": _start,
    "receive": _receive,
    "pull": _pull,
    "update": _update,
    "merge": _merge,
    "adapter": _adapter,
    "commit": _commit,
    "verified": _verified,
    "abort": _abort,
    "note_pause": _note_pause,
    "end": _end,
    "claimed": _claimed,
    "steps": _steps,
    "disconnect": _disconnect,
}
