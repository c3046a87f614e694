"""Worker operations that take the engine's own checkpoint for the base, as if it had been pushed."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from ...stream.buckets import metas
from ...stream.samples import difference
from ..state import OWN, WEIGHTS, State
from ..worker import commands
from ..worker.merger import Merger
from ..worker.operations import Operations
from ..worker.session import IncomingPush, WorkerSession
from .loading.checkpoint import Checkpoint, Kept, load_again

OPERATIONS = Operations(commands.OPERATIONS)
"""The operations of a vLLM worker, but for those of kept_adapters.py."""
_KEPT: WeakKeyDictionary[Merger, Kept] = WeakKeyDictionary()
"""The files from which the tensors that a merger keeps are mapped."""


@OPERATIONS.register
def adopt_checkpoint(worker: Any, session: WorkerSession, digest: str, update: str) -> dict[str, Any]:
    """Take the engine's own checkpoint for the base of updates, and keep what one of them needs of it. No weight
    changes.

    Args:
        digest: of the table of the base, which had its dry run.
        update: digest of the update, as for `check_update`.

    Returns:
        `lost`: whether the engine holds something else, so that `reload_checkpoint` has to come first.
    """
    held, merger, spec, table = session.state(), session.merger, session.updates[update], session.tables[digest]
    _check_kept(merger)
    if merger is None or not merger.own or not merger.holds(spec.base):
        if held.kind != "nothing":
            return {"lost": True}
        merger = session.new_merger(digest, OWN)
    checkpoint = _checkpoint(worker, session)
    if wanted := merger.wanted(spec):
        if merger is not session.merger:
            checkpoint.check(session.loader, session.loader.examine(digest, table), table)
        tensors = checkpoint.read({name: meta for name, meta in metas(table).items() if name in wanted})
        _KEPT[merger] = checkpoint.kept()
        merger.adopt(tensors)
    if merger is not session.merger:
        session.adopt(merger)
    return {"lost": False}


@OPERATIONS.register
def compare_checkpoint(worker: Any, session: WorkerSession, samples: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Compare samples of a base with the engine's own checkpoint.

    Args:
        samples: see `samples_of`.

    Returns:
        `differs`: in words, the first tensor that is another one in the checkpoint; "" where all are the same.
    """
    known = session.modules.kept(_compared)
    key = repr(sorted(samples.items()))
    if key not in known:
        checkpoint = _checkpoint(worker, session)
        known[key] = difference(samples, checkpoint.stored(samples.keys()))
    return {"differs": known[key]}


def _compared(*_: Any) -> dict[str, str]:
    """Return what comparisons have found, by what was compared; the checkpoint of an engine stays what it was."""
    return {}


@OPERATIONS.register
def reload_checkpoint(worker: Any, session: WorkerSession, digest: str, update: str, state: dict[str, Any]) -> None:
    """Load the engine's own checkpoint again, like a full push; the engine is dirty from here to `commit`.

    Args:
        digest, update: as for `adopt_checkpoint`.
    """
    session.abort(None)
    report, table = session.loader.examine(digest, session.tables[digest]), session.tables[digest]
    checkpoint = _checkpoint(worker, session)
    tensors = checkpoint.read(metas(table))
    session.begin("its checkpoint is being read again")
    session.loader.begin(report)
    session.incoming = IncomingPush(report, digest, State(**state), merger := session.new_merger(digest, OWN))
    load_again(session.loader, report, table, tensors)
    _KEPT[merger] = checkpoint.kept()  # nothing was written to them while they were read, either
    merger.adopt({name: tensors[name] for name in merger.wanted(session.updates[update])})
    session.note_complete()


@OPERATIONS.register
def unload(worker: Any, session: WorkerSession) -> None:
    """Prepare to take off what was merged onto the engine's own checkpoint; nothing changes before `merge`."""
    held = session.state()
    if session.merger is None or not session.merger.own or held.kind not in WEIGHTS:
        raise RuntimeError(f"this engine holds {held}, and no adapter on its own checkpoint: load one first")
    _check_kept(session.merger)
    session.update = session.merger.nothing()


@OPERATIONS.register
def merge(worker: Any, session: WorkerSession, **message: Any) -> dict[str, Any]:
    """Check the files from which kept tensors are mapped, then merge as `commands.merge` does."""
    _check_kept(session.merger)
    return commands.merge(worker, session, **message)


def _check_kept(merger: Merger | None) -> None:
    """Raise where what is kept to bring the base back has changed."""
    if merger is not None and merger in _KEPT:
        _KEPT[merger].check()


def _checkpoint(worker: Any, session: WorkerSession) -> Checkpoint:
    return Checkpoint(worker.raw.vllm_config.load_config, worker.raw.model_config, session.modules.model)
