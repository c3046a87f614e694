"""What workers answer to a push, on both ends of the wire: JSON there, these types from where it arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, TypeVar

from ..errors import PushRefused
from .state import State

_T = TypeVar("_T")
ANOTHER_SIZE = "another size: "
"""How a worker's reason begins where a tensor is refused for its size: `[256, 64] here and [256, 128] there`."""
NO_PART = "no part of that name: "
"""How it begins where the engine's model has nothing of that name."""
TIED = "tied to "
"""How it begins where the engine has one tensor for two that differ here; the name of the other follows."""


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """What adapters an engine serves: those up to a rank, in a dtype; and of how many it keeps the factors."""

    max_rank: int
    dtype: str
    room: int = 1


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """Data-parallel engines that compute their experts together.

    Args:
        name: that they have in common.
        engines: how many they are.
    """

    name: str
    engines: int


@dataclass(slots=True, kw_only=True)
class WorkerInfo:
    """What a worker answers to `hello`: what it is, what it holds, and what it can serve."""

    # See `introduction` (transport/routing.py).
    host: str
    pid: int
    device: str
    cumem: str = ""
    # See `Worker.about` (worker/rpc.py). Not every engine has those with a default.
    rank: int
    world: int
    launcher: bool
    unfit: str
    dtype: str
    lora: LoraLimits | None
    connector: str
    multimodal: bool
    quantised: str = ""
    calibrated: str = ""
    others: Sequence[str] = ()
    unkept: str = "runs a lora_merge that does not keep caches: install the trainer's, and start it anew"
    chains: bool = False
    shares: SharedExperts | None = None
    computing: Mapping[str, Any] = field(default_factory=dict)
    # Versions of adapters (adapter_versions.py): states of those that requests may ask for, oldest first; of those that
    # leave with the requests that have them; and the newest number that there ever was, 0 where there was none.
    kept: Sequence[State] = ()
    leaving: Sequence[State] = ()
    newest: int = 0
    # What is kept in the worker.
    name: str = ""  # which no other worker has
    state: State
    served: str  # kind of the state with which requests in flight began
    served_tenants: Sequence[str] = ()  # and its tenants
    tied: bool  # whether it ties the head to the embedding
    busy: str  # who else is in the middle of a push, in words
    paused: bool  # whether a push that failed, or whose trainer died, has left the engine paused
    asleep: int  # sleep level of the weights; 0: awake
    waking: bool  # whether a push woke the weights, and the KV cache sleeps still
    session: str | None  # of the open channel
    base: str  # fingerprint of the base that it can merge updates onto; "": none
    # Of what was asked for by digest: of streams that are known there, the digests `same` of the dry run and `at` of
    # where the engine has what the stream fills; and which updates and pulls it is ready for.
    fits: Mapping[str, Mapping[str, str]]
    ready: Sequence[str]
    # See `Control.adapters` (or of `Worker.about`), `Control.versions` and `Control.media`; noted by the trainer.
    no_adapters: str | None = None
    no_media: str | None = None
    no_versions: str = ""

    @classmethod
    def read(cls, answer: Mapping[str, Any]) -> WorkerInfo:
        """Make one of a worker's JSON answer; unknown keys are ignored.

        Raises:
            PushRefused: a key is missing.
        """
        rank = answer.get("rank")
        info = _read(cls, answer, rank)
        info.state = _read(State, answer["state"], rank)
        info.lora = _read(LoraLimits, answer["lora"], rank) if answer["lora"] else None
        info.shares = _read(SharedExperts, answer["shares"], rank) if answer.get("shares") else None
        for name in ("kept", "leaving"):
            setattr(info, name, [_read(State, one, rank) for one in answer.get(name, ())])
        return info

    @property
    def introduction(self) -> dict[str, Any]:
        """This worker's `introduction`, which `assign` takes."""
        return {"host": self.host, "pid": self.pid, "device": self.device, "cumem": self.cumem}


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunAnswer:
    """What a worker's dry run of a stream found, as it answers to `dry_run`."""

    refused: Mapping[str, str]  # tensors that it does not take -> why
    ignored: Sequence[str]  # tensors that fill nothing
    absent: Sequence[str]  # those among them for parts that the engine was started without (a vision tower)
    missing: Sequence[str]  # parameters and persistent buffers that nothing would fill, in words
    partial: Mapping[str, int]  # tensors of which it leaves some -> elements that it takes
    dtypes: Mapping[str, str]  # tensors that it takes -> dtype in which it holds them
    dropped: Sequence[str] = ()  # of `absent`, those that an engine of this class never has (a talker)
    kept: Sequence[str] = ()  # parameters that stay as they are: of towers, where the stream is of a language model
    renames: Sequence[Sequence[str]] = ()  # beginnings of names, and what in their place would make the stream fit
    serves: str = ""  # class of the model that the engine serves, as its configuration names it

    @classmethod
    def read(cls, answer: Mapping[str, Any]) -> DryRunAnswer:
        """Make one of a worker's JSON answer; see `WorkerInfo.read`."""
        return _read(cls, answer, answer.get("rank"))


def _read(kind: Callable[..., _T], answer: Mapping[str, Any], rank: int | None) -> _T:
    required, optional = _keys(kind)
    if lacking := [key for key in required if key not in answer]:
        raise PushRefused(
            f"worker {rank} does not say {lacking[0]!r}: the lora_merge where the engine runs is another one than the "
            "trainer's. Install the same version in both, and start the engine anew"
        )
    return kind(**{key: answer[key] for key in (*required, *optional) if key in answer})


@cache
def _keys(kind: Any) -> tuple[list[str], list[str]]:
    """Return the keys that a message has to have, and those that it may have."""
    bare = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    return [f.name for f in fields(kind) if f.name in bare], [f.name for f in fields(kind) if f.name not in bare]
