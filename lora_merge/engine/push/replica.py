"""One engine as a push sees it, and what a push reports."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ...choices import Cache
from ...errors import InvalidInput, PushFailed, PushRefused
from ...shards.ranks import RankLost
from ..control.base import Call, Control
from ..messages import SharedExperts, WorkerInfo
from ..state import State, change
from ..tenants import StaleRequests
from ..transport.routing import WorkerId

ONE_ENGINE = (
    "several data-parallel engines behind one handle (data_parallel_size, dp_size), of which only the first one's "
    "answers come back: start them one by one, and give a list of handles, one for each"
)


@dataclass(slots=True)
class SyncReport:
    """What one push did; `push` returns it, and `print` shows it as one line.

    Args:
        version: number of the push, counted by the engine.
        mode: "merged" or "adapter"; "base" after an adapter from a folder was taken off.
        nbytes: number of bytes that were sent to one replica; without those of the base, where `base_sent`.
        tensors: number of tensors that were sent, counted alike.
        seconds: by phase: check, pause (until requests have ended, where they are waited for or ended; those that are
            kept stop with the transfer), transfer (merge, send and load; caches are reset beside it), finish, resume
            (0 where it went with the last message).
        shared: number of bytes that moved nowhere, as trainer and engine hold them once (`share=True`).
        base_sent: whether the base had to go first, where the engine serves or merges the adapter.
        merge: who added the adapters to the base: "trainer" or "engine"; "" in adapter mode.
        merge_why: why the trainer merged where engines could have; "" otherwise.
        transports: how bytes reached the workers (docs/vllm.md, Transports).
        buckets: why engines in other processes got buckets instead of direct writes; "" where they were written
            directly.
        left_out: names that were not sent because every engine was started without that part of the model
            (`limit_mm_per_prompt` of 0: no vision tower).
        kept: parameters of engines that stay as they are, because the trainer's model is only the language model of
            theirs (a class without its towers).
        coverage: share of the elements of the engines' parameters and persistent buffers that the last full push wrote,
            in the worker with the least; 1.0 is all. None where the weights came from something else than a push.
        reloaded: number of layers that went through the engine's own loading because it changes their layout
            (quantised, prepacked), in the worker with the most.
        calibrated: which layers of an engine have scales of its KV cache that were calibrated for its checkpoint, and
            not for what was pushed, in words; "" where none have (docs/vllm.md, Scales of the KV cache).
        others: adapters in an engine that this trainer has not loaded, whose requests are answered on top of the pushed
            weights from now on; "" where there are none.
        differs: in which settings an engine's configuration says that it computes otherwise than the trainer's model,
            in words; "" where none does.
        versions: with `keep`: the versions that requests may ask for (`lora_request`), oldest first.
        tenants: names of adapters that are all served; the first one is merged (docs/tenants.md).
        cache: "keep" if requests in flight have kept their KV cache in every engine; one that was dirty, or slept,
            drops it, whatever the push was asked for.
        skipped: engines that got nothing, as they could not be reached (`lost="skip"`), by their position in the list
            of handles -> why.
    """

    version: int
    mode: str
    nbytes: int = 0
    shared: int = 0
    tensors: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    base_sent: bool = False
    merge: str = ""
    merge_why: str = ""
    transports: tuple[str, ...] = ()
    buckets: str = ""
    left_out: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    coverage: float | None = None
    reloaded: int = 0
    calibrated: str = ""
    others: str = ""
    differs: str = ""
    versions: tuple[int, ...] = ()
    tenants: tuple[str, ...] = ()
    cache: Cache = "reset"
    skipped: Mapping[int, str] = field(default_factory=dict)

    @property
    def gb_s(self) -> float:
        """GB (10^9 bytes) a second, merging, sending and loading together."""
        spent = self.seconds.get("transfer", 0.0)
        return self.nbytes / spent / 1e9 if spent else 0.0

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time that the block takes to a phase."""
        begin = time.perf_counter()
        try:
            yield
        except RankLost as lost:
            lost.step = lost.step or phase
            raise
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin

    def __str__(self) -> str:
        phases = "  ".join(f"{phase} {1e3 * spent:.1f}" for phase, spent in self.seconds.items())
        by = " by the engine" if self.merge == "engine" else ""
        base = " after the base" if self.base_sent else ""
        if self.tenants:
            base += f" ({self.tenants[0]}, and {len(self.tenants) - 1} tenants beside it)"
        out = self.left_out
        why = f"; through buckets: {self.buckets}" if self.buckets else ""
        note = f" ({len(out)} left out, which the engine has no part for: {_span(out)})" if out else ""
        if self.kept:
            note += f" ({len(self.kept)} parameters of the engine stay as they are: {_span(self.kept)})"
        if self.reloaded:
            why += f"; {self.reloaded} layers by the engine's own loading"
        if self.calibrated:
            why += f"; KV cache scales of the engine's checkpoint kept: {self.calibrated}"
        if self.others:
            why += f"; on top of these weights now: adapters of others ({self.others})"
        if self.differs:
            why += f"; an engine computes otherwise: {self.differs}"
        if self.versions:
            why += f"; kept: {', '.join(map(str, self.versions))}"
        if self.cache == "keep":
            why += "; requests in flight have kept their KV cache"
        why += "".join(f"; without engine {index}: {gone}" for index, gone in self.skipped.items())
        once = f" and {self.shared / 1e6:.1f} MB held once" if self.shared else ""
        over = f" over {'+'.join(self.transports)}" if self.transports else ""
        return (
            f"{self.mode}@{self.version}{by}{base}{over}: {self.tensors} tensors{note}, "
            f"{self.nbytes / 1e6:.1f} MB{once}, {self.gb_s:.1f} GB/s; ms: {phases}{why}"
        )


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


