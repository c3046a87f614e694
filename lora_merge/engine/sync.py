"""VllmSync: one call brings what is being trained into the engines that roll it out."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ..buckets import BUCKET_BYTES, dtype_of, metas, to_json
from ..errors import InvalidInput, MissingExtra, PushFailed, PushRefused, UnsupportedAdapter
from ..segments import FLOATS
from ..stream import Filler, Sent
from ..weights import MergedWeights
from .adapter import ADAPTER_ID, ADAPTER_NAME, AdapterSource
from .control import Control, bind, control_of, drive, together
from .sources import Fingerprint, Verified
from .state import State
from .transport import Sender, assign, introduction

MODES = ("merged", "adapter")
PAUSES = ("keep", "wait", "abort")


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
    """

    version: int
    mode: str
    nbytes: int = 0
    tensors: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    base_sent: bool = False
    transports: tuple[str, ...] = ()

    @property
    def gb_s(self) -> float:
        """GB (10^9 bytes) a second, merging, sending and loading together."""
        spent = self.seconds.get("transfer", 0.0)
        return self.nbytes / spent / 1e9 if spent else 0.0

    def __str__(self) -> str:
        phases = "  ".join(f"{phase} {1e3 * spent:.1f}" for phase, spent in self.seconds.items())
        base = " after the base" if self.base_sent else ""
        return (
            f"{self.mode}@{self.version}{base} over {'+'.join(self.transports)}: {self.tensors} tensors, "
            f"{self.nbytes / 1e6:.1f} MB, {self.gb_s:.1f} GB/s; ms: {phases}"
        )


@dataclass(slots=True)
class _Replica:
    """One engine, and how its workers introduced themselves."""

    index: int
    control: Control
    workers: list[dict[str, Any]] = field(default_factory=list)
    paused_by_us: bool = False
    asleep: bool = False
    error: BaseException | None = None

    @property
    def state(self) -> State:
        """What the engine holds: its workers agree, or it is dirty."""
        states = [State(**worker["state"]) for worker in self.workers]
        broken = next((s for s in states if s.kind == "dirty"), None)
        if broken is None and any(s != states[0] for s in states):
            return states[0].dirty(f"its workers disagree: {', '.join(map(str, states))}")
        return broken or states[0]


