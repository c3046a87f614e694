"""This package's adapters in vLLM's workers: versions of one, the one whose place each push takes, tenants. vLLM loads
an adapter when a request first asks for it, from its files; these have none, and are loaded from the worker's own
memory, again if vLLM has dropped them for others.

`KeptAdapters` stands in the place of `_load_adapter` of one worker's LoRA manager, from the first adapter on. Read in
vLLM 0.26, 0.32 and 0.33, run with 0.32. vLLM offers loading from memory nowhere; where it does, this is not needed
(`tests/vllm/test_vllm_internals.py` looks).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ...stream.buckets import Slot, from_json
from ..adapter_versions import PREFIX, path_of
from ..state import State
from ..transport.base import Received
from ..worker.operations import Operations
from ..worker.session import WorkerSession
from ..worker.staging import Staging
from . import adopt_checkpoint
from .adapter import ADAPTER_ID, adapter_of

OPERATIONS = Operations(adopt_checkpoint.OPERATIONS)
"""The operations of a vLLM worker."""


@dataclass
class ReceivedVersion:
    """A version as it arrives. Its tensors lie in the host's memory, as those of vLLM's own adapters do."""

    rank: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    data: Mapping[Any, Tensor] = field(default_factory=dict)  # on the device: none


@dataclass
class _Kept:
    """A version that is kept.

    Args:
        state: of the engine when this was its newest.
        before: what the engine held before it.
        ids: under which vLLM has loaded it; a server chooses its own.
        leaving: whether no further request may ask for it.
    """

    state: State
    before: State
    version: ReceivedVersion
    ids: set[int] = field(default_factory=set)
    leaving: bool = False


class _Held(NamedTuple):
    """An adapter without versions. Its tensors are those that vLLM's own model of it has."""

    number: int
    tensors: Mapping[str, Tensor]
    rank: int


class KeptAdapters:
    """The adapters that a worker has in its own memory.

    Args:
        manager: vLLM's `LRUCacheWorkerLoRAManager`.

    Attributes:
        newest: number of the newest version that ever came; no later one gets it again.
    """

    def __init__(self, manager: Any) -> None:
        self._manager, self._from_files = manager, manager._load_adapter
        self._kept: dict[str, _Kept] = {}
        self._held: dict[str, _Held] = {}
        self.newest = 0

    def __call__(self, request: Any) -> Any:
        """Load the adapter of a request, as vLLM's `_load_adapter`."""
        if (held := self._held.get(request.lora_path)) is not None:
            return adapter_of(self._manager, *held)
        kept = self._kept.get(request.lora_path)
        if kept is None:
            if request.lora_path.startswith(PREFIX):
                raise RuntimeError(f"{request.lora_name} ({request.lora_path}) is not kept in this engine (any more)")
            return self._from_files(request)
        kept.ids.add(request.lora_int_id)
        return self._model(kept, request.lora_int_id)

    @property
    def numbers(self) -> set[int]:
        """The ids under which these are loaded."""
        return {held.number for held in self._held.values()}.union(*(kept.ids for kept in self._kept.values()))

    def put(self, path: str, number: int, tensors: Mapping[str, Tensor], rank: int) -> None:
        """Hold an adapter without versions in place of the one that had its path, and load it.

        Args:
            number: its id in requests.
        """
        held, inner = _Held(number, tensors, rank), self._manager._adapter_manager
        model = adapter_of(self._manager, *held)  # an error leaves the one before
        inner.remove_adapter(number)
        if len(inner) + 1 > inner.capacity:
            inner.remove_oldest_adapter()
        inner.add_adapter(model)
        inner._last_mapping = None  # vLLM 0.26 does not see that an id has moved to another slot
        self._held[path] = held

    def drop(self, but: Container[str]) -> None:
        """Drop the adapters without versions that have none of these paths."""
        for path in [path for path in self._held if path not in but]:
            self._manager._adapter_manager.remove_adapter(self._held.pop(path).number)

    def states(self, leaving: bool) -> list[dict[str, Any]]:
        """Return the states of the versions, oldest first: of those that requests may ask for, or of the others."""
        found = [kept.state for kept in self._kept.values() if kept.leaving == leaving]
        return [state.to_json() for state in sorted(found, key=lambda state: state.version)]

    def add(self, state: State, before: State, version: ReceivedVersion, preload: bool) -> None:
        """Keep a version.

        Args:
            before: what the engine holds now.
            preload: load it where there is room, which spares the first request the time.
        """
        kept, inner = _Kept(state, before, version), self._manager._adapter_manager
        number = ADAPTER_ID + state.version
        model = self._model(kept, number)  # an error comes now, not with the first request
        if preload and len(inner) < inner.capacity:
            inner.add_adapter(model)
            kept.ids.add(number)
            if len(inner._active_adapters) < inner.lora_slots:  # no other one gives up its place on the device
                inner.activate_adapter(number)
                inner._last_mapping = None  # vLLM 0.26 notes no places
        self._kept[path_of(state)] = kept

    def remove(self, path: str) -> State | None:
        """Drop a version; return what the engine held before it, None where it is not here."""
        kept = self._kept.pop(path, None)
        if kept is None:
            return None
        inner = self._manager._adapter_manager
        for number in kept.ids:
            inner.remove_adapter(number)
        inner._last_mapping = None
        return kept.before

    def leave(self, path: str) -> None:
        """Note that requests may no longer ask for a version; those that have it go on with it."""
        if path in self._kept:
            self._kept[path].leaving = True

    def forget(self) -> None:
        """Drop all versions: their base has gone."""
        for path in list(self._kept):
            self.remove(path)

    def _model(self, kept: _Kept, number: int) -> Any:
        return adapter_of(self._manager, number, kept.version.tensors, kept.version.rank)


