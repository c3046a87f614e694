"""Operations that workers run during a push: JSON in, JSON out. How a request reaches a worker, and what is particular
to its engine, is in the engine's folder (`Worker`)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from ..stream.buckets import Slot, extent, from_json
from .loader import Examination
from .merger import problems
from .products import Described, Update
from .pulled import Pulled
from .side import Coming, Side
from .state import State
from .transport import Received, introduction
from .waiting import told

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

    def side(self) -> Side:
        """What is kept here between calls."""

    def working(self, op: str) -> AbstractContextManager[Any]:
        """What an operation runs in."""

    def about(self, side: Side) -> dict[str, Any]:
        """What it says of itself in `hello`: `rank`, `world` (workers of the engine), `launcher` (whether each has a
        handle of its own), `unfit` (why no push can reach the engine, in words that follow its name; "" where one can),
        `dtype` (of its model), `lora` (`max_rank` and `dtype` of its adapters, None where it serves none), `connector`
        (whether cached blocks lie outside of the engine, too) and `multimodal`; where checkpoints can be quantised also
        `quantised` (a layer that its own checkpoint holds quantised, "" where none is), where caches can have
        scales of a checkpoint `calibrated` (the layers that have, in words, "" where none has), and where engines can
        compute their experts together `shares` (as of `Replica`)."""

    def served(self, side: Side, state: State) -> State:
        """What it holds, where the weights are in `state`: an adapter may have gone since."""

    def settle(self, side: Side, weights: bool) -> None:
        """Called when a push is over: remove adapters that do not belong to the weights any more.

        Args:
            weights: whether it brought weights.
        """

    def unserved(self, modules: Sequence[str]) -> list[str]:
        """Those modules (HF names) that it cannot adapt."""

    def load_adapter(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        """Put an adapter in the place of the one before; scalings are in lora_B."""


Op: TypeAlias = Callable[..., dict[str, Any]]


def respond(worker: Worker, ops: Mapping[str, Op], request: str, raised: tuple[type[Exception], ...] = ()) -> str:
    """Run the operation that a request names.

    Args:
        ops: the operations of this engine, by name.
        request: `{"op": ..., "call": ..., "trainer": ..., "sessions": ..., **arguments}`; `trainer` where it is a call
            of a push, and `sessions` where buckets come in it: those of the channels through which they come.
        raised: errors that are no answer.

    Returns:
        `{"rank": ..., "call": ..., **answer}`; `call` is the request's, so that an answer to another one shows. An
        error is the answer `{"error": ...}`.
    """
    call, rank = None, -1
    try:
        rank = worker.rank
        message = json.loads(request)
        call = message.pop("call", None)
        side = worker.side()
        side.land()
        op, sessions = message.pop("op"), message.pop("sessions", None) if "trainer" in message else None
        with worker.working(op), nullcontext() if sessions is None else side.taking(sessions):
            if "trainer" in message:
                side.claim.check(message.pop("trainer"))
            answer = ops[op](worker, side, **message)
        return json.dumps({"rank": rank, "call": call, **answer})
    except raised:
        raise
    except Exception as error:
        _log.exception("lora_merge")
        return json.dumps({"rank": rank, "call": call, "error": told(error)})


# ---- before a push ---------------------------------------------------------------------------------------------------


def _hello(
    worker: Worker,
    side: Side,
    claim: Mapping[str, Any] | None = None,
    streams: Sequence[str] = (),
    updates: Sequence[str] = (),
) -> dict[str, Any]:
    """Say what this worker is, what it holds and what it can serve. With a claim, a push begins, which `end` ends.

    Args:
        streams: digests of tables: what `examine` says of them in brief, where they are known here.
        updates: digests of updates: which of them can be merged onto what lies here.
    """
    with side.modules.still():
        return {
            **introduction(worker.device),
            **worker.about(side),
            "tied": side.loader.ties,
            "busy": "" if claim is None else side.claim.take(**claim),
            "asleep": side.asleep(),
            "paused": side.paused,
            "served": side.served,
            "waking": side.waking,
            "session": None if side.receiver is None or side.receiver.over else side.receiver.session,
            "state": worker.served(side, side.state()).to_json(),
            "fits": _fits(side, streams),
            "base": "" if side.merger is None else side.merger.base,
            "ready": [digest for digest in updates if side.ready(digest)],
        }


def _fits(side: Side, streams: Sequence[str]) -> dict[str, dict[str, str]]:
    """What is known of streams; nothing of one that cannot be looked at now (`examine` says why)."""
    fits = {}
    with suppress(Exception):
        for digest in () if side.asleep() else side.tables.keys() & set(streams):
            side.keep_table(digest)
            fits[digest] = _brief(side, digest)
    return fits


def _brief(side: Side, digest: str) -> dict[str, str]:
    """Summarise what was found in a table, by digest, and where the engine has what it fills."""
    found = side.loader.examine(digest, side.tables[digest])
    return {"same": found.digest, "at": found.exports.digest}


def _examine(worker: Worker, side: Side, digest: str, table: Any = None, known: Sequence[str] = ()) -> dict[str, Any]:
    """Dry run of a table; without one, of the table that was sent before under this digest.

    Args:
        known: digests of findings that the trainer has: these are not sent again.
    """
    if table is not None:
        side.keep_table(digest, from_json(table))
    if digest not in side.tables:
        return {"unknown": True}
    brief = _brief(side, digest)
    found: Examination = side.loader.examine(digest, side.tables[digest])
    if found.digest in known:
        return brief
    return {
        **brief,
        "refused": found.refused,
        "ignored": found.ignored,
        "absent": found.absent,
        "missing": found.missing,
        "partial": found.partial,
        "dtypes": found.dtypes,
        "elements": found.elements,
        "straight": len(found.copies),
        "reloaded": len(found.staged),
    }


def _examine_update(worker: Worker, side: Side, digest: str, base: str, said: Any = None) -> dict[str, Any]:
    """Whether updates like this one can be merged here.

    Args:
        digest: of `said`.
        base: digest of the table of the base, which was examined.
        said: `Update.said`; without it, what was told before under this digest.
    """
    if said is not None:
        side.keep_update(digest, Described.read(said))
    if digest not in side.updates:
        return {"unknown": True}
    found = side.loader.examine(base, side.tables[base])
    return {"problems": problems(side.updates[digest], found), "ready": side.ready(digest)}


def _exports(worker: Worker, side: Side, digest: str) -> dict[str, Any]:
    """How a trainer in another process of this host maps what an examined table fills."""
    return side.loader.examine(digest, side.tables[digest]).exports.description


def _blocked(worker: Worker, side: Side, digest: str) -> dict[str, Any]:
    """Names of the tensors of an examined table that are more here than boxes of parameters in their dtype."""
    found = side.loader.examine(digest, side.tables[digest])
    return {"blocked": sorted(found.staged.union(found.copies).difference(found.places.views))}


def _offer(
    worker: Worker,
    side: Side,
    digest: str,
    update: str,
    table: str,
    sources: Sequence[Mapping[str, Any]],
    said: Any = None,
) -> dict[str, Any]:
    """Map what a trainer exports, to be pulled from. What was mapped before is let go of first: memory that lies at the
    same address since may have the same handle.

    Args:
        digest: of all of this.
        update: digest of `said`.
        table: digest of the table of the stream, which was examined.
        sources: what each rank exports, as of `Pulled`.
        said: as of `_examine_update`.
    """
    if said is not None:
        side.keep_update(update, Described.read(said))
    if update not in side.updates:
        return {"unknown": True}
    if side.ready(digest):
        return {"why": ""}
    side.drop_pulls()
    examination, here = side.loader.examine(table, side.tables[table]), introduction(worker.device)
    try:
        pulled = Pulled(side.updates[update], table, examination, sources, here, worker.device)
    except (RuntimeError, OSError) as error:
        return {"why": f"the trainer's memory cannot be mapped there: {told(error)}"}
    side.keep_pull(digest, pulled)
    return {"why": ""}


def _let_go(worker: Worker, side: Side) -> dict[str, Any]:
    """Unmap the memory that a trainer exports."""
    side.drop_pulls()
    return {}


def _adapter_modules(worker: Worker, side: Side, modules: list[str]) -> dict[str, Any]:
    """Modules that this engine cannot adapt."""
    return {"unserved": worker.unserved(modules)}


def _connect(worker: Worker, side: Side, channels: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Open this worker's channel to a trainer.

    Args:
        channels: for each worker of the engine its `Sender.channel`, by rank.
    """
    side.connect(channels[str(worker.rank)])
    return {}


