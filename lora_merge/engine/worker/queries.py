"""Operations that prepare a push: what a worker is and holds, whether a stream fits, which memory it maps. None of them
changes the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any
from weakref import ref

from ...stream.buckets import from_json
from ..payload.spec import UpdateSpec
from ..transport.lent import LENT, Lent, Loan
from ..transport.liveness import error_text
from ..transport.routing import introduction
from .loader import DryRunReport
from .merger import problems
from .operations import Operations
from .pull import PullTarget
from .rpc import Worker
from .session import WorkerSession

OPERATIONS = Operations()


@OPERATIONS.register
def hello(
    worker: Worker,
    session: WorkerSession,
    claim: Mapping[str, Any] | None = None,
    streams: Sequence[str] = (),
    updates: Sequence[str] = (),
) -> dict[str, Any]:
    """Say what this worker is, what it holds and what it can serve. With `claim` it takes the lease for a push, which
    `end` ends.

    Args:
        claim: arguments of `Lease.take`; `busy` answers it.
        streams: digests of tables; `fits` has the short answer of `dry_run` for those that are known here.
        updates: digests of updates; `ready` has those that can be merged onto what this worker holds.
    """
    with session.modules.still():
        return {
            **introduction(worker.device),
            **worker.about(session),
            **_lent(session, claim),
            "name": session.name,
            "tied": session.loader.ties,
            "busy": "" if claim is None else session.lease.take(**claim),
            "asleep": session.asleep(),
            "paused": session.paused,
            "served": session.served,
            "served_tenants": session.served_tenants,
            "waking": session.waking and session.cache_asleep(),
            "session": None if session.receiver is None or session.receiver.over else session.receiver.session,
            "state": worker.served(session, session.state()).to_json(),
            "fits": _fits(session, streams),
            "base": "" if session.merger is None else session.merger.base,
            "ready": [digest for digest in updates if session.ready(digest)],
        }


def _lent(session: WorkerSession, claim: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return why a trainer cannot push to weights that another one shares."""
    loan = session.loan()
    if claim is None or loan is None or loan.ended or loan.owner == claim["owner"]:
        return {}
    return {
        "unfit": "shares its weights with another trainer of its process (share=True), whose base a push would "
        "overwrite: close() the sync of that one first"
    }


