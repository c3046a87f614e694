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
from vllm import envs
from vllm.config import set_current_vllm_config

from ..operations import OPS
from ..replica import ONE_ENGINE
from ..side import Side
from ..state import State
from ..worker import respond
from . import internals, own
from .adapter import ADAPTER_ID, load_adapter, remove_adapter, unserved_modules
from .backend import LoraMergeWeightTransferEngine
from .control import other_backend
from .formats import calibrated_scales, quantised_checkpoint, refusal, stale_scales
from .plugin import BACKEND
from .side import side_of
from .stepped import stepped

_WITHOUT_WEIGHTS = {"ngram", "ngram_gpu", "suffix"}
"""Methods of speculative decoding that draft without a model."""
_BARRED = "flashinfer_moe_ep"
"""Where vLLM has experts whose layout cannot be loaded again; it does not choose them for an engine that was started
for weight transfer (0.32)."""
_OPS = {**OPS, **own.OPS}
_LOADING = {"receive", "pull", "merge", "reread"}
"""Operations in which layers are laid out anew, on all workers of an engine at once."""


class NotFirst(RuntimeError):
    """Raised in engines of a data-parallel group other than the first: vLLM calls all of them and returns the first
    one's answer only, so a push through this handle is refused."""


def lora_merge(worker: Any, request: str) -> str:
    """The worker method; see `respond`."""
    try:
        return respond(VllmWorker(worker), _OPS, request, (NotFirst,))
    except NotFirst:
        # The caller reads the answers of the first engine alone; this is how it hears of others. Only the last worker
        # raises: all other answers have been read by then.
        if worker.parallel_config.rank == worker.parallel_config.world_size - 1:
            raise
        return "{}"


