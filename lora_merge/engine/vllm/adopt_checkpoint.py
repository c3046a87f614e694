"""Operations of the worker method for an engine whose base is what it started with, and nobody has pushed one."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from ...stream.buckets import metas
from ..state import OWN, WEIGHTS, State
from ..worker.merger import Merger
from ..worker.rpc import Op
from ..worker.session import Coming, WorkerSession
from .loading.checkpoint import Checkpoint, Kept, load_again

_KEPT: WeakKeyDictionary[Merger, Kept] = WeakKeyDictionary()
"""The files that what a merger keeps is mapped from."""


def _adopt(worker: Any, session: WorkerSession, digest: str, update: str) -> dict[str, Any]:
    """Adopt the engine's own checkpoint as the base of updates, and keep what one of them needs of it; no weight
    changes. Answer `lost` where the base cannot be brought back.

    Args:
        digest: of the examined table of the base.
        update: digest under which the update was told.
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
        session.own(merger)
    return {"lost": False}


def _reload(worker: Any, session: WorkerSession, digest: str, update: str, state: dict[str, Any]) -> dict[str, Any]:
    """Load the engine's own checkpoint again, as a full push would bring it; `commit` ends it.

    Args:
        digest, update: as for `_adopt`.
        state: that it brings.
    """
    session.abort(None)
    report, table = session.loader.examine(digest, session.tables[digest]), session.tables[digest]
    checkpoint = _checkpoint(worker, session)
    tensors = checkpoint.read(metas(table))
    session.begin("its checkpoint is being read again")
    session.loader.begin(report)
    session.coming = Coming(report, digest, State(**state), merger := session.new_merger(digest, OWN))
    load_again(session.loader, report, table, tensors)
    _KEPT[merger] = checkpoint.kept()  # nothing was written to them while they were read, either
    merger.adopt({name: tensors[name] for name in merger.wanted(session.updates[update])})
    session.came()
    return {}


def _unload(worker: Any, session: WorkerSession) -> dict[str, Any]:
    """Prepare to remove what was merged onto the engine's own checkpoint; nothing changes before `merge`."""
    held = session.state()
    if session.merger is None or not session.merger.own or held.kind not in WEIGHTS:
        raise RuntimeError(f"this engine holds {held}, and no adapter on its own checkpoint: load one first")
    _check_kept(session.merger)
    session.update = session.merger.nothing()
    return {}


def checked_before(merge: Op) -> Op:
    """Return the operation `merge`, preceded by a check of the files that the base is restored from."""

    def checked(worker: Any, session: WorkerSession, **message: Any) -> dict[str, Any]:
        _check_kept(session.merger)
        return merge(worker, session, **message)

    return checked


def _check_kept(merger: Merger | None) -> None:
    """Raise `RuntimeError` if files that the base is restored from have changed."""
    if merger is not None and merger in _KEPT:
        _KEPT[merger].check()


def _checkpoint(worker: Any, session: WorkerSession) -> Checkpoint:
    return Checkpoint(worker.raw.vllm_config.load_config, worker.raw.model_config, session.modules.model)


OPS: dict[str, Op] = {
    "adopt_checkpoint": _adopt,
    "reload_checkpoint": _reload,
    "unload": _unload,
}
