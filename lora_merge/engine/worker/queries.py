"""What a worker is asked before a push: what it is and holds, whether a stream fits, what it maps. Nothing of the
engine's weights changes in any of these operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ...stream.buckets import from_json
from ..payload.spec import Described
from ..transport.liveness import told
from ..transport.routing import introduction
from .loader import Examination
from .merger import problems
from .pull import Pulled
from .rpc import Op, Worker
from .session import Side


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
            "name": side.name,
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
    return {"blocked": sorted(found.staged.union(found.copies).difference(found.targets.views))}


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


def _coverage(worker: Worker, side: Side) -> dict[str, Any]:
    """Elements that the last full push wrote, and elements there are."""
    return {"elements": side.coverage, "state": side.state().to_json()}


QUESTIONS: dict[str, Op] = {
    "hello": _hello,
    "examine": _examine,
    "examine_update": _examine_update,
    "exports": _exports,
    "blocked": _blocked,
    "offer": _offer,
    "let_go": _let_go,
    "adapter_modules": _adapter_modules,
    "connect": _connect,
    "coverage": _coverage,
}
