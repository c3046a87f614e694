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
from ..worker.session import Coming, Side
from .loading.checkpoint import Checkpoint, Kept, load_again

_KEPT: WeakKeyDictionary[Merger, Kept] = WeakKeyDictionary()
"""The files that what a merger keeps is mapped from."""


def _own(worker: Any, side: Side, digest: str, update: str) -> dict[str, Any]:
    """Take the engine's own checkpoint for the base of updates, and keep what one of them needs of it. No weight
    changes. Where the base cannot be brought back that was there, says so.

    Args:
        digest: of the examined table of the base.
        update: digest under which the update was told.
    """
    held, merger, said, table = side.state(), side.merger, side.updates[update], side.tables[digest]
    _check_kept(merger)
    if merger is None or not merger.own or not merger.holds(said.base):
        if held.kind != "nothing":
            return {"lost": True}
        merger = side.new_merger(digest, OWN)
    checkpoint = _checkpoint(worker, side)
    if wanted := merger.wanted(said):
        if merger is not side.merger:
            checkpoint.check(side.loader, side.loader.examine(digest, table), table)
        tensors = checkpoint.read({name: meta for name, meta in metas(table).items() if name in wanted})
        _KEPT[merger] = checkpoint.kept()
        merger.adopt(tensors)
    if merger is not side.merger:
        side.own(merger)
    return {"lost": False}


def _reread(worker: Any, side: Side, digest: str, update: str, state: dict[str, Any]) -> dict[str, Any]:
    """Load the engine's own checkpoint again, as a full push would bring it; `commit` ends it.

    Args:
        digest, update: as of `own`.
        state: that it brings.
    """
    side.abort(None)
    examination, table = side.loader.examine(digest, side.tables[digest]), side.tables[digest]
    checkpoint = _checkpoint(worker, side)
    tensors = checkpoint.read(metas(table))
    side.begin("its checkpoint is being read again")
    side.loader.begin(examination)
    side.coming = Coming(examination, digest, State(**state), merger := side.new_merger(digest, OWN))
    load_again(side.loader, examination, table, tensors)
    _KEPT[merger] = checkpoint.kept()  # nothing was written to them while they were read, either
    merger.adopt({name: tensors[name] for name in merger.wanted(side.updates[update])})
    side.came()
    return {}


def _unload(worker: Any, side: Side) -> dict[str, Any]:
    """Prepare to take off what was merged onto the engine's own checkpoint; nothing changes before `merge`."""
    held = side.state()
    if side.merger is None or not side.merger.own or held.kind not in WEIGHTS:
        raise RuntimeError(f"this engine holds {held}, and no adapter on its own checkpoint: load one first")
    _check_kept(side.merger)
    side.update = side.merger.nothing()
    return {}


def _merge(worker: Any, side: Side, **message: Any) -> dict[str, Any]:
    """As of operations.py; but what is kept for it may lie in files."""
    _check_kept(side.merger)
    return operations.OPS["merge"](worker, side, **message)


def _check_kept(merger: Merger | None) -> None:
    """Raise where what is kept to bring the base back has changed."""
    if merger is not None and merger in _KEPT:
        _KEPT[merger].check()


def _checkpoint(worker: Any, side: Side) -> Checkpoint:
    return Checkpoint(worker.raw.vllm_config.load_config, worker.raw.model_config, side.modules.model)


OPS: dict[str, Callable[..., dict[str, Any]]] = {"own": _own, "reread": _reread, "unload": _unload, "merge": _merge}