@dataclass(slots=True)
class Replica:
    """One engine, or the part of it that one handle reaches.

    Args:
        index: of all handles of the trainer.
        control: None where another trainer rank holds its handle.
        workers: what its workers say of themselves, in rank order.
        slept: the level at which its weights slept until this push woke it (0: the KV cache alone did); None where it
            was awake.
        paused_by_us: whether a push has paused it, and not its user.
        to_adapter: whether a push that changes the mode ends in adapter mode; None where it does not change.
        allowed: paths of the adapters that requests may ask for when the push has ended; None where it had no versions.
        stale: which tenants' requests a push ends, as they could not go on with what it brings.
        tenants: the tenants that are served when the push has ended; None where there are none before and after it.
        keeps: whether requests in flight keep their KV cache.
        begun: whether this push has begun to write to it.
        lost: whether another trainer has taken its lease: this push does nothing more to it.
        moved: whether it has generated in the middle of this push.
        error: what failed in it.
        queued_calls: calls that are made with the next message to it.
        resumed: whether it holds what was pushed and generates with it: nothing remains to be done.
        resume_error: why it could not resume, though it holds what was pushed.
        coverage: the share of its elements that the last full push wrote, in the worker with the least.
        reloaded: see `SyncReport`.
    """

    index: int
    control: Control | None
    workers: list[WorkerInfo]
    slept: int | None = None
    paused_by_us: bool = False
    to_adapter: bool | None = None
    allowed: list[str] | None = None
    stale: StaleRequests | None = None
    tenants: Sequence[str] | None = None
    keeps: bool = False
    begun: bool = False
    lost: bool = False
    moved: bool = False
    error: str = ""
    queued_calls: list[Call] = field(default_factory=list)
    resumed: bool = False
    resume_error: Exception | None = None
    coverage: float | None = None
    reloaded: int = 0

    @property
    def handle(self) -> Control:
        """The control plane of the engine; only on the rank that holds its handle."""
        assert self.control is not None
        return self.control

    @property
    def state(self) -> State:
        """The state that all its workers report, or dirty if they differ."""
        states = [worker.state for worker in self.workers]
        broken = next((s for s in states if s.kind == "dirty"), None)
        if broken is None and any(s != states[0] for s in states):
            return change(states[0], "break", reason=f"its workers disagree: {', '.join(map(str, states))}")
        return broken or states[0]

    @property
    def served(self) -> str:
        """The kind of state with which requests in flight began, even if the engine is dirty now."""
        return self.state.kind if self.state.kind != "dirty" else self.began

    @property
    def began(self) -> str:
        """The kind of state in which it generated last. Where a push has left it paused between commit and resume,
        requests wait that were made for this kind, and no others of it have begun."""
        return self.workers[0].served

    @property
    def served_tenants(self) -> tuple[str, ...]:
        """The tenants with which requests in flight began; the first was merged."""
        return tuple(self.workers[0].served_tenants)

    @property
    def shares(self) -> SharedExperts | None:
        """The data-parallel engines that it computes its experts together with; None where it computes alone."""
        return next((worker.shares for worker in self.workers if worker.shares), None)

    @property
    def calibrated(self) -> str:
        """The layers whose KV cache has scales of the engine's checkpoint, in words."""
        return next((worker.calibrated for worker in self.workers if worker.calibrated), "")

    @property
    def others(self) -> str:
        """The adapters in it that somebody else has loaded, in words."""
        return next((", ".join(worker.others) for worker in self.workers if worker.others), "")

    @property
    def still_paused(self) -> bool:
        """Whether a push that failed, or whose trainer died, has left it paused."""
        return any(worker.paused for worker in self.workers)

    @property
    def kept(self) -> list[State]:
        """The versions of adapters that all its workers keep and requests may ask for, oldest first."""
        return [one for one in self.workers[0].kept if all(one in worker.kept for worker in self.workers)]

    @property
    def newest(self) -> int:
        """The number of the newest version of an adapter that it ever had; 0 for none."""
        return max(worker.newest for worker in self.workers)

    @property
    def asleep(self) -> int:
        """The sleep level of its weights; 0 if they are awake."""
        return max(worker.asleep for worker in self.workers)

    @property
    def waking(self) -> bool:
        """Whether a push woke its weights, and its KV cache sleeps still: that push failed, or its trainer died."""
        return any(worker.waking for worker in self.workers)

    def check(self) -> None:
        """Raise `PushRefused` if the engine cannot be pushed to."""
        for worker in self.workers:
            if worker.busy:
                raise PushRefused(
                    f"engine {self.index} is in the middle of another trainer's push ({worker.busy}); two at the "
                    "same time cannot both win: push again when that one has ended"
                )
            if worker.unfit:
                raise PushRefused(f"engine {self.index} {worker.unfit}")
            if worker.multimodal and worker.no_media:
                raise PushRefused(f"engine {self.index} caches what its encoder made, but {worker.no_media}")
            if worker.world != len(self.workers) and not worker.launcher:
                raise PushRefused(
                    f"engine {self.index} has {worker.world} workers, of which {len(self.workers)} answer; give a "
                    "handle that reaches all of them"
                )


