"""VllmSync: one call brings what is being trained into the engines that roll it out."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import InvalidInput, MissingExtra, PushFailed, PushRefused
from ..shards.ranks import Ranks
from ..stream.buckets import BUCKET_BYTES, metas, to_json
from ..stream.filler import Filler, Sent
from ..stream.weights import MergedWeights
from .passes import MERGES, Pass, Passes
from .replica import Replica, SyncReport, check_handle, check_whole, failure
from .sources import Verified
from .state import State
from .trainer import Trainer
from .transport import Route
from .update import Update
from .vllm.adapter import ADAPTER_ID, ADAPTER_NAME, AdapterSource
from .vllm.control import Control, bind, control_of, drive, side_by_side, together
from .vllm.decorated import complaint
from .waiting import host_id

MODES = ("merged", "adapter")
PAUSES = ("keep", "wait", "abort")


class VllmSync:
    """Keeps one or several vLLM engines at the policy that is being trained.

    Where torch.distributed is initialised, making one, `push` and `close` are collective over all ranks: every rank
    makes one of its model. Engines are any rank's: usually all handles are rank 0's and the others pass None, or each
    rank has an `LLM` of its own. Only the owner of a handle makes control calls; each worker gets its weights from the
    rank on its GPU, or from rank 0.

    Args:
        model: what is trained: a PEFT model, or any module; sharded by FSDP2, FSDP1 or ZeRO-3, or whole. Or Megatron's
            chunks.
        engine: a `vllm.LLM`, an `LLMEngine`, an `AsyncLLM`, a Ray actor around one, the URL of an api_server, or a list
            of these (replicas). Engines are best started with
            `weight_transfer_config=WeightTransferConfig(backend="lora_merge")`; one that was started without is taken
            unless it chose a layout that cannot be loaded again. None where other ranks hold all handles.
        mode: "merged" (the engine serves merged weights) or "adapter" (base and adapter apart, vLLM's LoRA path).
        merge: in merged mode, who adds the adapters to the base. "trainer": merged weights cross, written straight into
            engines of the same host. "engine": the base crosses once, then adapters alone; the engine's workers merge
            them into their own slices, with the bits of a merge in the trainer, and take them off again, exactly,
            before the next ones (2 bits an element and the adapters stay in the engine's memory for that; weights that
            vLLM lays out anew after loading are kept twice). "auto": the engine where some of its workers run on
            another host than every rank of the trainer, and nothing speaks against it; the report says who did.
        rounding: of merged weights, "nearest" or "stochastic" (seeded by the version).
        pause: what becomes of requests in flight: "keep" them (they go on with the new weights), "wait" for them, or
            "abort" them. A push that changes the mode waits where others keep.
        bucket_bytes: of each of two buffers. Tensors that are larger are cut.
        strategy: see `MergedWeights`.

    Raises:
        InvalidInput: an argument that does not fit.
        PushRefused: an engine that no push can reach, as far as can be told before the first one.
        MissingExtra: vLLM is not installed.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Any,
        *,
        mode: str = "merged",
        merge: str = "auto",
        rounding: str = "nearest",
        pause: str = "keep",
        bucket_bytes: int = BUCKET_BYTES,
        strategy: str | None = None,
    ) -> None:
        if merge not in MERGES:
            raise InvalidInput(f"merge must be one of {', '.join(MERGES)}, got {merge!r}")
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
        with world.vote("VllmSync"):
            for index, control in enumerate(controls):
                check_handle(index, control)
        if told := complaint(model):
            warnings.warn(told, stacklevel=2)
        self._passes = Passes(self._trainer, self._weights, self._base, merge)
        self._closed = False
        self._pushed: State | None = None
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
            PushRefused: as `check`.
        """
        controls = self._trainer.controls
        if len(controls) != 1 or type(controls[0]) is not Control or not hasattr(controls[0].handle, "generate"):
            raise InvalidInput("generate() is for one in-process LLM; pass lora_request() to other engines yourself")
        self.check()
        return controls[0].handle.generate(*args, lora_request=self.lora_request(), **kwargs)

    def check(self) -> None:
        """Whether the engines whose handles this rank holds still have what was pushed last; no collective.

        Raises:
            PushRefused: one of them does not: it is dirty, another trainer pushed to it, or it was never pushed to.
        """
        for state in self.states():
            if state != self._pushed:
                whose = " of another trainer" if state.trainer not in ("", self._trainer.name) else ""
                ours = (
                    "and nothing was pushed from here"
                    if self._pushed is None
                    else f"not the {self._pushed} of this one"
                )
                raise PushRefused(f"the engine holds {state}{whose}, {ours}; push() first")

    def states(self) -> list[State]:
        """What each engine whose handle this rank holds has now, as its workers say."""
        return drive(self.astates())

    async def astates(self) -> list[State]:
        """As `states`, for an `AsyncLLM`."""
        introduced = await self._hello()
        return [Replica(index, None, workers).state for index, workers in enumerate(introduced)]

    def close(self) -> None:
        """Give buffers and handles back: workers let go first. It cannot push any more. Of an `AsyncLLM`, await
        `aclose`."""
        drive(self.aclose())

    async def aclose(self) -> None:
        """As `close`, in the event loop of an `AsyncLLM`."""
        self._closed = True
        await self._trainer.close()

    # One push

    async def _push(self, mode: str | None, verify: bool) -> SyncReport:
        if self._closed:
            raise InvalidInput("this VllmSync was closed: make a new one, VllmSync(model, engine)")
        if not self._lock.acquire(blocking=False):
            raise PushRefused("another push is under way; two at the same time cannot both win")
        try:
            return await self._locked_push(self._mode if mode is None else _checked(mode), verify)
        except BaseException:
            await self._let_go()
            raise
        finally:
            self._passes.release()  # read, perhaps, but not sent: a refusal, an adapter alone
            self._lock.release()

    async def _let_go(self) -> None:
        """Other trainers may push to the engines again."""
        controls = self._trainer.controls
        # An engine that is gone is nobody's.
        await side_by_side(controls, lambda control: control.rpc("end", owner=self._trainer.name), controls)

    async def _locked_push(self, mode: str, verify: bool) -> SyncReport:
        trainer, report = self._trainer, SyncReport(0, mode)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        with report.timed("check"):
            read: list[Filler] = []  # while engines elsewhere answer, as the push before left its settings
            weights, known = self._passes.stream(mode), self._passes.known(mode)
            replicas = await self._introduce(*known, lambda: read.append(weights.filler()))
            report.version = max(replica.state.version for replica in replicas) + 1
            slept = {replica.index: replica.asleep for replica in replicas if replica.asleep or replica.waking}
            try:
                if slept:
                    # Map the weights of sleeping engines; the KV cache follows after the push.
                    await trainer.everywhere(trainer.all_own(replicas, self._wake))
                    replicas = await self._introduce()
                passes = await self._passes(replicas, report, verify, read[0])
                nbytes, device = max(p.source.capacity for p in passes), passes[0].source.device
                await trainer.connect(replicas, nbytes, device, any(p.route.sent for p in passes))
            except BaseException:
                await self._sleep_again(replicas, slept)
                raise
        # Requests that are made from here on wait for what this push brings.
        self._mode = mode
        with report.timed("pause"):
            await trainer.each(replicas, self._pause_one)
        for one in passes:
            await self._pass(one, report, verify, last=one is passes[-1])
        await trainer.share(replicas)
        with report.timed("resume"):
            await trainer.each(replicas, partial(self._resume, slept=slept), failed=True)
            await trainer.share(replicas)
        if any(replica.error for replica in replicas):
            await trainer.close()
            self._passes.broke(failure(replicas))
            raise failure(replicas)
        self._pushed, table = passes[-1].state, passes[-1].source.table
        report.nbytes = sum(slot.nbytes for slots in table for slot in slots)
        report.tensors = len(metas(table))
        report.transports = tuple(sorted({kind for one in passes for kind in trainer.kinds(one.route)}))
        report.coverage = min(replica.coverage or 0.0 for replica in replicas)
        return report

    async def _hello(self, beside: Callable[[], None] | None = None, **message: Any) -> list[list[dict[str, Any]]]:
        """Ask the engines whose handles are here who they are.

        Args:
            beside: work of this rank's own; it is done in any case.
        """
        introduced: dict[int, list[dict[str, Any]]] = {}

        async def hello(index: int) -> None:
            control = self._trainer.controls[index]
            try:
                workers = await control.rpc("hello", **message)
            except Exception as error:
                raise PushRefused(
                    f"engine {index} does not answer as one of lora_merge's: {error}. If it does not know the method, "
                    "is lora-merge installed where its workers run, and does VLLM_PLUGINS allow it?"
                ) from error
            elsewhere = (worker["pid"] for worker in workers if worker["host"] == host_id())
            control.workers = [pid for pid in elsewhere if pid != os.getpid()]
            introduced[index] = [worker | {"no_adapters": control.adapters} for worker in workers]

        controls = self._trainer.controls
        failure: BaseException | None = None
        if beside is not None and all(control.elsewhere for control in controls):
            errors, failure = await together(controls, [bind(hello, index) for index in range(len(controls))], beside)
        else:
            errors = await side_by_side(controls, hello, range(len(controls)))
            if beside is not None:
                await self._trainer.blocking(beside)
        for error in (*errors, failure):
            if error is not None:
                raise error
        return [introduced[index] for index in range(len(controls))]

    async def _introduce(
        self,
        streams: Sequence[str] = (),
        updates: Sequence[str] = (),
        beside: Callable[[], None] | None = None,
    ) -> list[Replica]:
        """Every engine of every rank, which from now on is in the middle of this push.

        Args:
            streams, updates: digests of tables, and of updates, that engines say at once what they know of.
            beside: as of `_hello`.
        """
        replicas: list[Replica] = []
        claim = {"owner": self._trainer.name, "host": host_id(), "pid": os.getpid()}
        hello = self._hello(beside, claim=claim, streams=streams, updates=updates)
        for rank, introduced in enumerate(await self._trainer.everywhere(hello)):
            mine = rank == self._trainer.world.rank
            for index, workers in enumerate(introduced):
                control = self._trainer.controls[index] if mine else None
                replicas.append(Replica(len(replicas), control, workers))
        for replica in replicas:
            replica.check()
        check_whole(replicas)
        return replicas

    async def _wake(self, replica: Replica) -> None:
        if replica.asleep:
            await replica.handle.wake("weights")

    async def _sleep_again(self, replicas: Sequence[Replica], slept: Mapping[int, int]) -> None:
        """After a refusal: engines that were asleep are so again, at their level; the others were left alone."""

        async def again(replica: Replica) -> None:
            await replica.handle.sleep(slept[replica.index])
            # vLLM 0.26 takes one whose KV cache sleeps for asleep, and leaves its weights where they are: then the next
            # push has the KV cache alone to wake.
            if not any(worker["asleep"] for worker in await replica.handle.rpc("hello")):
                await self._tell(replica, "note_pause", waking=True)

        await self._trainer.each([r for r in replicas if slept.get(r.index)], again, failed=True)

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

    async def _pass(self, one: Pass, report: SyncReport, verify: bool, last: bool) -> None:
        """Send one source to its replicas. Errors are noted in them.

        Args:
            last: of the push: caches of the old weights are reset meanwhile.
        """
        state, source = one.state, one.source
        run: dict[str, Any] = {"rounding": self._weights.rounding if state.kind == "merged" else "nearest"}
        if run["rounding"] == "stochastic":
            run["seed"] = state.version
        sent: Sent = Verified(source) if verify else source
        label = f"{report.mode}@{report.version}"

        async def prepare(replica: Replica, route: Route) -> None:
            if isinstance(source, Update):
                return  # nothing changes before all workers have it
            replica.begun = True
            if isinstance(source, Filler):
                changed = None if one.changed is None else sorted(one.changed)
                message = {"digest": source.digest, "state": state.to_json(), "sent": bool(route.sent)}
                await self._tell(replica, "start", changed=changed, **message)

        async def receive(replica: Replica, route: Route) -> None:
            message: dict[str, Any] = {"sessions": self._trainer.sessions, "verify": verify}
            if isinstance(source, AdapterSource):
                table = to_json(source.table)
                await self._tell(replica, "adapter", table=table, rank=source.rank, state=state.to_json(), **message)
            elif isinstance(source, Update):
                await self._tell(replica, "update", digest=source.digest, scalings=source.scalings, **message)
            elif route.sent:
                placed = sorted(route.placed.intersection(route.sent))
                await self._tell(replica, "receive", sent=route.sent, placed=placed, **message)
            if last:
                await self._reset_caches(replica)
                await replica.handle.label(label)

        replicas = [replica for replica in one.replicas if not replica.error]
        with report.timed("transfer"), source.passing():
            await self._trainer.transfer(sent, run, replicas, one.route, prepare, receive)
        with report.timed("finish"):
            await self._trainer.each(replicas, partial(self._commit, state=state, sent=sent))

    async def _commit(self, replica: Replica, state: State, sent: Sent) -> None:
        """Make sure that every worker holds the new state, and the right bytes."""
        if state.kind == "merged" and state.base:
            replica.begun = True
            answers = await self._tell(replica, "merge", state=state.to_json())
        else:
            answers = await self._tell(replica, "commit", full=state.kind != "adapter")
        held = {answer["rank"]: answer["state"] for answer in answers}
        replica.workers = [worker | {"state": held[worker["rank"]]} for worker in replica.workers]
        replica.coverage = min(written / max(1, elements) for written, elements in (a["elements"] for a in answers))
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
        # Nothing runs before `_resume`. Requests that were kept, by us or by a user's own pause, hold blocks of them.
        running = self._pause == "keep" or not replica.paused_by_us
        if not await control.reset_prefix_cache(running, info["connector"]):
            raise PushFailed("the prefix cache could not be reset: requests hold blocks of the old weights")
        if info["multimodal"]:
            await control.reset_media_caches()

    async def _resume(self, replica: Replica, slept: Mapping[int, int]) -> None:
        """Put a failed engine into a defined state; another one wakes and resumes, if this push woke and paused it.

        A dirty engine serves nothing: it stays paused, or without its KV cache, until a push has healed it. One to
        which nothing was written goes back to where it was.

        Args:
            slept: engines that this push woke -> the level at which their weights slept (0: the KV cache alone did).
        """
        control, asleep = replica.handle, replica.index in slept
        notes: dict[str, bool] = {}
        if replica.error and replica.begun:
            await self._tell(replica, "abort", reason=f"a push failed: {replica.error}")
        if (replica.error and replica.begun) or replica.state.kind == "dirty":
            if asleep:
                notes["waking"] = True
        else:
            if asleep and replica.error:
                await self._sleep_again([replica], slept)
            elif asleep:
                await control.wake("kv_cache")
                notes["waking"] = False
            if replica.paused_by_us:
                await control.resume()
                # A pause that timed out may take effect yet: the next push then knows that it is none of the user's.
                notes["paused"] = bool(replica.error)
        await control.rpc("end", owner=self._trainer.name, **notes)


def _checked(mode: str) -> str:
    if mode not in MODES:
        raise InvalidInput(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    return mode
