"""Who serves what: the versions of a store, and what the followers of engines have said there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import InvalidInput
from .store import Store

SILENT_S = 60.0
"""Seconds after which a follower that says nothing counts as gone."""


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """A version in a store.

    Args:
        problem: why it cannot be served; "" if it can.
        copy_of: the version that it brought back; None for others.
    """

    version: int
    name: str
    created: str
    nbytes: int
    pinned: bool
    copy_of: int | None
    problem: str


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What the follower of an engine has said last.

    Args:
        serves: name of the version that it serves, or what else it holds.
        silent: seconds since then.
        newest: whether that is the newest version.
    """

    engine: str
    serves: str
    since: str
    silent: float
    newest: bool
    error: str


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """What `lora-merge status` shows."""

    url: str
    base: str
    versions: list[VersionStatus]
    engines: list[EngineStatus]

    @property
    def converged(self) -> bool:
        """Whether every engine that was heard of in the last minute serves the newest version."""
        return all(engine.newest for engine in self.engines if engine.silent <= SILENT_S)


def status(store: Store) -> StoreStatus:
    """Return what is in a store, and who serves it; the newest versions first."""
    pinned, versions, newest, base = store.pinned(), list[VersionStatus](), "", ""
    for number in store.newest():
        try:
            m = store.manifest(number)
        except InvalidInput as error:
            versions.append(VersionStatus(number, "", "", 0, number in pinned, None, str(error)))
            continue
        if not newest:
            newest, base = m.name, f"{m.base.name or 'a model without a name'}, fingerprint {m.base.fingerprint}"
        versions.append(VersionStatus(number, m.name, m.created, m.nbytes, number in pinned, m.copy_of, ""))
    heard = store.engines()
    silent = store.silent(heard) if heard else {}
    engines = [_engine(name, said, newest, silent[name]) for name, said in sorted(heard.items())]
    return StoreStatus(store.url, base, versions, engines)


def _engine(name: str, said: dict[str, Any], newest: str, silent: float) -> EngineStatus:
    serves = str(said.get("serves", ""))
    texts = (str(said.get(key, "")) for key in ("since", "error"))
    since, error = texts
    return EngineStatus(name, serves, since, silent, bool(newest) and serves == newest, error)