def workers_of(replicas: Sequence[Replica]) -> dict[WorkerId, WorkerInfo]:
    """Return all workers, by replica and position in it."""
    return {(replica.index, w): worker for replica in replicas for w, worker in enumerate(replica.workers)}


def engines_of(replicas: Sequence[Replica]) -> list[list[Replica]]:
    """Group replicas by what computes together: one group each, except where data-parallel engines share their experts,
    and under vLLM's "external_launcher", where each worker of an engine is a trainer rank with a handle of its own."""
    engines: dict[tuple[str, Any], list[Replica]] = {}
    for replica in replicas:
        in_pieces = [w.rank // w.world for w in replica.workers if w.world != len(replica.workers)]
        key: tuple[str, Any] = ("in pieces", in_pieces[0]) if in_pieces else ("whole", replica.index)
        if replica.shares is not None:
            key = ("sharing", replica.shares.name)
        engines.setdefault(key, []).append(replica)
    return list(engines.values())


def check_whole(replicas: Sequence[Replica]) -> None:
    """Raise `PushRefused` if some workers of an engine, or engines that share experts with one, have no handle on any
    trainer rank."""
    for engine in engines_of(replicas):
        shares = engine[0].shares
        if shares is not None and len(engine) < shares.engines:
            raise PushRefused(
                f"engine {engine[0].index} computes its experts together with {shares.engines - 1} other "
                f"data-parallel engines, and {shares.engines - len(engine)} of these have no handle here: they "
                "would answer with old experts. Give a list of handles, one for each data-parallel rank"
            )
        world, first = engine[0].workers[0].world, engine[0].workers[0].rank
        present = {worker.rank for replica in engine for worker in replica.workers}
        lacking = set(range(first // world * world, (first // world + 1) * world)) - present
        if len(present) != world and lacking:
            raise PushRefused(
                f"engine {engine[0].index} has {world} workers, one on each of {world} ranks, and those of ranks "
                f"{', '.join(map(str, sorted(lacking)))} are missing: give the LLM of every rank, on that rank"
            )


def check_apart(replicas: Sequence[Replica]) -> None:
    """Raise `PushRefused` if an engine has more than one handle: it would get each message twice."""
    met: dict[str, int] = {}
    for replica in replicas:
        for name in {worker.name for worker in replica.workers if worker.name}:
            if met.setdefault(name, replica.index) != replica.index:
                raise PushRefused(
                    f"engine {replica.index} is engine {met[name]} under another handle (process "
                    f"{replica.workers[0].pid} on {replica.workers[0].host.partition('/')[0]}): give one handle "
                    "for each engine, on all ranks together"
                )


def fail_together(replicas: Sequence[Replica]) -> None:
    """Give all replicas of an engine the error of the first that failed: a failed worker makes the whole engine dirty,
    if anything was written to any part of it."""
    for engine in engines_of(replicas):
        error = next((replica.error for replica in engine if replica.error), "")
        begun = any(replica.begun for replica in engine)
        for replica in engine if error else ():
            replica.error, replica.begun = replica.error or error, begun


SILENT = tuple(
    f"{kind}: " for kind in ("EngineDeadError", "EngineGone", "NotReached", "ActorDiedError", "ActorUnavailableError")
)
"""How the errors (`error_text`) of engines begin that have died or do not answer."""


def failure(
    replicas: Sequence[Replica], healing: str = "the next push heals them", brought: Mapping[int, State] | None = None
) -> PushFailed | PushRefused:
    """Make the error for a push that broke off in some engines: it names them, and says what each engine holds now.

    Args:
        healing: what becomes of dirty ones.
        brought: by index, what engines hold that could not resume after they got everything.
    """
    kinds = ("dirty", "silent", "stuck", "taken", "as before", "valid", "resumed")
    said: dict[str, list[str]] = {kind: [] for kind in kinds}
    for replica in replicas:
        kind, words = _outcome(replica, (brought or {}).get(replica.index))
        said[kind].append(f"engine {replica.index} {words}")
    text = "; ".join(line for lines in said.values() for line in lines)
    if all(kind == "as before" or not lines for kind, lines in said.items()):
        return PushRefused(f"{text}. Nothing was sent; push again")
    advice = [f"Dirty engines stay paused; {healing}"] if said["dirty"] else []
    if said["silent"]:
        advice.append("Start an engine that has died anew, and push again")
    return PushFailed(f"{text}{' ' if text.endswith('?') else '. '}{'. '.join(advice or ['Push again'])}")


def _outcome(replica: Replica, brought: State | None) -> tuple[str, str]:
    """Return what became of an engine, as a kind and in words."""
    error = replica.error
    if not error:
        return "valid", "is valid"
    if replica.resumed:
        return "resumed", f"holds what was pushed, but: {error}"
    if brought is not None:
        return "stuck", f"holds {brought}, but going on with it failed: {error}"
    if replica.lost and replica.begun:
        return "taken", f"is another trainer's by now: {error}"
    if error.startswith(SILENT):
        unknown = "what it holds" if replica.begun else "whether it goes on"
        return "silent", f"does not answer any more, and {unknown} is not known: {error}"
    if replica.begun:
        return "dirty", f"is dirty: {error}"
    left = "was not changed by this push" if replica.lost else "holds what it held before"  # another one may change it
    return "as before", f"{left}: {error}"


def check_handle(index: int, control: Control, before: Sequence[Control] = ()) -> None:
    """Raise an error if no push can reach the engine behind a handle, as far as this process can tell, or if a handle
    before it reaches the same engine."""
    for other, known in enumerate(before):
        if known.engine is control.engine or (isinstance(known.engine, str) and known.engine == control.engine):
            raise InvalidInput(f"engine must name each engine once, got one twice: handles {other} and {index}")
    if unfit := control.unfit():
        raise PushRefused(f"engine {index} {unfit}")
