"""The worker method `lora_merge`, through which everything of a push reaches a vLLM engine.

It does not raise. vLLM's `collective_rpc` reads the workers' answers in turn and stops at the first error, so that the
answers behind it would be taken for those of the next call, and every later one for one that is past.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.config import set_current_vllm_config

from ...stream.buckets import dtype_name
from ..adapter_versions import CONSTANT_PATH
from ..configs import computing
from ..state import State
from ..worker.rpc import respond
from ..worker.session import WorkerSession
from . import internals
from .adapter import ADAPTER_ID, tower_advice, unserved_modules
from .kept import unkept
from .kept_adapters import OPERATIONS, KeptAdapters, keeper, kept_adapters
from .loading.formats import calibrated_scales, quantised_checkpoint
from .session import note_sleeps, session_of
from .step_counter import count_steps
from .tenants import limits, path_of
from .unfit import NotFirst, unfit

_LOADING = {"receive", "pull", "merge", "reload_checkpoint"}
"""Operations that may lay layers out anew, on all workers of an engine at once."""


def lora_merge(worker: Any, request: str) -> str:
    """Answer a request; see `respond`."""
    try:
        return respond(VllmWorker(worker), OPERATIONS, request, (NotFirst,))
    except NotFirst:
        # The caller reads the answers of the first engine alone; this is how it hears of others. Only the last worker
        # raises: all other answers have been read by then.
        if worker.parallel_config.rank == worker.parallel_config.world_size - 1:
            raise
        return "{}"


class VllmWorker:
    """Implements `Worker` for a worker of vLLM's.

    Args:
        raw: vLLM's own.
    """

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    @property
    def rank(self) -> int:
        return self.raw.parallel_config.rank

    @property
    def device(self) -> torch.device:
        return self.raw.device

    def stepped(self) -> int:
        return count_steps(self.raw.model_runner)

    def session(self) -> WorkerSession:
        model = self.raw.get_model()
        if model is None:
            raise RuntimeError("this engine was shut down: start a new one")
        note_sleeps(self.raw)
        return session_of(model, self.raw.model_config, self.raw.device)

    @contextmanager
    def working(self, op: str) -> Iterator[None]:
        with set_current_vllm_config(self.raw.vllm_config):
            if op in _LOADING:
                loader: Any = self.session().loader
                with loader.peers.operation():
                    yield
            else:
                yield

    def about(self, session: WorkerSession) -> dict[str, Any]:
        config, parallel = self.raw.vllm_config, self.raw.parallel_config
        lora = config.lora_config
        return {
            "world": parallel.world_size,
            "launcher": parallel.distributed_executor_backend == "external_launcher",
            "unfit": unfit(self.raw, session),
            "dtype": dtype_name(self.raw.model_config.dtype),
            "lora": None if lora is None else limits(lora),
            "connector": (config.kv_transfer_config and config.kv_transfer_config.kv_connector) or "",
            "multimodal": self.raw.model_config.is_multimodal_model or self.raw.model_config.runner_type == "pooling",
            "quantised": session.modules.kept(quantised_checkpoint),
            "unkept": unkept(config, internals.has("WeightVersionSpan")),
            "calibrated": calibrated_scales(session.modules),
            "chains": True,
            "shares": _shares(parallel),
            "computing": computing(self.raw.model_config.hf_config),
            "others": self._others(),
            **self._versions(),
        }

    def _others(self) -> list[str]:
        """Return the ids of adapters that somebody else has loaded."""
        manager = getattr(self.raw.model_runner, "lora_manager", None)
        ours = set() if self._kept is None else self._kept.numbers
        return [] if manager is None else [str(number) for number in sorted(manager.list_adapters() - ours)]

    def _versions(self) -> dict[str, Any]:
        """Return what the worker says of the versions that it keeps."""
        kept = self._kept
        if kept is None:
            return {}
        return {"kept": kept.states(leaving=False), "leaving": kept.states(leaving=True), "newest": kept.newest}

    @property
    def _kept(self) -> KeptAdapters | None:
        manager = getattr(self.raw.model_runner, "lora_manager", None)
        return None if manager is None else kept_adapters(manager)

    def served(self, session: WorkerSession, state: State) -> State:
        return state  # what vLLM drops is loaded again out of this worker's memory

    def settle(self, session: WorkerSession, weights: bool) -> None:
        if weights and hasattr(self.raw.model_runner, "reset_lora_state"):  # vLLM 0.32 on
            self.raw.model_runner.reset_lora_state()
        kept, held = self._kept, session.held
        if kept is not None:
            kept.drop([CONSTANT_PATH] if held.kind == "adapter" else [path_of(name) for name in held.tenants])
            if held.kind != "adapter":
                kept.forget()

    def unserved(self, modules: Sequence[str]) -> tuple[list[str], str]:
        manager = self.raw.model_runner.lora_manager
        unserved = unserved_modules(manager, modules)
        return unserved, tower_advice(manager, self.raw.vllm_config.lora_config, unserved)

    def load_adapter(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        manager = self.raw.model_runner.lora_manager
        keeper(manager).put(CONSTANT_PATH, ADAPTER_ID, tensors, rank)
        manager._adapter_manager.activate_adapter(ADAPTER_ID)


def _shares(parallel: Any) -> dict[str, Any] | None:
    """Return which engines compute their experts together with this one, as `Replica` has it. (vLLM lets data-parallel
    engines of dense models run each on its own, and counts one then; the processes of others are one world.)"""
    if parallel.data_parallel_size == 1:
        return None
    store: Any = dist.distributed_c10d._get_default_store()
    name = store.compare_set("lora_merge/engines", "", secrets.token_hex(8)).decode()
    return {"name": name, "engines": parallel.data_parallel_size}
