"""Requests of this package in the schedulers of an SGLang engine, answered on every rank, in step with each other.
Nothing raises here: an error in a scheduler ends the whole engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...stream.buckets import dtype_name
from ..configs import computing
from ..state import State
from ..worker import commands
from ..worker.beside import Beside, beside
from ..worker.modules import Modules
from ..worker.operations import Operations
from ..worker.rpc import respond
from ..worker.session import WorkerSession, session_of
from .adapter import ADAPTER_ID, load_adapter, remove_adapter, unserved_modules
from .internals import embedding_cache
from .loader import Loader
from .unfit import unfit

_log = logging.getLogger(__name__)
OPERATIONS = Operations(commands.OPERATIONS)
"""The operations of an SGLang scheduler."""
_WEIGHTS = "weights"
"""The tag under which SGLang's memory saver knows the weights."""
_BESIDE = Beside()
"""Of this process's model."""
_SEES = "it serves a multimodal model, beside which SGLang's LoRA layers have not been tried"
"""Why an engine takes no adapter."""


def lora_merge(manager: Any, request: str) -> Any:
    """Answer a request on this rank; the first rank's output has the answers of all, as a JSON array.

    Args:
        manager: SGLang's `SchedulerWeightUpdaterManager`.
    """
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    group, mine = manager.tp_cpu_group, respond(SglangWorker(manager), OPERATIONS, request)
    answers = [mine] * dist.get_world_size(group)
    if len(answers) > 1:
        dist.all_gather_object(answers, mine, group=group)
    return CheckWeightsReqOutput(success=True, message=f"[{', '.join(answers)}]")


