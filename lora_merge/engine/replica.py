"""One engine as a push sees it, and what a push reports."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..errors import PushFailed, PushRefused
from .fit import fit
from .state import State
from .vllm.control import Control

ONE_ENGINE = (
    "several data-parallel engines behind one handle, of which only the first one's answers come back: give VllmSync a "
    "list of handles, one for each data-parallel rank"
)


@dataclass(slots=True)
class SyncReport:
    """What one push did.

    Args:
        version: number of the push; engines count it.
        mode: "merged" or "adapter".
        nbytes: bytes that crossed, to one replica.
        tensors: how many.
        seconds: by phase: check, pause, transfer (merge, send and load), finish, caches, resume.
        base_sent: whether an adapter push had to bring the base first.
        transports: how the buckets travelled.
        left_out: names of tensors that were not sent, because every engine was started without the part of the model
            that they belong to (`limit_mm_per_prompt` of 0: no vision tower), or has one place for two tied names.
    """

    version: int
    mode: str
    nbytes: int = 0
    tensors: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    base_sent: bool = False
    transports: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def gb_s(self) -> float:
        """GB (10^9 bytes) a second, merging, sending and loading together."""
        spent = self.seconds.get("transfer", 0.0)
        return self.nbytes / spent / 1e9 if spent else 0.0

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time inside to a phase."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin

    def __str__(self) -> str:
        phases = "  ".join(f"{phase} {1e3 * spent:.1f}" for phase, spent in self.seconds.items())
        base = " after the base" if self.base_sent else ""
        out = self.left_out
        note = f" ({len(out)} left out, which the engine has no part for: {out[0]} to {out[-1]})" if out else ""
        return (
            f"{self.mode}@{self.version}{base} over {'+'.join(self.transports)}: {self.tensors} tensors{note}, "
            f"{self.nbytes / 1e6:.1f} MB, {self.gb_s:.1f} GB/s; ms: {phases}"
        )


@dataclass(slots=True)
class Replica:
    """One engine, and how its workers introduced themselves.

    Args:
        index: of all engines of the trainer.
        control: None where another trainer rank holds its handle.
        workers: in rank order.
        error: why it is not valid any more.
    """

    index: int
    control: Control | None
    workers: list[dict[str, Any]]
    paused_by_us: bool = False
    error: str = ""

    @property
    def handle(self) -> Control:
        """The control plane of an engine whose handle this rank holds."""
        assert self.control is not None
        return self.control

    @property
    def state(self) -> State:
        """What the engine holds: its workers agree, or it is dirty."""
        states = [State(**worker["state"]) for worker in self.workers]
        broken = next((s for s in states if s.kind == "dirty"), None)
        if broken is None and any(s != states[0] for s in states):
            return states[0].dirty(f"its workers disagree: {', '.join(map(str, states))}")
        return broken or states[0]

    @property
    def asleep(self) -> bool:
        return any(worker["asleep"] for worker in self.workers)

    @property
    def waking(self) -> bool:
        """Whether a push that failed has woken its weights, and left the KV cache to the next one."""
        return any(worker["waking"] for worker in self.workers)

    def check(self) -> None:
        """Raise `PushRefused` where an engine is none that can be pushed to."""
        for worker in self.workers:
            if worker["busy"]:
                raise PushRefused(
                    f"engine {self.index} is in the middle of another trainer's push ({worker['busy']}); two at the "
                    "same time cannot both win: push again when that one has ended"
                )
            if worker["lacks"]:
                raise PushRefused(
                    f"engine {self.index} runs vLLM {worker['version']}, which does not offer "
                    f"{', '.join(worker['lacks'])}; 0.26 and 0.32 are supported"
                )
            if not worker["backend"]:
                raise PushRefused(
                    f"engine {self.index} was not started for lora_merge: pass "
                    'weight_transfer_config=WeightTransferConfig(backend="lora_merge")'
                )
            if worker["quantized"]:
                raise PushRefused(
                    f"engine {self.index} holds {worker['quantized']} weights; only unquantised ones can be pushed to"
                )
            if worker["engines"] > 1:
                raise PushRefused(f"engine {self.index} is {ONE_ENGINE}")
            if worker["world"] != len(self.workers):
                raise PushRefused(
                    f"engine {self.index} has {worker['world']} workers, of which {len(self.workers)} answer; give "
                    "VllmSync a handle that reaches all of them"
                )
            if worker["eplb"]:
                raise PushRefused(
                    f"engine {self.index} moves its experts about (enable_eplb), and a push would put them where they "
                    "were at first: start it with enable_eplb=False"
                )

    def problems(self, found: Sequence[Mapping[str, Any]], ties: Mapping[str, str]) -> list[str]:
        """What its workers say against a stream; arguments as of `fit`."""
        return [f"engine {self.index}: {problem}" for problem in fit(found, ties).problems]

    def absent(self, found: Sequence[Mapping[str, Any]], ties: Mapping[str, str]) -> set[str]:
        """What of a stream it has no place for, and need not have; arguments as of `fit`."""
        return fit(found, ties).absent


def failure(replicas: Sequence[Replica]) -> PushFailed:
    """The error of a push that broke off in some engines; names them, and says that the others are valid."""
    broken = [f"engine {r.index} is dirty: {r.error}" for r in replicas if r.error]
    valid = [f"engine {r.index} is valid" for r in replicas if not r.error]
    return PushFailed("; ".join(broken + valid) + ". What is dirty stays paused; the next push heals it")
