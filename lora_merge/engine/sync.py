"""VllmSync: one call brings what is being trained into the engines that roll it out."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..errors import InvalidInput, MissingExtra, PushFailed, PushRefused
from ..kernels.segments import FLOATS
from ..shards.ranks import Ranks
from ..stream.buckets import BUCKET_BYTES, dtype_of, metas, to_json
from ..stream.filler import Filler, Sent
from ..stream.weights import MergedWeights
from .replica import Replica, SyncReport, failure
from .sources import Fingerprint, Verified
from .state import State
from .trainer import Trainer, told
from .vllm.adapter import ADAPTER_ID, ADAPTER_NAME, AdapterSource, filler_of
from .vllm.control import Control, control_of, drive
from .waiting import host_id

MODES = ("merged", "adapter")
PAUSES = ("keep", "wait", "abort")
_INSTEAD = '; push with mode="merged" instead'


class Pass(NamedTuple):
    """One source on its way to some replicas, and the state that it brings."""

    state: State
    source: Filler | AdapterSource
    replicas: Sequence[Replica]


class Answer(NamedTuple):
    """What the engines of one rank say to a stream.

    Args:
        lines: key of what is streamed.
        problems: what does not fit, in words.
        dtypes: name -> dtype that they hold it in.
        absent: of each engine the names for which it lacks a part of the model.
    """

    lines: int
    problems: list[str]
    dtypes: dict[str, str]
    absent: list[set[str]]


class VllmSync:
    """Keeps one or several vLLM engines at the policy that is being trained.

    Where torch.distributed is initialised, making one, `push` and `close` are collective over all ranks: every rank
    makes one of its model. Engines are any rank's: usually all handles are rank 0's and the others pass None, or each
    rank has an `LLM` of its own. Only the owner of a handle makes control calls; each worker gets its weights from the
    rank on its GPU, or from rank 0.

    Args:
        model: what is trained: a PEFT model, or any module; sharded by FSDP2 or FSDP1, or whole. Or Megatron's chunks.
        engine: a `vllm.LLM`, an `AsyncLLM`, a Ray actor around one, the URL of an api_server, or a list of these
            (replicas). Engines are started with `weight_transfer_config=WeightTransferConfig(backend="lora_merge")`.
            None where other ranks hold all handles.
        mode: "merged" (the engine serves merged weights) or "adapter" (base and adapter apart, vLLM's LoRA path).
        rounding: of merged weights, "nearest" or "stochastic" (seeded by the version).
        pause: what becomes of requests in flight: "keep" them (they go on with the new weights), "wait" for them, or
            "abort" them. A push that changes the mode waits where others keep.
        bucket_bytes: of each of two buffers. Tensors that are larger are cut.
        strategy: see `MergedWeights`.

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
        strategy: str | None = None,
    ) -> None:
        if pause not in PAUSES:
            raise InvalidInput(f"pause must be one of {', '.join(PAUSES)}, got {pause!r}")
        try:
            import vllm  # noqa: F401
        except ImportError as error:
            raise MissingExtra("VllmSync needs vLLM: pip install lora-merge[vllm]") from error
        self._mode, self._pause = _checked(mode), pause
        self._weights = MergedWeights(model, rounding=rounding, bucket_bytes=bucket_bytes, strategy=strategy)
        self._base = MergedWeights(model, bucket_bytes=bucket_bytes, adapters=False, strategy=strategy)
        engines = engine if isinstance(engine, list | tuple) else [] if engine is None else [engine]
        world = Ranks(dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)
        with world.vote("VllmSync"):
            controls = [control_of(e) for e in engines]
        if not world.any(bool(controls)):
            raise InvalidInput("engine must be a handle or a list of them, on one rank at least; got none")
        self._trainer = Trainer(controls, world)
        self._fingerprint = Fingerprint()
        self._pushed: State | None = None
        self._adapter: tuple[Filler, torch.dtype, AdapterSource] | None = None
        self._lock = threading.Lock()

    # What a user calls

    def push(self, *, mode: str | None = None, verify: bool = False) -> SyncReport:
        """Bring the model as it is now into every engine: base + adapter, once.

        Pauses generation, transfers, resets caches, resumes what was running. Everything that can be checked is
        checked before the first byte moves; a push that fails after that leaves its engine dirty, and the next
        merged push (or adapter push, which then brings the base too) heals it.

        Args:
            mode: for this and later pushes, unless this one is refused; default: as before. The same on every rank.
            verify: compare checksums of every tensor on both sides, and what lies in the engine where it can be read.

        Raises:
            PushRefused: something does not fit, or another push is under way; every engine is as before.
            PushFailed: it broke off half-way in some engines, which are dirty; names them. The others are valid.

            On every rank.
        """
        if any(control.suspends for control in self._trainer.controls):
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
            PushRefused: the engine does not hold what this `VllmSync` pushed last: it is dirty, another trainer pushed
                to it, or it was never pushed to.
        """
        controls = self._trainer.controls
        if len(controls) != 1 or type(controls[0]) is not Control:
            raise InvalidInput("generate() is for one in-process LLM; pass lora_request() to other engines yourself")
        (state,) = self.states()
        if state != self._pushed:
            whose = " of another trainer" if state.trainer not in ("", self._trainer.name) else ""
            ours = "and nothing was pushed from here" if self._pushed is None else f"not the {self._pushed} of this one"
            raise PushRefused(f"the engine holds {state}{whose}, {ours}; push() first")
        return controls[0].engine.generate(*args, lora_request=self.lora_request(), **kwargs)

    def states(self) -> list[State]:
        """What each engine whose handle this rank holds has now, as its workers say."""
        return drive(self.astates())

    async def astates(self) -> list[State]:
        """As `states`, for an `AsyncLLM`."""
        introduced = await self._hello()
        return [Replica(index, None, workers).state for index, workers in enumerate(introduced)]

    def close(self) -> None:
        """Give buffers and handles back: workers let go first. Of an `AsyncLLM`, await `aclose`."""
        drive(self.aclose())

    async def aclose(self) -> None:
        """As `close`, in the event loop of an `AsyncLLM`."""
        await self._trainer.close()

    # One push

    async def _push(self, mode: str | None, verify: bool) -> SyncReport:
        if not self._lock.acquire(blocking=False):
            raise PushRefused("another push is under way; two at the same time cannot both win")
        try:
            return await self._locked_push(self._mode if mode is None else _checked(mode), verify)
        except BaseException:
            await self._let_go()
            raise
        finally:
            for weights in (self._weights, self._base):  # read, perhaps, but not sent: a refusal, an adapter alone
                weights.release()
            self._lock.release()

    async def _let_go(self) -> None:
        """Other trainers may push to the engines again."""
        for control in self._trainer.controls:
            with contextlib.suppress(Exception):  # an engine that is gone is nobody's
                await control.rpc("end", owner=self._trainer.name)

    async def _locked_push(self, mode: str, verify: bool) -> SyncReport:
        trainer, report = self._trainer, SyncReport(0, mode)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        with report.timed("check"):
            replicas = await self._introduce()
            report.version = max(replica.state.version for replica in replicas) + 1
            slept = {replica.index for replica in replicas if replica.asleep or replica.waking}
            try:
                if slept:
                    # Map the weights of sleeping engines; the KV cache follows after the push.
                    await trainer.everywhere(self._wake(replicas))
                    replicas = await self._introduce()
                passes = await self._plan(replicas, report)
                nbytes, device = max(p.source.capacity for p in passes), passes[0].source.device
                await trainer.connect(replicas, nbytes, device)
            except BaseException:
                await self._resume(replicas, slept)
                raise
        # Requests that are made from here on wait for what this push brings.
        self._mode = mode
        own = [replica for replica in replicas if replica.control is not None]
        with report.timed("pause"):
            for replica in own:
                await trainer.attempt(replica, self._pause_one(replica))
        for one in passes:
            await self._pass(one, report, verify)
        with report.timed("caches"):
            for replica in own:
                await trainer.attempt(replica, self._reset_caches(replica))
                await trainer.attempt(replica, replica.handle.label(f"{report.mode}@{report.version}"))
        with report.timed("resume"):
            await self._resume(replicas, slept)
            await trainer.share(replicas)
        if any(replica.error for replica in replicas):
            await trainer.close()
            raise failure(replicas)
        self._pushed, table = passes[-1].state, passes[-1].source.table
        report.nbytes = sum(slot.nbytes for slots in table for slot in slots)
        report.tensors, report.transports = len(metas(table)), trainer.kinds
        return report

    async def _hello(self, **claim: Any) -> list[list[dict[str, Any]]]:
        """Ask every worker of this rank's engines who it is and what it holds; perhaps with a claim to push to it."""
        introduced = []
        for index, control in enumerate(self._trainer.controls):
            try:
                workers = await control.rpc("hello", **claim)
            except Exception as error:
                raise PushRefused(
                    f"engine {index} does not answer as one of lora_merge's: {error}. If it does not know the method, "
                    "is lora-merge installed where its workers run, and does VLLM_PLUGINS allow it?"
                ) from error
            told = [worker | {"no_adapters": control.adapters} for worker in workers]
            introduced.append(sorted(told, key=lambda worker: worker["rank"]))
        return introduced

    async def _introduce(self) -> list[Replica]:
        """Every engine of every rank, which from now on is in the middle of this push."""
        replicas: list[Replica] = []
        claim = {"owner": self._trainer.name, "host": host_id(), "pid": os.getpid()}
        for rank, introduced in enumerate(await self._trainer.everywhere(self._hello(claim=claim))):
            mine = rank == self._trainer.world.rank
            for index, workers in enumerate(introduced):
                control = self._trainer.controls[index] if mine else None
                replicas.append(Replica(len(replicas), control, workers))
        for replica in replicas:
            replica.check()
        return replicas

    async def _wake(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            if replica.control is not None and replica.asleep:
                await replica.control.wake("weights")

    async def _tell(self, replica: Replica, op: str, **message: Any) -> list[dict[str, Any]]:
        """A call of a push to all workers of an engine, which refuse it if another trainer's turn has come."""
        return await replica.handle.rpc(op, trainer=self._trainer.name, **message)

    async def _pause_one(self, replica: Replica) -> None:
        # A push that failed, or whose trainer died, left the engine paused; it said so there.
        left = any(worker["paused"] for worker in replica.workers)
        if not left and await replica.handle.paused():
            return  # the user's; it stays
        replica.paused_by_us = True
        if not left:  # said before: a call that ends here, in a timeout, takes effect there
            await self._tell(replica, "note_pause", paused=True)
        # A request keeps the adapter, or none, that it began with, and the other mode has other weights for it.
        switches = {replica.state.kind, self._mode} == {"merged", "adapter"}
        await replica.handle.pause("wait" if switches and self._pause == "keep" else self._pause)

    async def _plan(self, replicas: Sequence[Replica], report: SyncReport) -> list[Pass]:
        """What has to be sent to whom, everything checked."""
        if report.mode == "merged":
            filler = await self._examine(self._weights, replicas)
            report.left_out = tuple(sorted(self._weights.left_out))
            return [Pass(State("merged", report.version, trainer=self._trainer.name), filler, replicas)]
        source = await self._check_adapter(replicas)
        base = await self._examine(self._base, replicas)
        fingerprints = await self._trainer.everywhere(self._trainer.blocking(lambda: self._fingerprint(base)))
        if len(set(fingerprints)) > 1:
            raise PushRefused(f"the trainer's ranks hold different base weights; their fingerprints: {fingerprints}")
        fingerprint = fingerprints[0]
        # Engines that hold another base, or none that they could vouch for, get it first.
        without = [r for r in replicas if r.state.kind not in ("base", "adapter") or r.state.base != fingerprint]
        report.base_sent = bool(without)
        report.left_out = tuple(sorted(self._base.left_out)) if without else ()
        bare, adapted = (
            State(kind, report.version, fingerprint, trainer=self._trainer.name) for kind in ("base", "adapter")
        )
        return [*([Pass(bare, base, without)] if without else []), Pass(adapted, source, replicas)]

    async def _examine(self, weights: MergedWeights, replicas: Sequence[Replica]) -> Filler:
        """Let every engine try the stream on: one error lists all that does not fit."""
        # Of a pipeline only the last stage has the head, and can tie it.
        weights.keep_tied = not all(any(worker["tied"] for worker in replica.workers) for replica in replicas)
        for _ in range(4):
            made: list[Filler] = []
            answers = await self._trainer.everywhere(self._try_on(weights, made, replicas))
            (filler,) = made
            if len({answer.lines for answer in answers}) > 1:
                # The ranks that share a model agree; its replicas may not.
                self._trainer.world.same(filler.lines, partial(list, filler.lines))
            problems = [problem for answer in answers for problem in answer.problems]
            if problems and weights.left_out:  # perhaps an engine was started anew, with what it had been without
                weights.left_out = frozenset()
                continue
            if problems:
                raise PushRefused("the weights do not fit the engine:\n  " + "\n  ".join(problems))
            absent = set.intersection(*(absent for answer in answers for absent in answer.absent))
            if absent:
                weights.left_out |= absent
                continue
            sent, dtypes = metas(filler.table).values(), {n: d for answer in answers for n, d in answer.dtypes.items()}
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

    async def _try_on(self, weights: MergedWeights, made: list[Filler], replicas: Sequence[Replica]) -> Answer:
        """Try what is streamed on this rank's engines."""
        filler = await self._trainer.blocking(weights.filler)
        made.append(filler)
        answer = Answer(filler.lines_key, [], {}, [])
        for replica in replicas:
            if replica.control is None:
                continue
            found = await replica.control.rpc("examine", digest=filler.digest)
            if any("unknown" in worker for worker in found):
                found = await replica.control.rpc("examine", digest=filler.digest, table=to_json(filler.table))
            answer.problems.extend(replica.problems(found, filler.ties))
            answer.dtypes.update({name: dtype for worker in found for name, dtype in worker["dtypes"].items()})
            answer.absent.append(replica.absent(found, filler.ties))
        return answer

    async def _check_adapter(self, replicas: Sequence[Replica]) -> AdapterSource:
        """The adapter as vLLM can serve it; refused with a word on merged mode where it cannot."""
        for replica in replicas:
            if replica.workers[0]["no_adapters"]:
                raise PushRefused(
                    f"engine {replica.index} cannot take an adapter: {replica.workers[0]['no_adapters']}{_INSTEAD}"
                )
            if any(worker["lora"] is None for worker in replica.workers):
                raise PushRefused(f"engine {replica.index} was started without enable_lora=True{_INSTEAD}")
        loras = [worker["lora"] for replica in replicas for worker in replica.workers]
        dtype, limit = dtype_of(loras[0]["dtype"]), min(lora["max_rank"] for lora in loras)
        made: list[AdapterSource] = []
        await self._trainer.everywhere(self._try_adapter(dtype, limit, made, replicas))
        return made[0]

    def _read_adapter(self, dtype: torch.dtype) -> AdapterSource:
        filler = filler_of(self._weights)
        if self._adapter is None or self._adapter[0] is not filler or self._adapter[1] != dtype:
            self._adapter = filler, dtype, AdapterSource(self._weights, filler, dtype)
        return self._adapter[2]

    async def _try_adapter(
        self, dtype: torch.dtype, limit: int, made: list[AdapterSource], replicas: Sequence[Replica]
    ) -> None:
        source = await self._trainer.blocking(lambda: self._read_adapter(dtype))
        made.append(source)
        if not source.modules:
            raise PushRefused("the model has no active adapter to send")
        if source.rank > limit:
            raise PushRefused(f"the adapter's rank {source.rank} is above the engine's max_lora_rank {limit}{_INSTEAD}")
        for replica in replicas:
            if replica.control is None:
                continue
            answers = await replica.control.rpc("adapter_modules", modules=source.modules)
            unserved = sorted({name for answer in answers for name in answer["unserved"]})
            if unserved:
                raise PushRefused(f"vLLM has no LoRA layer for {', '.join(unserved)}{_INSTEAD}")

    async def _pass(self, one: Pass, report: SyncReport, verify: bool) -> None:
        """Send one source to its replicas. Errors are noted in them."""
        state, source = one.state, one.source
        run: dict[str, Any] = {"rounding": self._weights.rounding if state.kind == "merged" else "nearest"}
        if run["rounding"] == "stochastic":
            run["seed"] = state.version
        sent: Sent = Verified(source) if verify else source

        async def prepare(replica: Replica) -> None:
            if state.kind != "adapter":
                await self._tell(replica, "start")

        async def receive(replica: Replica) -> None:
            if isinstance(source, AdapterSource):
                table = to_json(source.table)
                await self._tell(
                    replica, "adapter", table=table, rank=source.rank, state=state.to_json(), verify=verify
                )
            else:
                await replica.handle.update({"digest": source.digest, "state": state.to_json(), "verify": verify})

        replicas = [replica for replica in one.replicas if not replica.error]
        with report.timed("transfer"), source.passing() if isinstance(source, Filler) else contextlib.nullcontext():
            await self._trainer.transfer(sent, run, replicas, prepare, receive)
        with report.timed("finish"):
            for replica in replicas:
                if replica.control is not None:
                    await self._trainer.attempt(replica, self._settle(replica, state, sent))

    async def _settle(self, replica: Replica, state: State, sent: Sent) -> None:
        """Make sure that every worker holds the new state, and the right bytes."""
        answers = await self._tell(replica, "commit", full=state.kind != "adapter")
        held = {answer["rank"]: answer["state"] for answer in answers}
        replica.workers = [worker | {"state": held[worker["rank"]]} for worker in replica.workers]
        if replica.state != state:
            raise PushFailed(f"the engine holds {replica.state}, not {state}")
        if isinstance(sent, Verified):
            for answer in await self._tell(replica, "verified"):
                wrong = [name for name, value in sent.checksums.items() if answer["checksums"].get(name) != value]
                wrong += answer["damaged"]
                if wrong:
                    raise PushFailed(f"these tensors did not arrive as they were sent: {', '.join(sorted(set(wrong)))}")

    async def _reset_caches(self, replica: Replica) -> None:
        """Nothing computed with the old weights may be used again."""
        info, control = replica.workers[0], replica.handle
        if not await control.reset_prefix_cache(self._pause == "keep", info["connector"]):
            raise PushFailed("the prefix cache could not be reset: requests hold blocks of the old weights")
        if info["multimodal"]:
            await control.reset_media_caches()

    async def _resume(self, replicas: Sequence[Replica], slept: set[int]) -> None:
        """Put failed engines into a defined state; the others wake and resume, if this push woke and paused them.

        A dirty engine serves nothing: it stays paused, or without its KV cache, until a push has healed it.
        """
        for replica in replicas:
            control, asleep = replica.control, replica.index in slept
            notes: dict[str, bool] = {}
            if control is None:
                continue
            try:
                if replica.error:
                    await self._tell(replica, "abort", reason=f"a push failed: {replica.error}")
                if replica.error or replica.state.kind == "dirty":
                    if asleep:
                        notes["waking"] = True
                else:
                    if asleep:
                        await control.wake("kv_cache")
                        notes["waking"] = False
                    if replica.paused_by_us:
                        await control.resume()
                        notes["paused"] = False
                await control.rpc("end", owner=self._trainer.name, **notes)
            except Exception as error:
                replica.error = replica.error or told(error)


def _checked(mode: str) -> str:
    if mode not in MODES:
        raise InvalidInput(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    return mode