# ---- a push ----------------------------------------------------------------------------------------------------------


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
            side.look(examination, slots, received.data, received.placed and places is examination.near)

    # Of what is written to layers as they lie no base could be kept.
    places = examination.near if side.coming.merger is None else examination.places
    side.take(table, load, verify, places, sent, placed)
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


# ---- around it -------------------------------------------------------------------------------------------------------


def _coverage(worker: Worker, side: Side) -> dict[str, Any]:
    """Elements that the last full push wrote, and elements there are."""
    return {"elements": side.coverage, "state": side.state().to_json()}


def _note_pause(worker: Worker, side: Side, paused: bool | None = None, waking: bool | None = None) -> dict[str, Any]:
    """Note that a push has paused generation, or left the KV cache asleep: if it fails, or its trainer dies, the next
    push resumes the engine."""
    side.paused = side.paused if paused is None else paused
    side.waking = side.waking if waking is None else waking
    return {}


def _end(worker: Worker, side: Side, owner: str, serves: bool = False, **notes: bool) -> dict[str, Any]:
    """End a push, whatever its outcome; `notes` as in `note_pause`.

    Args:
        serves: whether generation goes on with what is held now.
    """
    if side.claim.end(owner):
        side.update = None
        _note_pause(worker, side, **notes)
        if serves:
            side.served = side.held.kind
    return {}


def _disconnect(worker: Worker, side: Side, sessions: list[str], weights: bool) -> dict[str, Any]:
    """Let go of a trainer's buffers, before the trainer frees them.

    Args:
        weights: and of its weights.
    """
    if side.receiver is not None and side.receiver.session in sessions:
        side.disconnect()
        if weights:
            side.drop_pulls()
    return {}


OPS: dict[str, Op] = {
    "hello": _hello,
    "examine": _examine,
    "examine_update": _examine_update,
    "exports": _exports,
    "blocked": _blocked,
    "offer": _offer,
    "let_go": _let_go,
    "adapter_modules": _adapter_modules,
    "connect": _connect,
    "start": _start,
    "receive": _receive,
    "pull": _pull,
    "update": _update,
    "merge": _merge,
    "adapter": _adapter,
    "commit": _commit,
    "verified": _verified,
    "abort": _abort,
    "coverage": _coverage,
    "note_pause": _note_pause,
    "end": _end,
    "disconnect": _disconnect,
}
