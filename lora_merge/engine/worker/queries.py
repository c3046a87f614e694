"""What a worker is asked before a push: what it is and holds, whether a stream fits, what it maps. Nothing of the
engine's weights changes in any of these operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ...stream.buckets import from_json
from ..payload.spec import UpdateSpec
from ..transport.liveness import error_text
from ..transport.routing import introduction
from .loader import DryRunReport
from .merger import problems
from .pull import PullTarget
from .rpc import Op, Worker
from .session import WorkerSession


def _hello(
    worker: Worker,
    session: WorkerSession,
    claim: Mapping[str, Any] | None = None,
    streams: Sequence[str] = (),
    updates: Sequence[str] = (),
) -> dict[str, Any]:
    """Say what this worker is, what it holds and what it can serve. With a claim, a push begins, which `end` ends.

    Args:
        streams: digests of tables: what `examine` says of them in brief, where they are known here.
        updates: digests of updates: which of them can be merged onto what lies here.
    """
    with session.modules.still():
        return {
            **introduction(worker.device),
            **worker.about(session),
            "name": session.name,
            "tied": session.loader.ties,
            "busy": "" if claim is None else session.lease.take(**claim),
            "asleep": session.asleep(),
            "paused": session.paused,
            "served": session.served,
            "waking": session.waking,
            "session": None if session.receiver is None or session.receiver.over else session.receiver.session,
            "state": worker.served(session, session.state()).to_json(),
            "fits": _fits(session, streams),
            "base": "" if session.merger is None else session.merger.base,
            "ready": [digest for digest in updates if session.ready(digest)],
        }


def _fits(session: WorkerSession, streams: Sequence[str]) -> dict[str, dict[str, str]]:
    """What is known of streams; nothing of one that cannot be looked at now (`examine` says why)."""
    fits = {}
    with suppress(Exception):
        for digest in () if session.asleep() else session.tables.keys() & set(streams):
            session.keep_table(digest)
            fits[digest] = _brief(session, digest)
    return fits


def _brief(session: WorkerSession, digest: str) -> dict[str, str]:
    """Summarise what was found in a table, by digest, and where the engine has what it fills."""
    found = session.loader.examine(digest, session.tables[digest])
    return {"same": found.digest, "at": found.exports.digest}


def _examine(
    worker: Worker, session: WorkerSession, digest: str, table: Any = None, known: Sequence[str] = ()
) -> dict[str, Any]:
    """Dry run of a table; without one, of the table that was sent before under this digest.

    Args:
        known: digests of findings that the trainer has: these are not sent again.
    """
    if table is not None:
        session.keep_table(digest, from_json(table))
    if digest not in session.tables:
        return {"unknown": True}
    brief = _brief(session, digest)
    found: DryRunReport = session.loader.examine(digest, session.tables[digest])
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


def _examine_update(worker: Worker, session: WorkerSession, digest: str, base: str, spec: Any = None) -> dict[str, Any]:
    """Whether updates like this one can be merged here.

    Args:
        digest: of `spec`.
        base: digest of the table of the base, which was examined.
        spec: `UpdatePayload.spec`; without it, what was told before under this digest.
    """
    if spec is not None:
        session.keep_update(digest, UpdateSpec.read(spec))
    if digest not in session.updates:
        return {"unknown": True}
    found = session.loader.examine(base, session.tables[base])
    return {"problems": problems(session.updates[digest], found), "ready": session.ready(digest)}


def _exports(worker: Worker, session: WorkerSession, digest: str) -> dict[str, Any]:
    """How a trainer in another process of this host maps what an examined table fills."""
    return session.loader.examine(digest, session.tables[digest]).exports.description


def _blocked(worker: Worker, session: WorkerSession, digest: str) -> dict[str, Any]:
    """Names of the tensors of an examined table that are more here than boxes of parameters in their dtype."""
    found = session.loader.examine(digest, session.tables[digest])
    return {"blocked": sorted(found.staged.union(found.copies).difference(found.targets.views))}


def _offer(
    worker: Worker,
    session: WorkerSession,
    digest: str,
    update: str,
    table: str,
    sources: Sequence[Mapping[str, Any]],
    spec: Any = None,
) -> dict[str, Any]:
    """Map what a trainer exports, to be pulled from. What was mapped before is let go of first: memory that lies at the
    same address since may have the same handle.

    Args:
        digest: of all of this.
        update: digest of `spec`.
        table: digest of the table of the stream, which was examined.
        sources: what each rank exports, as of `PullTarget`.
        spec: as of `_examine_update`.
    """
    if spec is not None:
        session.keep_update(update, UpdateSpec.read(spec))
    if update not in session.updates:
        return {"unknown": True}
    if session.ready(digest):
        return {"why": ""}
    session.drop_pulls()
    report, here = session.loader.examine(table, session.tables[table]), introduction(worker.device)
    try:
        target = PullTarget(session.updates[update], table, report, sources, here, worker.device)
    except (RuntimeError, OSError) as error:
        return {"why": f"the trainer's memory cannot be mapped there: {error_text(error)}"}
    session.keep_pull(digest, target)
    return {"why": ""}


def _let_go(worker: Worker, session: WorkerSession) -> dict[str, Any]:
    """Unmap the memory that a trainer exports."""
    session.drop_pulls()
    return {}


def _adapter_modules(worker: Worker, session: WorkerSession, modules: list[str]) -> dict[str, Any]:
    """Modules that this engine cannot adapt."""
    return {"unserved": worker.unserved(modules)}


def _connect(worker: Worker, session: WorkerSession, channels: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Open this worker's channel to a trainer.

    Args:
        channels: for each worker of the engine its `Sender.channel`, by rank.
    """
    session.connect(channels[str(worker.rank)])
    return {}


def _coverage(worker: Worker, session: WorkerSession) -> dict[str, Any]:
    """Elements that the last full push wrote, and elements there are."""
    return {"elements": session.coverage, "state": session.state().to_json()}


QUERIES: dict[str, Op] = {
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