def _fits(session: WorkerSession, streams: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the short answers of known streams; none if a dry run fails now (`dry_run` says why)."""
    fits = {}
    with suppress(Exception):
        for digest in () if session.asleep() else session.tables.keys() & set(streams):
            session.keep_table(digest)
            fits[digest] = _brief(_report(session, digest))
    return fits


def _report(session: WorkerSession, digest: str) -> DryRunReport:
    return session.loader.examine(digest, session.tables[digest])


def _brief(report: DryRunReport) -> dict[str, str]:
    return {"same": report.digest, "at": report.exports.digest}


@OPERATIONS.register
def dry_run(
    worker: Worker, session: WorkerSession, digest: str, table: Any = None, known: Sequence[str] = ()
) -> dict[str, Any]:
    """Run the engine's own loading on a table of tensors without values.

    Args:
        digest: of the table.
        table: the table itself; None for one that was sent before.
        known: digests of reports that the trainer has.

    Returns:
        `unknown` if the table is to be sent; else `same` (digest of the report) and `at` (`ExportedMemory.digest`), and
        unless the trainer has it the report.
    """
    if table is not None:
        session.keep_table(digest, from_json(table))
    if digest not in session.tables:
        return {"unknown": True}
    report = _report(session, digest)
    brief = _brief(report)
    if report.digest in known:
        return brief
    return brief | asdict(report.answer) | {"reloaded": len(report.staged)}


@OPERATIONS.register
def check_update(worker: Worker, session: WorkerSession, digest: str, base: str, spec: Any = None) -> dict[str, Any]:
    """Check whether updates like this one can be merged here.

    Args:
        digest: of `spec`.
        base: digest of the table of the base, which had its dry run.
        spec: `UpdatePayload.spec`; None for one that was sent before.

    Returns:
        `unknown` if the spec is to be sent; else `problems`, and whether the worker is `ready` for it.
    """
    if spec is not None:
        session.keep_update(digest, UpdateSpec.read(spec))
    if digest not in session.updates:
        return {"unknown": True}
    return {"problems": problems(session.updates[digest], _report(session, base)), "ready": session.ready(digest)}


@OPERATIONS.register
def export_memory(worker: Worker, session: WorkerSession, digest: str) -> dict[str, Any]:
    """Return how a trainer in another process of this host maps what a table fills: `ExportedMemory.description`."""
    return _report(session, digest).exports.description


@OPERATIONS.register
def blocked_tensors(worker: Worker, session: WorkerSession, digest: str) -> dict[str, Any]:
    """Return the names in a table that are `DryRunReport.blocked`, as `blocked`."""
    return {"blocked": sorted(_report(session, digest).blocked)}


@OPERATIONS.register
def lend(worker: Worker, session: WorkerSession, digest: str) -> dict[str, Any]:
    """Lend the trainer of this process the places of what a table fills (`LENT`)."""
    loan = Loan(session.lease.owner, session.mark_overwritten, session.returned)
    session.loan = ref(loan)
    LENT[session.name] = Lent(_report(session, digest).targets, loan)
    return {}


@OPERATIONS.register
def map_source(
    worker: Worker,
    session: WorkerSession,
    digest: str,
    update: str,
    table: str,
    sources: Sequence[Mapping[str, Any]],
    spec: Any = None,
) -> dict[str, Any]:
    """Map the weights that a trainer exports, so that `pull` can read them. What was mapped before is unmapped first:
    memory that lies at the same address since may have the same handle.

    Args:
        digest: of all arguments.
        update: digest of `spec`.
        table: digest of the table of the stream, which had its dry run.
        sources: what each rank exports, as for `PullTarget`.
        spec: as for `check_update`.

    Returns:
        `unknown` if the spec is to be sent; else `why` the memory cannot be mapped, "" if it was.
    """
    if spec is not None:
        session.keep_update(update, UpdateSpec.read(spec))
    if update not in session.updates:
        return {"unknown": True}
    if session.ready(digest):
        return {"why": ""}
    session.drop_pulls()
    report, here = _report(session, table), introduction(worker.device)
    try:
        target = PullTarget(session.updates[update], table, report, sources, here, worker.device)
    except (RuntimeError, OSError) as error:
        return {"why": f"the trainer's memory cannot be mapped there: {error_text(error)}"}
    session.keep_pull(digest, target)
    return {"why": ""}


@OPERATIONS.register
def unmap_source(worker: Worker, session: WorkerSession) -> None:
    """Unmap the weights that a trainer exports."""
    session.drop_pulls()


@OPERATIONS.register
def unserved_modules(worker: Worker, session: WorkerSession, modules: list[str]) -> dict[str, Any]:
    """Return the modules that this engine cannot adapt as `unserved`, and as `advice` which setting helps, in words."""
    unserved, advice = worker.unserved(modules)
    return {"unserved": unserved, "advice": advice}


@OPERATIONS.register
def connect(worker: Worker, session: WorkerSession, channels: Mapping[str, dict[str, Any]]) -> None:
    """Open this worker's channel to a trainer.

    Args:
        channels: `Sender.channel` of each worker of the engine, by rank.
    """
    session.connect(channels[str(worker.rank)])


@OPERATIONS.register
def disconnect(worker: Worker, session: WorkerSession, sessions: list[str], weights: str) -> None:
    """Unmap a trainer's buffers, before the trainer frees them.

    Args:
        sessions: of that trainer's channels.
        weights: name of the trainer whose weights are unmapped, too; "" for none.
    """
    if session.receiver is not None and session.receiver.session in sessions:
        session.disconnect()
    if weights and weights == session.pull_owner:
        session.drop_pulls()


@OPERATIONS.register
def coverage(worker: Worker, session: WorkerSession) -> dict[str, Any]:
    """Return how many elements the last full push wrote and how many there are, as `elements`, and the `state`."""
    return {"elements": session.coverage, "state": session.state().to_json()}


@OPERATIONS.register
def steps(worker: Worker, session: WorkerSession) -> dict[str, Any]:
    """Return how often the model has computed something, as `steps`."""
    return {"steps": worker.stepped()}
