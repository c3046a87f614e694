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


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """What adapters an engine serves: those up to a rank, in a dtype."""

    max_rank: int
    dtype: str


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
    """What a worker answers to `hello`: what it is, what it holds, and what it can serve.

    Args:
        host, pid, device, cumem: as of `introduction` (transport/routing.py).
        rank, world, launcher, unfit, dtype, lora, connector, multimodal, quantised, calibrated, shares, computing: as
            of `Worker.about` (worker/rpc.py).
        name: of the worker, which no other one has.
        tied: whether it ties the head to the embedding.
        busy: who else is in the middle of a push, in words; "" for nobody.
        asleep: the sleep level of its weights; 0 if they are awake.
        paused: whether a push that failed, or whose trainer died, has left the engine paused.
        waking: whether a failed push woke its weights but not its KV cache.
        served: the kind of state with which requests in flight began.
        session: of its channel; None where none is open.
        state: what it holds.
        fits: of the streams that were asked for and are known there, by digest: the digests `same` of what its dry run
            found, and `at` of where it has what the stream fills.
        base: fingerprint of the base that it can merge updates onto; "" for none.
        ready: digests of the updates, and pulls, that were asked for and can be taken.
        no_adapters, no_media: as of `Control.adapters` and `Control.media`; noted by the trainer.
    """

    host: str
    pid: int
    device: str
    rank: int
    world: int
    launcher: bool
    unfit: str
    dtype: str
    lora: LoraLimits | None
    connector: str
    multimodal: bool
    tied: bool
    busy: str
    asleep: int
    paused: bool
    waking: bool
    served: str
    session: str | None
    state: State
    fits: Mapping[str, Mapping[str, str]]
    base: str
    ready: Sequence[str]
    # What some engines leave out.
    cumem: str = ""
    name: str = ""
    quantised: str = ""
    calibrated: str = ""
    shares: SharedExperts | None = None
    computing: Mapping[str, Any] = field(default_factory=dict)
    no_adapters: str | None = None
    no_media: str | None = None

    @classmethod
    def read(cls, answer: Mapping[str, Any]) -> WorkerInfo:
        """Make one of a worker's JSON answer; unknown keys are ignored.

        Raises:
            PushRefused: a key is missing.
        """
        worker = f"worker {answer.get('rank', '(of no rank)')}"
        info = _read(cls, answer, worker)
        info.state = _read(State, answer["state"], worker)
        info.lora = _read(LoraLimits, answer["lora"], worker) if answer["lora"] else None
        info.shares = _read(SharedExperts, answer["shares"], worker) if answer.get("shares") else None
        return info

    @property
    def introduction(self) -> dict[str, Any]:
        """As of `introduction`, for `assign`."""
        return {"host": self.host, "pid": self.pid, "device": self.device, "cumem": self.cumem}


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunAnswer:
    """What a worker's dry run of a stream found, as it answers to `examine`.

    Args:
        refused: name -> why, of the tensors that it does not take.
        ignored: names of the tensors that fill nothing.
        absent: those among them for parts of the model that the engine was started without.
        missing: parameters that nothing would fill.
        partial: name -> elements that it takes, of the tensors of which it leaves some.
        dtypes: name -> dtype of the tensors that it takes, as it holds them.
    """

    refused: Mapping[str, str]
    ignored: Sequence[str]
    absent: Sequence[str]
    missing: Sequence[str]
    partial: Mapping[str, int]
    dtypes: Mapping[str, str]

    @classmethod
    def read(cls, answer: Mapping[str, Any]) -> DryRunAnswer:
        """Make one of a worker's JSON answer; see `WorkerInfo.read`."""
        return _read(cls, answer, f"worker {answer.get('rank', '(of no rank)')}")


def _read(kind: Callable[..., _T], answer: Mapping[str, Any], worker: str) -> _T:
    required, optional = _keys(kind)
    if lacking := [key for key in required if key not in answer]:
        raise PushRefused(
            f"{worker} does not say {lacking[0]!r}: the lora_merge where the engine runs is another one than the "
            "trainer's. Install the same version in both, and start the engine anew"
        )
    return kind(**{key: answer[key] for key in (*required, *optional) if key in answer})


@cache
def _keys(kind: Any) -> tuple[list[str], list[str]]:
    """Return the keys that a message has to have, and those that it may have."""
    bare = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    return [f.name for f in fields(kind) if f.name in bare], [f.name for f in fields(kind) if f.name not in bare]
