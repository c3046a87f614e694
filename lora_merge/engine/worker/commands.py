"""What a worker does in a push: begin, receive or read, merge, commit, and end, whatever became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...stream.buckets import Slot, extent, from_json
from ..payload.spec import Update
from ..state import State
from ..transport.liveness import told
from ..transport.routing import Received
from .queries import QUESTIONS
from .rpc import Op, Worker
from .session import Coming, Side


def _start(
    worker: Worker, side: Side, digest: str, state: dict[str, Any], sent: bool, changed: Sequence[str] | None = None
) -> dict[str, Any]:
    """Begin a full push; what a broken one left open is closed. From the answer on the trainer may write to the places.

    Args:
        digest: of an examined table.
        state: that the push brings.
        sent: whether buckets follow; else the trainer writes everything by itself.
        changed: names of the tensors that updates will change, which are merged here onto what this push brings; None
            where none will come.
    """
    side.abort(None)
    side.begin("a push is under way or did not end")
    side.merger = None
    examination, brought = side.loader.examine(digest, side.tables[digest]), State(**state)
    side.loader.begin(examination)
    merger = None if changed is None else side.new_merger(digest, brought.base, frozenset(changed))
    side.coming = Coming(examination, digest, brought, merger)
    if not sent:
        side.came()
    if worker.device.type == "cuda":  # nothing here reads the weights any more
        torch.cuda.synchronize(worker.device)
    return {}


def _receive(
    worker: Worker, side: Side, verify: bool, sent: Sequence[int] | None = None, placed: Sequence[int] = ()
) -> dict[str, Any]:
    """Take the buckets of a full push into the model.

    Args:
        verify: note checksums.
        sent: which buckets come; None for all.
        placed: which of these the trainer writes to their places by itself.
    """
    if side.coming is None:
        raise RuntimeError("a push has to begin before its buckets come")
    examination, table = side.coming.examination, side.tables[side.coming.digest]
    keep = _nothing if side.coming.merger is None else side.coming.merger.keep

    def load(slots: Sequence[Slot], received: Received) -> None:
        if received.placed:
            side.loader.written([slot.name for slot in slots])
        if received.data is None:
            return
        if not received.placed:
            side.loader.load(examination, received.index, slots, received.data, keep)
        if verify:
            side.look(examination, slots, received.data, received.placed and targets is examination.near)

    # Of what is written to layers as they lie no base could be kept.
    targets = examination.near if side.coming.merger is None else examination.targets
    side.take(table, load, verify, targets, sent, placed)
    side.fly()
    side.came()
    return {}


def _pull(
    worker: Worker,
    side: Side,
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
    with side.pulling:
        pulled = side.pulls.get(digest)
        if pulled is None or not side.ready(digest):
            raise RuntimeError("a push has to be offered before it is pulled; push again")
        _start(worker, side, pulled.table, state, True, changed)
        assert side.coming is not None
        said, update = pulled.said, Update(pulled.said, scalings)
        keep = _nothing if side.coming.merger is None else side.coming.merger.keep

        def take(slots: Sequence[Slot], received: Received) -> None:
            assert received.data is not None
            if received.index < said.factors:
                update.data[received.index] = received.data[: extent(slots)].to(side.device, copy=True)
            else:
                side.loader.load(pulled.examination, ("pulled", received.index), slots, received.data, keep)
                if verify:
                    side.look(pulled.examination, slots, received.data)

        side.checksums, side.arrived = {}, {}
        if said.table:
            side.take(said.table, take, verify)
        pulled.merge(update, run)
        side.fly()
    side.came()
    return {}


def _nothing(name: str, tensor: Tensor) -> None:
    """Drop the kept base."""


def _update(
    worker: Worker,
    side: Side,
    digest: str,
    scalings: list[list[float]],
    verify: bool,
    comes: Mapping[str, Mapping[str, Sequence[int]]] | None = None,
) -> dict[str, Any]:
    """Receive an update; nothing of the engine changes before `merge`.

    Args:
        digest: under which it was told.
        scalings: of each adapter of each delta.
        comes: `Route.told` of each worker, by rank; None where every worker gets all buckets.
    """
    if not side.ready(digest):
        raise RuntimeError("this worker does not hold the base that the update belongs to (any more); push again")
    update = Update(side.updates[digest], scalings)
    every = range(len(update.said.table))
    told = {"sent": every, "own": every, "apart": ()} if comes is None else comes[str(worker.rank)]
    own = frozenset(told["own"])

    def keep(slots: Sequence[Slot], received: Received) -> None:
        assert received.data is not None
        if received.index in own:  # another worker of this host takes the others
            # A trainer in this process may be on another device.
            update.data[received.index] = received.data[: extent(slots)].to(side.device, copy=True)

    side.take(update.said.table, keep, verify, sent=told["sent"], apart=told["apart"])
    side.update = update
    return {}


def _merge(worker: Worker, side: Side, state: dict[str, Any]) -> dict[str, Any]:
    """Merge the update that has come."""
    update, side.update = side.update, None
    before = side.state()
    if update is None or side.merger is None or side.merger.base != state["base"]:
        raise RuntimeError(f"an update needs its base, and has to come before it is merged; this engine holds {before}")
    side.begin("an update is being merged")
    try:
        side.merger.merge(update)
    except BaseException as error:
        side.abort(told(error))
        raise
    side.end(State(**state))
    return _settled(worker, side, state, weights=True)


def _adapter(worker: Worker, side: Side, table: Any, rank: int, state: dict[str, Any], verify: bool) -> dict[str, Any]:
    """Receive an adapter and load it in the place of the one before."""
    before = side.state()
    if before.kind not in ("base", "adapter") or before.base != state["base"]:
        raise RuntimeError(f"an adapter needs the base that it was trained on; this engine holds {before}")
    side.begin("an adapter push is under way or did not end")
    tensors: dict[str, Tensor] = {}

    def keep(slots: Sequence[Slot], received: Received) -> None:
        assert received.data is not None
        tensors.update({slot.name: slot.view(received.data).clone() for slot in slots})

    side.take(from_json(table), keep, verify)
    worker.load_adapter(tensors, rank)
    side.end(State(**state))
    return {}


def _commit(worker: Worker, side: Side, full: bool, state: dict[str, Any]) -> dict[str, Any]:
    """End a push; an adapter that does not belong to the weights any more goes.

    Args:
        full: whether it brought weights.
        state: what is held now.
    """
    if full:
        if side.pending is None:
            raise RuntimeError("a push cannot end before all of its buckets came")
        side.loader.finish()
        side.end(side.pending)
    side.land()
    return _settled(worker, side, state, weights=full)


def _settled(worker: Worker, side: Side, state: dict[str, Any], weights: bool) -> dict[str, Any]:
    """What the engine holds after a push; adapters are settled with it.

    Args:
        state: what it has to be.
        weights: whether the push brought weights.
    """
    worker.settle(side, weights)
    held = worker.served(side, side.held)
    if held != State(**state):
        raise RuntimeError(f"the engine holds {held}, not {State(**state)}: push again")
    return {"state": held.to_json(), "elements": side.coverage, "reloaded": side.loader.reloaded}


def _verified(worker: Worker, side: Side) -> dict[str, Any]:
    """Checksums of what came in the last push, and whether what lies in the parameters equals it."""
    return {"checksums": side.checksums, "damaged": [name for name, same in side.arrived.items() if not same]}


def _abort(worker: Worker, side: Side, reason: str | None = None) -> dict[str, Any]:
    """Close what a broken push left open; with a reason, the engine is dirty."""
    side.abort(reason)
    return {}


def _note_pause(worker: Worker, side: Side, paused: bool | None = None, waking: bool | None = None) -> dict[str, Any]:
    """Note that a push has paused generation, or left the KV cache asleep: if it fails, or its trainer dies, the next
    push resumes the engine."""
    side.paused = side.paused if paused is None else paused
    side.waking = side.waking if waking is None else waking
    return {}


def _end(
    worker: Worker, side: Side, owner: str, push: str | None = None, serves: bool = False, **notes: bool
) -> dict[str, Any]:
    """End a push, whatever its outcome; `notes` as in `note_pause`.

    Args:
        owner, push: as of `Claim.end`.
        serves: whether generation goes on with what is held now.
    """
    if side.claim.end(owner, push):
        side.update = None
        _note_pause(worker, side, **notes)
        if serves:
            side.served = side.held.kind
    return {}


def _claimed(worker: Worker, side: Side) -> dict[str, Any]:
    """Say that the engine is in the middle of the trainer's push: what comes behind this in a message is made only
    then. It also tells that the trainer lives."""
    return {}


def _steps(worker: Worker, side: Side) -> dict[str, Any]:
    """Say how often the model has computed something."""
    return {"steps": worker.stepped()}


def _disconnect(worker: Worker, side: Side, sessions: list[str], weights: str) -> dict[str, Any]:
    """Let go of a trainer's buffers, before the trainer frees them.

    Args:
        weights: the trainer whose weights are let go of, too; "" for none.
    """
    if side.receiver is not None and side.receiver.session in sessions:
        side.disconnect()
    if weights and weights == side.puller:
        side.drop_pulls()
    return {}


OPS: dict[str, Op] = {
    **QUESTIONS,
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