class VllmSync:
    """Keeps one or several vLLM engines at the policy that is being trained.

    Args:
        model: what is trained: a PEFT model, or any module.
        engine: a `vllm.LLM`, an `AsyncLLM`, a Ray actor around one, the URL of an api_server, or a list of these
            (replicas). Engines are started with `weight_transfer_config=WeightTransferConfig(backend="lora_merge")`.
        mode: "merged" (the engine serves merged weights) or "adapter" (base and adapter apart, vLLM's LoRA path).
        rounding: of merged weights, "nearest" or "stochastic" (seeded by the version).
        pause: what becomes of requests in flight: "keep" them (they go on with the new weights), "wait" for them, or
            "abort" them.
        bucket_bytes: see `MergedWeights`.

    Raises:
        InvalidInput: an argument that does not fit.
        MissingExtra: vLLM is not installed.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Any,
        *,
        mode: str = "merged",
        rounding: str = "nearest",
        pause: str = "keep",
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if pause not in PAUSES:
            raise InvalidInput(f"pause must be one of {', '.join(PAUSES)}, got {pause!r}")
        try:
            import vllm  # noqa: F401
        except ImportError as error:
            raise MissingExtra("VllmSync needs vLLM: pip install lora-merge[vllm]") from error
        self._mode, self._pause = _checked(mode), pause
        self._weights = MergedWeights(model, rounding=rounding, bucket_bytes=bucket_bytes)
        self._base = MergedWeights(model, bucket_bytes=bucket_bytes, adapters=False)
        engines = engine if isinstance(engine, list | tuple) else [engine]
        if not engines:
            raise InvalidInput("engine must be a handle or a list of them, got an empty list")
        self._controls = [control_of(e) for e in engines]
        self._senders: list[tuple[Sender, list[int]]] = []
        self._fingerprint = Fingerprint()
        self._lock = threading.Lock()

    # What a user calls

    def push(self, *, mode: str | None = None, verify: bool = False) -> SyncReport:
        """Bring the model as it is now into every engine: base + adapter, once.

        Pauses generation, transfers, resets caches, resumes what was running. Everything that can be checked is
        checked before the first byte moves; a push that fails after that leaves its engine dirty, and the next
        merged push (or adapter push, which then brings the base too) heals it.

        Args:
            mode: for this and later pushes; default: as before.
            verify: compare checksums of every tensor on both sides, and what lies in the engine where it can be read.

        Raises:
            PushRefused: something does not fit, or another push is under way; every engine is as before.
            PushFailed: it broke off half-way in some engines, which are dirty; names them. The others are valid.
        """
        if any(control.suspends for control in self._controls):
            raise InvalidInput("an AsyncLLM has to be awaited: use `await apush()` in its event loop")
        return drive(self._push(mode, verify))

    async def apush(self, *, mode: str | None = None, verify: bool = False) -> SyncReport:
        """As `push`, in the event loop of an `AsyncLLM`; the loop keeps turning while buckets are filled."""
        return await self._push(mode, verify)

    def lora_request(self) -> Any:
        """What to pass to `generate` as `lora_request`: one constant request in adapter mode, None in merged mode."""
        if self._mode == "merged":
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest(ADAPTER_NAME, ADAPTER_ID, f"/{ADAPTER_NAME}/in-memory")

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`generate` of the (only) in-process `LLM`, with the right `lora_request`.

        Raises:
            PushRefused: the engine does not hold what was pushed last: it is dirty, or was never pushed to.
        """
        if len(self._controls) != 1 or type(self._controls[0]) is not Control:
            raise InvalidInput("generate() is for one in-process LLM; pass lora_request() to other engines yourself")
        (state,) = self.states()
        if state.kind != self._mode:
            raise PushRefused(f"the engine holds {state}, not a policy pushed in {self._mode} mode; push() first")
        return self._controls[0].engine.generate(*args, lora_request=self.lora_request(), **kwargs)

    def states(self) -> list[State]:
        """What each engine holds, as its workers say now."""
        return [replica.state for replica in drive(self._introduce())]

    async def astates(self) -> list[State]:
        """As `states`, for an `AsyncLLM`."""
        return [replica.state for replica in await self._introduce()]

    def close(self) -> None:
        """Give buffers and handles back: workers let go first. Of an `AsyncLLM`, await `aclose`."""
        drive(self.aclose())

    async def aclose(self) -> None:
        """As `close`, in the event loop of an `AsyncLLM`."""
        for sender, indices in self._senders:
            for index in indices:
                with contextlib.suppress(Exception):  # an engine that is gone has let go already
                    await self._controls[index].rpc("disconnect", session=sender.session)
            sender.close()
        self._senders = []

    # One push

    async def _push(self, mode: str | None, verify: bool) -> SyncReport:
        if not self._lock.acquire(blocking=False):
            raise PushRefused("another push is under way; two at the same time cannot both win")
        try:
            self._mode = self._mode if mode is None else _checked(mode)
            return await self._locked_push(verify)
        finally:
            self._lock.release()

    async def _locked_push(self, verify: bool) -> SyncReport:
        seconds: dict[str, float] = {}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        with _timed(seconds, "check"):
            replicas = await self._introduce()
            report = SyncReport(max(r.state.version for r in replicas) + 1, self._mode, seconds=seconds)
            try:
                await self._wake(replicas)
                passes = await self._plan(replicas, report)
                await self._connect(replicas, max(source.capacity for _, source, _ in passes))
            except (PushRefused, UnsupportedAdapter, InvalidInput):
                await self._resume(replicas)
                raise
        with _timed(seconds, "pause"):
            for replica in replicas:
                replica.paused_by_us = await replica.control.pause(self._pause)
        for state, source, targets in passes:
            await self._pass(state, source, targets, seconds, verify)
        live = [r for r in replicas if r.error is None]
        with _timed(seconds, "caches"):
            for replica in live:
                await self._attempt(replica, self._reset_caches(replica))
                await self._attempt(replica, replica.control.label(f"{report.mode}@{report.version}"))
        with _timed(seconds, "resume"):
            await self._resume(replicas)
        if any(r.error for r in replicas):
            await self.aclose()
            raise _failure(replicas)
        source = passes[-1][1]
        report.nbytes = sum(slot.nbytes for slots in source.table for slot in slots)
        report.tensors = len(metas(source.table))
        report.transports = tuple(sorted({kind for sender, _ in self._senders for kind in sender.kinds.values()}))
        return report

    async def _introduce(self) -> list[_Replica]:
        """Ask every worker of every replica who it is and what it holds."""
        replicas = []
        for index, control in enumerate(self._controls):
            try:
                workers = await control.rpc("hello")
            except Exception as error:
                raise PushRefused(
                    f"engine {index} does not answer as one of lora_merge's ({error}); is lora-merge installed where "
                    "its workers run, and does VLLM_PLUGINS allow it?"
                ) from error
            for worker in workers:
                _check_worker(index, worker)
            replicas.append(_Replica(index, control, sorted(workers, key=lambda w: w["rank"])))
        return replicas

    async def _wake(self, replicas: Sequence[_Replica]) -> None:
        """Map the weights of sleeping engines; the KV cache follows after the push."""
        for replica in replicas:
            replica.asleep = any(worker["asleep"] for worker in replica.workers)
            if replica.asleep:
                await replica.control.wake("weights")
                replica.workers = sorted(await replica.control.rpc("hello"), key=lambda w: w["rank"])

    async def _plan(self, replicas: Sequence[_Replica], report: SyncReport) -> list[tuple[State, Sent, list[_Replica]]]:
        """What has to be sent to whom, everything checked."""
        if self._mode == "merged":
            filler = await self._examine(self._weights, replicas)
            return [(State("merged", report.version), filler, list(replicas))]
        source = await self._check_adapter(replicas)
        base = await self._examine(self._base, replicas)
        fingerprint = self._fingerprint(base)
        # Engines that hold another base, or none that they could vouch for, get it first.
        without = [r for r in replicas if r.state.kind not in ("base", "adapter") or r.state.base != fingerprint]
        report.base_sent = bool(without)
        passes: list[tuple[State, Sent, list[_Replica]]] = []
        if without:
            passes.append((State("base", report.version, fingerprint), base, without))
        passes.append((State("adapter", report.version, fingerprint), source, list(replicas)))
        return passes

    async def _examine(self, weights: MergedWeights, replicas: Sequence[_Replica]) -> Filler:
        """Let every engine try the stream on: one error lists all that does not fit."""
        weights.keep_tied = not all(worker["tied"] for replica in replicas for worker in replica.workers)
        for _ in range(2):
            filler = weights.filler()
            problems: list[str] = []
            dtypes: dict[str, str] = {}
            for replica in replicas:
                found = await replica.control.rpc("examine", digest=filler.digest)
                if any("unknown" in answer for answer in found):
                    found = await replica.control.rpc("examine", digest=filler.digest, table=to_json(filler.table))
                problems += _problems(replica, found)
                dtypes.update({name: dtype for answer in found for name, dtype in answer["dtypes"].items()})
            if problems:
                raise PushRefused("the weights do not fit the engine:\n  " + "\n  ".join(problems))
            sent = metas(filler.table).values()
            wanted = {
                meta.name: dtype_of(dtypes[meta.name])
                for meta in sent
                if dtype_of(dtypes[meta.name]) in FLOATS and meta.dtype in FLOATS
            }
            # Round once, to what the engine holds; then the slots change, and are tried on again.
            if all(meta.dtype == wanted.get(meta.name, meta.dtype) for meta in sent):
                return filler
            weights.dtypes = wanted
        raise PushRefused("the engines hold the same weights in different dtypes; push to them apart")

    async def _check_adapter(self, replicas: Sequence[_Replica]) -> AdapterSource:
        """The adapter as vLLM can serve it; refused with a word on merged mode where it cannot."""
        instead = '; push with mode="merged" instead'
        for replica in replicas:
            if replica.control.adapters is not None:
                raise PushRefused(f"engine {replica.index} cannot take an adapter: {replica.control.adapters}{instead}")
            if any(worker["lora"] is None for worker in replica.workers):
                raise PushRefused(f"engine {replica.index} was started without enable_lora=True{instead}")
        loras = [worker["lora"] for replica in replicas for worker in replica.workers]
        source = AdapterSource(self._weights, self._weights.filler(), dtype_of(loras[0]["dtype"]))
        if not source.modules:
            raise PushRefused("the model has no active adapter to send")
        limit = min(lora["max_rank"] for lora in loras)
        if source.rank > limit:
            raise PushRefused(f"the adapter's rank {source.rank} is above the engine's max_lora_rank {limit}{instead}")
        for replica in replicas:
            answers = await replica.control.rpc("adapter_modules", modules=source.modules)
            unserved = sorted({name for answer in answers for name in answer["unserved"]})
            if unserved:
                raise PushRefused(f"vLLM has no LoRA layer for {', '.join(unserved)}{instead}")
        return source

    async def _connect(self, replicas: Sequence[_Replica], nbytes: int) -> None:
        """Channels to all workers; kept from push to push."""
        sessions = [{w["session"] for w in r.workers} for r in replicas]
        kept = {i for sender, indices in self._senders if sender.nbytes >= nbytes for i in indices
                if sessions[i] == {sender.session}}  # fmt: skip
        if kept == {r.index for r in replicas}:
            return
        await self.aclose()
        device = next(self._weights.model.parameters()).device
        places = assign([introduction(device)], [r.workers for r in replicas])
        here = {r for (r, _), (_, kind) in places.items() if kind == "local"}
        groups = [[r] for r in replicas if r.index in here]
        groups += [group] if (group := [r for r in replicas if r.index not in here]) else []
        for group in groups:
            indices = [r.index for r in group]
            sender = Sender({p: kind for p, (_, kind) in places.items() if p[0] in indices}, nbytes, device)
            self._senders.append((sender, indices))
            infos = [
                {"channels": [sender.channel(i, w) for w in range(len(r.workers))]}
                for i, r in zip(indices, group, strict=True)
            ]
            calls = [bind(r.control.init, info) for r, info in zip(group, infos, strict=True)]
            ended: set[int] = set()
            connect = partial(sender.connect, ended.copy)
            errors = await together([r.control for r in group], calls, connect, _noting(ended, indices))
            if any(errors):
                await self.aclose()
                raise PushRefused(f"no channel to the engine: {next(filter(None, errors))}")
            sender.opened()

    async def _pass(
        self, state: State, source: Sent, targets: Sequence[_Replica], seconds: dict[str, float], verify: bool
    ) -> None:
        """Send one source to some replicas. Errors are noted in the replicas."""
        targets = [r for r in targets if r.error is None]
        run: dict[str, Any] = {"rounding": self._weights.rounding if state.kind == "merged" else "nearest"}
        if run["rounding"] == "stochastic":
            run["seed"] = state.version
        verified = Verified(source) if verify else None
        with _timed(seconds, "transfer"):
            for sender, indices in self._senders:
                group = [r for r in targets if r.index in indices]
                if state.kind != "adapter":
                    for replica in group:
                        await self._attempt(replica, replica.control.rpc("abort"))
                        await self._attempt(replica, replica.control.start())
                await self._transfer(sender, indices, [r for r in group if not r.error], verified or source, state, run)
        with _timed(seconds, "finish"):
            for replica in targets:
                if state.kind != "adapter" and replica.error is None:
                    await self._attempt(replica, replica.control.finish())
                await self._attempt(replica, self._settled(replica, state, verified))

    async def _transfer(
        self,
        sender: Sender,
        indices: Sequence[int],
        group: Sequence[_Replica],
        source: Sent,
        state: State,
        run: Mapping[str, Any],
    ) -> None:
        """The blocking control call of each replica, and the buckets beside it."""
        if not group:
            return
        calls = [bind(self._receive_call, r, source, state) for r in group]
        sender.begin()
        if sender.local:
            sender.offer(source, run)
            await self._attempt(group[0], calls[0]())
            if group[0].error is None:
                sender.drain()
            return
        finished = set(indices) - {r.index for r in group}

        def serve() -> None:
            sender.serve(source, run, lambda: finished)

        errors = await together([r.control for r in group], calls, serve, _noting(finished, [r.index for r in group]))
        for replica, error in zip(group, errors, strict=True):
            replica.error = replica.error or error

    async def _receive_call(self, replica: _Replica, source: Sent, state: State) -> None:
        verify = isinstance(source, Verified)
        inner = source.inner if isinstance(source, Verified) else source
        if isinstance(inner, AdapterSource):
            await replica.control.rpc(
                "adapter", table=to_json(inner.table), rank=inner.rank, state=state.to_json(), verify=verify
            )
        else:
            assert isinstance(inner, Filler)
            await replica.control.update({"digest": inner.digest, "state": state.to_json(), "verify": verify})

    async def _settled(self, replica: _Replica, state: State, verified: Verified | None) -> None:
        """Make sure that every worker holds the new state, and the right bytes."""
        replica.workers = sorted(await replica.control.rpc("commit"), key=lambda w: w["rank"])
        if replica.state != state:
            raise PushFailed(f"the engine holds {replica.state}, not {state}")
        for answer in await replica.control.rpc("verified") if verified is not None else ():
            assert verified is not None
            wrong = [name for name, value in verified.checksums.items() if answer["checksums"].get(name) != value]
            wrong += answer["damaged"]
            if wrong:
                raise PushFailed(f"these tensors did not arrive as they were sent: {', '.join(sorted(set(wrong)))}")

    async def _reset_caches(self, replica: _Replica) -> None:
        """Nothing computed with the old weights may be used again."""
        info = replica.workers[0]
        if not await replica.control.reset_prefix_cache(self._pause == "keep", info["connector"]):
            raise PushFailed("the prefix cache could not be reset: requests hold blocks of the old weights")
        if info["multimodal"]:
            await replica.control.reset_media_caches()

    async def _attempt(self, replica: _Replica, call: Coroutine[Any, Any, Any]) -> None:
        """Run a step of one replica; its failure is noted, the engine marked dirty, the others go on."""
        if replica.error is not None:
            call.close()
            return
        try:
            await call
        except Exception as error:
            replica.error = error

    async def _resume(self, replicas: Sequence[_Replica]) -> None:
        """Put failed engines into a defined state, wake what slept, resume what was paused here."""
        for replica in replicas:
            try:
                if replica.error is not None:
                    await replica.control.rpc("abort", reason=f"a push failed: {replica.error}")
                if replica.asleep:
                    await replica.control.wake("kv_cache")
                if replica.paused_by_us:
                    await replica.control.resume()
            except Exception as error:
                replica.error = replica.error or error


