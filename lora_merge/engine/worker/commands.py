"""Operations of a push: begin, receive or read, merge, commit, and end, whatever its outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...stream.buckets import Slot, extent, from_json
from ..payload.spec import ReceivedUpdate
from ..state import State
from ..transport.base import Received
from ..transport.liveness import error_text
from . import queries
from .operations import Operations
from .rpc import Worker
from .session import IncomingPush, WorkerSession
from .staging import Staging

OPERATIONS = Operations(queries.OPERATIONS)
"""The operations of every engine."""


@OPERATIONS.register
def begin_full(
    worker: Worker,
    session: WorkerSession,
    digest: str,
    state: dict[str, Any],
    sent: bool,
    changed: Sequence[str] | None = None,
) -> None:
    """Begin a full push, and close what a broken one left open. The engine is dirty from here to `commit`; once this
    has answered, the trainer may write to the engine's tensors.

    Args:
        digest: of a table that had its dry run.
        sent: whether buckets follow; else the trainer writes everything by itself.
        changed: names of the tensors that updates will change, which are merged here onto what this push brings; None
            if there will be no updates.
    """
    session.abort(None)
    session.begin("a push is under way or did not end")
    session.merger = None
    report, brought = session.loader.examine(digest, session.tables[digest]), State(**state)
    session.loader.begin(report)
    merger = None if changed is None else session.new_merger(digest, brought.base, frozenset(changed))
    session.incoming = IncomingPush(report, digest, brought, merger)
    if not sent:
        session.note_complete()
    if worker.device.type == "cuda":  # nothing here reads the weights any more
        torch.cuda.synchronize(worker.device)


@OPERATIONS.register
def receive(
    worker: Worker, session: WorkerSession, verify: bool, sent: Sequence[int] | None = None, placed: Sequence[int] = ()
) -> None:
    """Load the buckets of a full push into the model.

    Args:
        verify: note checksums.
        sent: which buckets come; None for all.
        placed: which of these the trainer writes to the engine's tensors by itself.
    """
    if session.incoming is None:
        raise RuntimeError("a push has to begin before its buckets come")
    report, table = session.incoming.report, session.tables[session.incoming.digest]
    keep = session.incoming.keep

    def load(slots: Sequence[Slot], received: Received) -> None:
        if received.placed:
            session.loader.written([slot.name for slot in slots])
        if received.data is None:
            return
        if not received.placed:
            session.loader.load(report, received.index, slots, received.data, keep)
        if verify:
            session.compare(report, slots, received.data, received.placed and targets is report.near)

    # No base could be kept of layers that are written as they lie.
    targets = report.near if session.incoming.merger is None else report.targets
    session.receive(table, load, verify, targets, sent, placed)
    session.leave_running()
    session.note_complete()


@OPERATIONS.register
def pull(
    worker: Worker,
    session: WorkerSession,
    digest: str,
    state: dict[str, Any],
    changed: Sequence[str] | None,
    scalings: list[list[float]],
    run: Mapping[str, Any],
    verify: bool,
) -> None:
    """Begin a full push, receive the part of it that comes in buckets, and read the rest from the trainer's memory. The
    device may still be reading when this answers; the trainer may write to its weights once the next operation has
    answered.

    Args:
        digest: of `map_source`.
        state, changed: as for `begin_full`.
        scalings: of each adapter of each delta.
        run: arguments of `Plan.run`.
        verify: note checksums of what comes in buckets.
    """
    with session.pull_lock:
        target = session.pulls.get(digest)
        if target is None or not session.ready(digest):
            raise RuntimeError("a push has to be offered before it is pulled; push again")
        begin_full(worker, session, target.table, state, True, changed)
        assert session.incoming is not None
        spec, update = target.spec, ReceivedUpdate(target.spec, scalings)
        keep = session.incoming.keep

        def load(slots: Sequence[Slot], received: Received) -> None:
            assert received.data is not None
            if received.index < spec.factors:
                update.data[received.index] = received.data[: extent(slots)].to(session.device, copy=True)
            else:
                session.loader.load(target.report, ("pulled", received.index), slots, received.data, keep)
                if verify:
                    session.compare(target.report, slots, received.data)

        session.checksums, session.intact = {}, {}
        if spec.table:
            session.receive(spec.table, load, verify)
        target.merge(update, run)
        session.leave_running()
    session.note_complete()


@OPERATIONS.register
def receive_update(
    worker: Worker,
    session: WorkerSession,
    digest: str,
    scalings: list[list[float]],
    verify: bool,
    comes: Mapping[str, Mapping[str, Sequence[int]]] | None = None,
) -> None:
    """Receive an update. Nothing of the engine changes before `merge`.

    Args:
        digest: of `check_update`.
        scalings: of each adapter of each delta.
        comes: `Route.wire_spec` of each worker, by rank; None if every worker gets all buckets.
    """
    session.update = incoming_update(worker, session, digest, scalings, verify, comes)()


@OPERATIONS.register
def stage_update(
    worker: Worker,
    session: WorkerSession,
    digest: str,
    scalings: list[list[float]],
    verify: bool,
    comes: Mapping[str, Mapping[str, Sequence[int]]] | None = None,
) -> None:
    """Begin to receive an update in a thread, while the engine goes on generating.

    Args:
        digest, scalings, comes: as for `receive_update`.
    """
    session.end_staging()
    session.update = None
    session.staging = Staging(session.device, incoming_update(worker, session, digest, scalings, verify, comes))


@OPERATIONS.register
def staged(worker: Worker, session: WorkerSession) -> dict[str, Any]:
    """Return whether the update that is being staged is all here, as `staged`; `merge` may then follow. Raise what its
    thread has raised. All workers are asked until the last one has it."""
    if session.staging is not None:
        update = session.staging.result()
        if update is not None:
            session.staging, session.update = None, update
    elif session.update is None:
        raise RuntimeError("no update is being staged; push again")
    return {"staged": session.update is not None}


def incoming_update(
    worker: Worker,
    session: WorkerSession,
    digest: str,
    scalings: list[list[float]],
    verify: bool,
    comes: Mapping[str, Mapping[str, Sequence[int]]] | None,
) -> Callable[[], ReceivedUpdate]:
    """Return what receives an update, after a check that it can be merged."""
    if not session.ready(digest):
        raise RuntimeError("this worker does not hold the base that the update belongs to (any more); push again")
    update = ReceivedUpdate(session.updates[digest], scalings)
    every = range(len(update.spec.table))
    spec = {"sent": every, "own": every, "apart": ()} if comes is None else comes[str(worker.rank)]
    own = frozenset(spec["own"])

    def keep(slots: Sequence[Slot], received: Received) -> None:
        assert received.data is not None
        if received.index in own:  # another worker of this host takes the others
            # A trainer in this process may be on another device.
            update.data[received.index] = received.data[: extent(slots)].to(session.device, copy=True)

    def receive() -> ReceivedUpdate:
        session.receive(update.spec.table, keep, verify, sent=spec["sent"], apart=spec["apart"])
        return update

    return receive


@OPERATIONS.register
def merge(worker: Worker, session: WorkerSession, state: dict[str, Any]) -> dict[str, Any]:
    """Merge the update that was received. If that fails, the engine is dirty.

    Returns:
        as `commit`.
    """
    update, session.update = session.update, None
    before = session.state()
    if not isinstance(update, ReceivedUpdate) or session.merger is None or session.merger.base != state["base"]:
        raise RuntimeError(f"an update needs its base, and has to come before it is merged; this engine holds {before}")
    session.begin("an update is being merged")
    try:
        session.merger.merge(update)
    except BaseException as error:
        session.abort(error_text(error))
        raise
    session.end(State(**state))
    return _settled(worker, session, state, weights=True)


@OPERATIONS.register
def receive_adapter(
    worker: Worker, session: WorkerSession, table: Any, rank: int, state: dict[str, Any], verify: bool
) -> None:
    """Receive an adapter, and load it in the place of the one before. If that fails, the engine is dirty."""
    before = session.state()
    if before.kind not in ("base", "adapter") or before.base != state["base"]:
        raise RuntimeError(f"an adapter needs the base that it was trained on; this engine holds {before}")
    session.begin("an adapter push is under way or did not end")
    tensors: dict[str, Tensor] = {}

    def keep(slots: Sequence[Slot], received: Received) -> None:
        assert received.data is not None
        tensors.update({slot.name: slot.view(received.data).clone() for slot in slots})

    session.receive(from_json(table), keep, verify)
    worker.load_adapter(tensors, rank)
    session.end(State(**state))


@OPERATIONS.register
def commit(worker: Worker, session: WorkerSession, full: bool, state: dict[str, Any]) -> dict[str, Any]:
    """Record what the engine holds after a push, and remove an adapter that does not belong to the weights any more.

    Args:
        full: whether the push brought weights.
        state: that the engine has to hold now.

    Returns:
        `state`; `elements`, as `coverage`; `reloaded`, how many layers were laid out anew.
    """
    if full:
        if session.uncommitted is None:
            raise RuntimeError("a push cannot end before all of its buckets came")
        session.loader.finish()
        session.end(session.uncommitted)
    session.wait_for_device()
    return _settled(worker, session, state, weights=full)


def _settled(worker: Worker, session: WorkerSession, state: dict[str, Any], weights: bool) -> dict[str, Any]:
    """Settle adapters after a push, and answer as `commit`; raise if the engine does not hold `state`."""
    worker.settle(session, weights)
    held = worker.served(session, session.held)
    if held != State(**state):
        raise RuntimeError(f"the engine holds {held}, not {State(**state)}: push again")
    return {"state": held.to_json(), "elements": session.coverage, "reloaded": session.loader.reloaded}


@OPERATIONS.register
def received_checksums(worker: Worker, session: WorkerSession) -> dict[str, Any]:
    """Return the `checksums` of what came in the last push, and the names whose parameters are `damaged`."""
    return {"checksums": session.checksums, "damaged": [name for name, same in session.intact.items() if not same]}


@OPERATIONS.register
def abort(worker: Worker, session: WorkerSession, reason: str | None = None) -> None:
    """Close what a broken push left open. With a reason, the engine is dirty."""
    session.abort(reason)


@OPERATIONS.register
def note_pause(worker: Worker, session: WorkerSession, paused: bool | None = None, waking: bool | None = None) -> None:
    """Note that a push pauses generation, or wakes the weights of a sleeping engine, so that the next push can resume
    the engine (session.py)."""
    session.paused = session.paused if paused is None else paused
    session.waking = session.waking if waking is None else waking


@OPERATIONS.register
def end(
    worker: Worker, session: WorkerSession, owner: str, push: str | None = None, serves: bool = False, **notes: bool
) -> None:
    """End a push, whatever its outcome, and give its lease back.

    Args:
        owner, push: as for `Lease.end`.
        serves: whether generation goes on with what is held now.
        notes: as for `note_pause`.
    """
    if session.lease.end(owner, push):
        session.update = None
        note_pause(worker, session, **notes)
        if serves:
            session.served, session.served_tenants = session.held.kind, session.held.tenants


@OPERATIONS.register
def renew_lease(worker: Worker, session: WorkerSession) -> None:
    """Renew the trainer's lease. Like every operation of a push, raises `LeaseLost` if the trainer has none; the calls
    behind this one in a message are then not made."""