class VllmWorker:
    """A worker of vLLM's in a push: a `Worker`.

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
        return stepped(self.raw.model_runner)

    def side(self) -> Side:
        return side_of(self.raw.get_model(), self.raw.model_config, self.raw.device)

    @contextmanager
    def working(self, op: str) -> Iterator[None]:
        with set_current_vllm_config(self.raw.vllm_config):
            if op in _LOADING:
                loader: Any = self.side().loader
                with loader.together.at_work():
                    yield
            else:
                yield

    def about(self, side: Side) -> dict[str, Any]:
        config, parallel = self.raw.vllm_config, self.raw.parallel_config
        lora = config.lora_config
        return {
            "world": parallel.world_size,
            "launcher": parallel.distributed_executor_backend == "external_launcher",
            "unfit": _unfit(self.raw, side),
            "dtype": str(self.raw.model_config.dtype).removeprefix("torch."),
            "lora": None if lora is None else {"max_rank": lora.max_lora_rank, "dtype": _lora_dtype(lora)},
            "connector": config.kv_transfer_config is not None,
            "multimodal": bool(self.raw.model_config.is_multimodal_model),
            "quantised": side.modules.kept(quantised_checkpoint),
            "calibrated": calibrated_scales(side.modules),
            "shares": _shares(parallel),
        }

    def served(self, side: Side, state: State) -> State:
        if state.kind == "adapter" and ADAPTER_ID not in self.raw.list_loras():
            side.evicted()
            return side.held
        return state

    def settle(self, side: Side, weights: bool) -> None:
        if weights and hasattr(self.raw.model_runner, "reset_lora_state"):  # vLLM 0.32 on
            self.raw.model_runner.reset_lora_state()
        if self.raw.vllm_config.lora_config is not None and side.held.kind != "adapter":
            remove_adapter(self.raw.model_runner.lora_manager)

    def unserved(self, modules: Sequence[str]) -> list[str]:
        return unserved_modules(self.raw.model_runner.lora_manager, modules)

    def load_adapter(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        load_adapter(self.raw.model_runner.lora_manager, tensors, rank)


def _unfit(worker: Any, side: Side) -> str:
    """Why no push can reach this engine, in words that follow its name; "" where one can.

    Raises:
        NotFirst: as of `_engines`.
    """
    import vllm

    if lacks := internals.lacks(worker):
        return f"runs vLLM {vllm.__version__}, which does not offer {', '.join(lacks)}; 0.26 and 0.32 are supported"
    if (backend := _backend(worker)) not in ("", BACKEND):
        return other_backend(backend)
    if barred := _barred(worker, side):
        return (
            f"chose a layout for {barred} that cannot be loaded again, which vLLM avoids in engines that are started "
            f'for weight transfer: pass weight_transfer_config=WeightTransferConfig(backend="{BACKEND}")'
        )
    if getattr(worker, "_weight_update_active", False):
        return "is in the middle of a weight update of vLLM's own: finish it first (finish_weight_update)"
    if draft := _draft(worker.vllm_config.speculative_config):
        return (
            f"drafts tokens with a model ({draft}), which would keep the weights that it started with, and no push "
            "reaches it: start the engine without speculative_config, or with a method that has no weights "
            '("ngram", "suffix")'
        )
    if refused := side.modules.kept(refusal):
        return refused
    load_format = str(worker.model_runner.load_config.load_format)
    if stale := stale_scales(worker.cache_config, load_format, calibrated_scales(side.modules)):
        return stale
    if _engines(worker.parallel_config) > 1:
        return f"is {ONE_ENGINE}"
    if worker.parallel_config.enable_eplb:
        return (
            "moves its experts about (enable_eplb), and a push would put them where they were at first: start it with "
            "enable_eplb=False"
        )
    return ""


def _engines(parallel: Any) -> int:
    """Return how many engines this engine's handle reaches: vLLM calls all of them, and returns the first one's answer.

    Raises:
        NotFirst: this is not the first. (vLLM configures the engines of dense models as if each were alone, but for
            their number, which is the only way to see it there.)
    """
    if parallel.data_parallel_external_lb or envs.VLLM_DP_SIZE > 1:  # a handle for each
        return 1
    if getattr(parallel, "data_parallel_hybrid_lb", False):
        count, number = parallel.data_parallel_size_local, parallel.data_parallel_rank_local or 0
    else:
        count, number = parallel.data_parallel_size, parallel.data_parallel_index
    if number:
        raise NotFirst(f"this is number {number} of {ONE_ENGINE}")
    return int(count)


def _shares(parallel: Any) -> dict[str, Any] | None:
    """With which engines this one computes its experts, as of `Replica`. (vLLM lets data-parallel engines of dense
    models run each on its own, and counts one then; the processes of others are one world.)"""
    if parallel.data_parallel_size == 1:
        return None
    store: Any = dist.distributed_c10d._get_default_store()
    name = store.compare_set("lora_merge/engines", "", secrets.token_hex(8)).decode()
    return {"name": name, "engines": parallel.data_parallel_size}


def _backend(worker: Any) -> str:
    """For which weight-transfer backend the engine was started: "" for none."""
    if isinstance(getattr(worker, "weight_transfer_engine", None), LoraMergeWeightTransferEngine):
        return "lora_merge"
    config = getattr(worker.vllm_config, "weight_transfer_config", None)
    return "" if config is None else str(config.backend)


def _barred(worker: Any, side: Side) -> str:
    """Return a module whose packed layout vLLM would not have chosen for an engine started for weight transfer; "" for
    none."""
    if _backend(worker):
        return ""
    for path, module in side.modules.paths():
        method = getattr(module, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        for part in (module, method, kernel, getattr(kernel, "fused_experts", None)):
            if _BARRED in type(part).__module__:
                return f"{path} ({type(part).__name__})"
    return ""


def _draft(speculative: Any) -> str:
    """By which method drafts are made with weights of their own: "" where none are."""
    method = "" if speculative is None else str(speculative.method)
    return "" if method in _WITHOUT_WEIGHTS else method


def _lora_dtype(lora: Any) -> str:
    return str(lora.lora_dtype).removeprefix("torch.")
