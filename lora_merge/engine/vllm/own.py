"""What a worker does where the base is what its engine started with, and nobody has pushed one: operations of the
worker method, as in operations.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...stream.buckets import metas
from ..side import Coming, Side
from ..state import OWN, WEIGHTS, State
from .checkpoint import Checkpoint, load_again


def _own(worker: Any, side: Side, digest: str, update: str) -> dict[str, Any]:
    """Take the engine's own checkpoint for the base of updates, and keep what one of them needs of it. No weight
    changes. Where the base cannot be brought back that was there, says so.

    Args:
        digest: of the examined table of the base.
        update: digest under which the update was told.
    """
    held, merger, said, table = side.state(), side.merger, side.updates[update], side.tables[digest]
    if merger is None or not merger.own or not merger.holds(said.base):
        if held.kind != "nothing":
            return {"lost": True}
        merger = side.new_merger(digest, OWN)
    checkpoint = _checkpoint(worker, side)
    if wanted := merger.wanted(said):
        if merger is not side.merger:
            checkpoint.check(side.loader, side.loader.examine(digest, table), table)
        merger.adopt(checkpoint.read({name: meta for name, meta in metas(table).items() if name in wanted}))
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
    tensors = _checkpoint(worker, side).read(metas(table))
    side.begin("its checkpoint is being read again")
    side.loader.begin(examination)
    side.coming = Coming(examination, digest, State(**state), merger := side.new_merger(digest, OWN))
    load_again(side.loader, examination, table, tensors)
    merger.adopt({name: tensors[name] for name in merger.wanted(side.updates[update])})
    side.came()
    return {}


def _unload(worker: Any, side: Side) -> dict[str, Any]:
    """Prepare to take off what was merged onto the engine's own checkpoint; nothing changes before `merge`."""
    held = side.state()
    if side.merger is None or not side.merger.own or held.kind not in WEIGHTS:
        raise RuntimeError(f"this engine holds {held}, and no adapter on its own checkpoint: load one first")
    side.update = side.merger.nothing()
    return {}


def _checkpoint(worker: Any, side: Side) -> Checkpoint:
    return Checkpoint(worker.raw.vllm_config.load_config, worker.raw.model_config, side.modules.model)


OPS: dict[str, Callable[..., dict[str, Any]]] = {"own": _own, "reread": _reread, "unload": _unload}
