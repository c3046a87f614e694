"""What a worker does where the base is what its engine started with, and nobody has pushed one: operations of the
worker method, as in operations.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from ...stream.buckets import metas
from ..state import OWN, WEIGHTS, State
from ..worker import commands as operations
from ..worker.merger import Merger
from ..worker.session import Coming, WorkerSession
from .loading.checkpoint import Checkpoint, Kept, load_again

_KEPT: WeakKeyDictionary[Merger, Kept] = WeakKeyDictionary()
"""The files that what a merger keeps is mapped from."""


def _adopt(worker: Any, session: WorkerSession, digest: str, update: str) -> dict[str, Any]:
    """Take the engine's own checkpoint for the base of updates, and keep what one of them needs of it. No weight
    changes. Where the base cannot be brought back that was there, says so.

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
        digest, update: as of `own`.
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
    """Prepare to take off what was merged onto the engine's own checkpoint; nothing changes before `merge`."""
    held = session.state()
    if session.merger is None or not session.merger.own or held.kind not in WEIGHTS:
        raise RuntimeError(f"this engine holds {held}, and no adapter on its own checkpoint: load one first")
    _check_kept(session.merger)
    session.update = session.merger.nothing()
    return {}


def _merge(worker: Any, session: WorkerSession, **message: Any) -> dict[str, Any]:
    """As of operations.py; but what is kept for it may lie in files."""
    _check_kept(session.merger)
    return operations.OPERATIONS["merge"](worker, session, **message)


def _check_kept(merger: Merger | None) -> None:
    """Raise where what is kept to bring the base back has changed."""
    if merger is not None and merger in _KEPT:
        _KEPT[merger].check()


def _checkpoint(worker: Any, session: WorkerSession) -> Checkpoint:
    return Checkpoint(worker.raw.vllm_config.load_config, worker.raw.model_config, session.modules.model)


OPS: dict[str, Callable[..., dict[str, Any]]] = {
    "adopt_checkpoint": _adopt,
    "reload_checkpoint": _reload,
    "unload": _unload,
    "merge": _merge,
}