class SglangWorker:
    """Implements `Worker` for a scheduler.

    Args:
        manager: as for `lora_merge`.
    """

    def __init__(self, manager: Any) -> None:
        self.manager, self.scheduler = manager, manager.scheduler
        self.model = manager.tp_worker.model_runner.model

    @property
    def rank(self) -> int:
        return dist.get_rank(self.manager.tp_cpu_group)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def session(self) -> WorkerSession:
        manager = self.manager
        return session_of(
            self.model,
            lambda: WorkerSession(
                Loader(Modules(self.model), self.device),
                lambda: asleep(manager),
                lambda: bool(manager.offload_tags - {_WEIGHTS}),
            ),
        )

    def stepped(self) -> int:
        return int(self.scheduler.forward_ct)

    def working(self, op: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def about(self, session: WorkerSession) -> dict[str, Any]:
        lora, multimodal = self._lora, bool(self.scheduler.model_config.is_multimodal)
        return {
            "world": dist.get_world_size(self.manager.tp_cpu_group),
            "launcher": False,
            "unfit": unfit(self.manager),
            "dtype": dtype_name(next(self.model.parameters()).dtype),
            "lora": lora and {"max_rank": lora.max_lora_rank, "dtype": dtype_name(lora.dtype)},
            "connector": "",
            "multimodal": multimodal,
            "no_adapters": _SEES if multimodal else None,
            "computing": computing(self.manager.tp_worker.model_runner.model_config.hf_config),
            "others": self._others(),
            "calibrated": self._calibrated(),
        }

    def _others(self) -> list[str]:
        """Return the names of adapters that somebody else has loaded."""
        loaded = getattr(self._lora, "lora_refs", {})
        return [str(reference.lora_name) for number, reference in loaded.items() if number != ADAPTER_ID]

    def _calibrated(self) -> str:
        """Return where the scales of the KV cache come from, in words; "" where they are 1."""
        arguments = self.scheduler.server_args
        path = arguments.quantization_param_path if arguments.kv_cache_dtype == "fp8_e4m3" else None
        return f"those of quantization_param_path={path!r}" if path else ""

    @property
    def _lora(self) -> Any:
        """Return SGLang's `LoRAManager`; None where the engine serves no adapters."""
        runner = self.manager.tp_worker.model_runner
        return runner.lora_manager if self.scheduler.server_args.enable_lora else None

    def served(self, session: WorkerSession, state: State) -> State:
        if state.kind == "adapter" and (self._lora is None or ADAPTER_ID not in self._lora.loras):
            session.evicted()
            return session.held
        return state

    def settle(self, session: WorkerSession, weights: bool) -> None:
        if self._lora is not None and session.held.kind != "adapter":
            remove_adapter(self._lora)

    def unserved(self, modules: Sequence[str]) -> tuple[list[str], str]:
        return unserved_modules(self._lora, modules), ""

    def load_adapter(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        load_adapter(self._lora, tensors, rank)


def asleep(manager: Any) -> int:
    """Return the level at which the weights sleep, as `WorkerSession` wants it: whether the memory saver has unmapped
    them."""
    if _WEIGHTS not in manager.offload_tags:
        return 0
    return 1 if manager.scheduler.server_args.enable_weights_cpu_backup else 2


def _throws_away(manager: Any) -> bool:
    """Return True if weights that are unmapped are gone."""
    return bool(manager.memory_saver_adapter.enabled) and not manager.scheduler.server_args.enable_weights_cpu_backup


def releasing(manager: Any, tags: Sequence[str] | None) -> None:
    """Keep what layers hold beside parameters and buffers, if weights are about to go: SGLang keeps buffers alone. Its
    LoRA layers hold adapters, which do not go."""
    from sglang.srt.lora.layers import BaseLayerWithLoRA

    if _throws_away(manager) and not asleep(manager) and _WEIGHTS in (tags or [_WEIGHTS]):
        _BESIDE.keep(beside(manager.tp_worker.model_runner.model, "sglang", (BaseLayerWithLoRA,)))


def released(manager: Any) -> None:
    """Note that memory was unmapped: weights of which no copy is kept are gone. An error stays here: it would end the
    engine, and what a push notes of the weights still shows that they are others."""
    try:
        if asleep(manager) and _throws_away(manager):
            SglangWorker(manager).session().mark_overwritten("its weights were thrown away: release_memory_occupation")
    except Exception:
        _log.exception("lora_merge")


def resumed(manager: Any) -> None:
    """Bring back what `releasing` kept, if the weights are mapped."""
    if not asleep(manager):
        _BESIDE.bring_back()


@OPERATIONS.register
def requests(worker: SglangWorker, session: WorkerSession) -> dict[str, Any]:
    """Return the `requests` that the scheduler has, and whether it is `paused`."""
    return {"requests": sorted(_in_flight(worker.scheduler)), "paused": bool(worker.scheduler._engine_paused)}


def _in_flight(scheduler: Any) -> Iterator[str]:
    batches = (scheduler.running_batch, scheduler.last_batch)
    found = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue, scheduler.chunked_req]
    found += [request for batch in batches if batch is not None for request in batch.reqs]
    yield from {request.rid for request in found if request is not None and not request.finished()}


@OPERATIONS.register
def flush_cache(worker: SglangWorker, session: WorkerSession) -> dict[str, Any]:
    """Drop all cached blocks; return whether that was possible, as `forgotten`. Requests that hold blocks go back to
    the queue, and are computed anew when generation goes on. Waiting requests hold none, but SGLang's own `flush_cache`
    would refuse because of them: they are hidden meanwhile."""
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    scheduler = worker.scheduler
    scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
    grammars = scheduler.grammar_manager
    waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
    compiling, grammars.grammar_queue = grammars.grammar_queue, []
    try:
        return {"forgotten": bool(scheduler.flush_cache(empty_cache=False))}
    finally:
        scheduler.waiting_queue, grammars.grammar_queue = waiting, compiling


@OPERATIONS.register
def reset_media_caches(worker: SglangWorker, session: WorkerSession) -> None:
    """Drop what the encoder made of images. SGLang's own `flush_cache` keeps it, and would answer a known image by the
    old tower."""
    embedding_cache().clear()


@OPERATIONS.register
def map_memory(worker: SglangWorker, session: WorkerSession, weights: bool) -> None:
    """Map memory again that the memory saver has unmapped: the weights, or all else."""
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

    gone = worker.manager.offload_tags
    if tags := sorted(gone & {_WEIGHTS} if weights else gone - {_WEIGHTS}):
        worker.manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))


@OPERATIONS.register
def unmap_memory(worker: SglangWorker, session: WorkerSession) -> None:
    """Unmap the weights again."""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

    worker.manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=[_WEIGHTS]))