def kept_adapters(manager: Any) -> KeptAdapters | None:
    """Return the adapters that a worker has in its own memory; None where it never had one."""
    found = vars(manager).get("_load_adapter")
    return found if isinstance(found, KeptAdapters) else None


def keeper(manager: Any) -> KeptAdapters:
    """Return the adapters that a worker has in its own memory, from now on where it never had one.

    Args:
        manager: see `KeptAdapters`.
    """
    kept = kept_adapters(manager)
    if kept is None:
        if not hasattr(manager, "_load_adapter"):
            raise RuntimeError(
                f"this vLLM's {type(manager).__name__} has no _load_adapter: push merged weights without tenants"
            )
        kept = manager._load_adapter = KeptAdapters(manager)
    return kept


def _receiver(
    worker: Any, session: WorkerSession, table: Any, rank: int, state: dict[str, Any], verify: bool
) -> Callable[[], Any]:
    """Return what receives a version, after a check that it fits what the engine holds."""
    brought, version, kept = State(**state), ReceivedVersion(rank), keeper(worker.raw.model_runner.lora_manager)
    _check_base(session, brought)
    # This is noted before any version is added: the core may be told of one that no worker gets after all, and by this
    # the next push knows that the core goes by what it is told.
    kept.newest = max(kept.newest, brought.version)

    def keep(slots: Sequence[Slot], received: Received) -> None:
        assert received.data is not None
        version.tensors.update({slot.name: slot.view(received.data).to("cpu", copy=True) for slot in slots})

    def receive() -> ReceivedVersion:
        session.receive(from_json(table), keep, verify)
        return version

    return receive


def _check_base(session: WorkerSession, brought: State) -> State:
    """Return what the engine holds; raise unless a version can be added to it."""
    held = session.state()
    if held.kind not in ("base", "adapter") or held.base != brought.base:
        raise RuntimeError(f"a version of an adapter needs the base that it was trained on; this engine holds {held}")
    return held


@OPERATIONS.register
def receive_version(
    worker: Any, session: WorkerSession, table: Any, rank: int, state: dict[str, Any], verify: bool
) -> None:
    """Receive a version of an adapter. Nothing changes before `add_version`."""
    session.update = _receiver(worker, session, table, rank, state, verify)()


@OPERATIONS.register
def stage_version(
    worker: Any, session: WorkerSession, table: Any, rank: int, state: dict[str, Any], verify: bool
) -> None:
    """Begin to receive a version in a thread, while the engine goes on generating; `staged` says when it is here."""
    session.end_staging()
    session.update = None
    session.staging = Staging(session.device, _receiver(worker, session, table, rank, state, verify))


@OPERATIONS.register
def add_version(worker: Any, session: WorkerSession, state: dict[str, Any], preload: bool) -> None:
    """Keep the version that was received beside those before it; it is the newest from now on.

    Args:
        preload: see `KeptAdapters.add`.
    """
    brought, version = State(**state), session.update
    before = _check_base(session, brought)
    if not isinstance(version, ReceivedVersion):
        raise RuntimeError("a version has to be received before it is added; push again")
    keeper(worker.raw.model_runner.lora_manager).add(brought, before, version, preload and not session.asleep())
    session.update = None
    session.switch(brought)


@OPERATIONS.register
def remove_versions(worker: Any, session: WorkerSession, paths: Sequence[str], leaving: Sequence[str] = ()) -> None:
    """Drop versions. Where the newest is among them, the engine holds again what it held before.

    Args:
        paths: of those that no request has.
        leaving: paths of those that requests in flight have, and no other request may ask for.
    """
    kept = kept_adapters(worker.raw.model_runner.lora_manager)
    if kept is None:
        return
    for path in paths:
        before = kept.remove(path)
        if before is not None and session.held.kind == "adapter" and path_of(session.held) == path:
            session.switch(before)
    for path in leaving:
        kept.leave(path)