def _noting(found: set[int], indices: Sequence[int]) -> Callable[[int], None]:
    """Adds the replica at a position to those found."""
    return lambda position: found.add(indices[position])


def _problems(replica: _Replica, found: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the workers of a replica say against a stream."""
    where = f"engine {replica.index}: "
    problems = [f"{where}{name} is refused: {why}" for answer in found for name, why in answer["refused"].items()]
    problems += [f"{where}nothing would fill {what}" for answer in found for what in answer["missing"]]
    surplus = set.intersection(*(set(answer["ignored"]) for answer in found))
    problems += [f"{where}{name} is surplus: the engine has no place for it" for name in sorted(surplus)]
    return list(dict.fromkeys(problems))


def _check_worker(index: int, worker: Mapping[str, Any]) -> None:
    if worker["lacks"]:
        raise PushRefused(
            f"engine {index} runs vLLM {worker['version']}, which does not offer {', '.join(worker['lacks'])}; "
            "0.26 and 0.32 are supported"
        )
    if not worker["backend"]:
        raise PushRefused(
            f"engine {index} was not started for lora_merge: pass "
            'weight_transfer_config=WeightTransferConfig(backend="lora_merge")'
        )
    if worker["quantized"]:
        raise PushRefused(
            f"engine {index} holds {worker['quantized']} weights; only unquantised engines can be pushed to"
        )


def _failure(replicas: Sequence[_Replica]) -> PushFailed:
    broken = [f"engine {r.index} is dirty: {type(r.error).__name__}: {r.error}" for r in replicas if r.error]
    valid = [f"engine {r.index} is valid" for r in replicas if not r.error]
    failure = PushFailed("; ".join(broken + valid) + ". The next push heals it")
    failure.__cause__ = next(r.error for r in replicas if r.error)
    return failure


def _checked(mode: str) -> str:
    if mode not in MODES:
        raise InvalidInput(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    return mode


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    begin = time.perf_counter()
    try:
        yield
    finally:
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - begin
