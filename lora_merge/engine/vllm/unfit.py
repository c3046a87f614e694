"""Which of vLLM's engines no push can reach, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm import envs

from ..push.replica import ONE_ENGINE
from ..unfit import Reason, first, where
from ..worker.session import WorkerSession
from . import internals
from .backend import LoraMergeWeightTransferEngine
from .loading.formats import calibrated_scales, refusal, stale_scales
from .names import BACKEND, other_backend

_WITHOUT_WEIGHTS = {"ngram", "ngram_gpu", "suffix"}
"""Methods of speculative decoding that draft without a model."""
_TOKENS = "classifier_from_token"
"""The setting of rerankers that vLLM makes of generating models as it loads them."""
_BARRED = "flashinfer_moe_ep"
"""The package of vLLM's with experts whose layout cannot be loaded again. vLLM does not choose them for an engine that
was started for weight transfer (0.32)."""
_SHARED_STORES = {"MooncakeStoreConnector", "LMCacheMPConnector"}
"""KV connectors whose blocks lie in a store that other engines fill, too: forgetting what one has put there is not
enough. (The second one is LMCache's own, given by `kv_connector_module_path`: its reset empties the first tier alone,
and there leaves blocks that are being read.)"""
_RESET_SPECS = {"CPUOffloadingSpec"}
"""Stores of vLLM's `OffloadingConnector` that its reset empties. (Of tiers it empties the first alone.)"""


class NotFirst(RuntimeError):
    """Raised in engines of a data-parallel group other than the first: vLLM calls all of them and returns the first
    one's answer only, so a push through this handle is refused."""


def unfit(worker: Any, session: WorkerSession) -> str:
    """Return why no push can reach an engine, in words that follow its name; "" where one can.

    Args:
        worker: vLLM's own.

    Raises:
        NotFirst: the worker belongs to an engine of a data-parallel group other than the first.
    """
    import vllm

    if lacks := internals.lacks(worker):
        return f"runs vLLM {vllm.__version__}, which does not offer {', '.join(lacks)}; 0.26 and 0.32 are supported"
    if (backend := backend_of(worker)) not in ("", BACKEND):
        return other_backend(backend)
    if barred := _barred(worker, session):
        return (
            f"chose a layout for {barred} that cannot be loaded again, which vLLM avoids in engines that are started "
            f'for weight transfer: pass weight_transfer_config=WeightTransferConfig(backend="{BACKEND}")'
        )
    if why := first(_REFUSED, worker):
        return why
    if refused := session.modules.kept(refusal):
        return refused
    load_format = str(worker.model_runner.load_config.load_format)
    if stale := stale_scales(worker.cache_config, load_format, calibrated_scales(session.modules)):
        return stale
    if _engines(worker.parallel_config) > 1:
        return f"is {ONE_ENGINE}"
    return ""


def _drafts(worker: Any) -> str:
    speculative = worker.vllm_config.speculative_config
    method = "" if speculative is None else str(speculative.method)
    if not method or method in _WITHOUT_WEIGHTS:
        return ""
    return (
        f"drafts tokens with a model ({method}), which would keep the weights that it started with, and no push "
        "reaches it: start the engine without speculative_config, or with a method that has no weights "
        '("ngram", "suffix")'
    )


def _offloads(worker: Any) -> str:
    config, engram = worker.vllm_config.offload_config, getattr(worker.vllm_config, "engram_config", None)
    backend = config.offload_backend
    if backend in ("auto", "prefetch") and config.prefetch.offload_group_size > 0:
        found = f"offload_group_size={config.prefetch.offload_group_size}"
    elif backend in ("auto", "uva") and config.uva.cpu_offload_gb > 0:
        found = f"cpu_offload_gb={config.uva.cpu_offload_gb}"
    elif backend not in ("auto", "prefetch", "uva"):
        found = f"offload_backend={backend!r}"
    elif engram is not None and engram.cpu_offload:  # vLLM's default, for models that have such embeddings
        return (
            "keeps n-gram embeddings in the host's memory (engram_config), which a push does not reach: start it with "
            'engram_config={"cpu_offload": False}'
        )
    else:
        return ""
    return (
        f"keeps weights in the host's memory ({found}), and fetches them from there over what a push has written: "
        "start it without this setting, on more GPUs if need be (tensor_parallel_size)"
    )


def _keeps_blocks(worker: Any) -> str:
    config = worker.vllm_config.kv_transfer_config
    if config is None or not config.kv_connector:
        return ""
    if config.kv_role != "kv_both":
        return (
            f"serves prefill and decode apart (kv_role={config.kv_role!r}), where cached blocks of the old weights lie "
            "in other engines, too: start it without kv_transfer_config"
        )
    if not internals.has_kv_transfer_group():
        return (
            f"has a KV connector ({config.kv_connector}) that is not found in its worker, so that nothing is known of "
            "what it keeps: start the engine without kv_transfer_config"
        )
    found = ((type(one).__name__, _outlasts(one)) for one in _connectors(internals.get_kv_transfer_group()))
    return next((_CONNECTOR.format(name=name, why=why) for name, why in found if why), "")


_CONNECTOR = (
    "has a KV connector ({name}) that {why}, so that cached blocks of the old weights would answer after a push: start "
    "the engine without it (kv_transfer_config, kv_offloading_size). OffloadingConnector and SimpleCPUOffloadConnector "
    "can be kept"
)


def _outlasts(connector: Any) -> str:
    """Return why blocks outlast a reset of their connector, in words that follow it; "" where they do not."""
    kind = type(connector)
    if kind.reset_cache is internals.KVConnectorBase_V1.reset_cache:  # which says that all is well
        return "forgets nothing (it does not override reset_cache)"
    if any(base.__name__ in _SHARED_STORES for base in kind.__mro__):
        return "has its blocks in a store for several engines, where others still put those of the old weights"
    extra = connector._kv_transfer_config.kv_connector_extra_config or {}
    spec = extra.get("spec_name", "CPUOffloadingSpec")
    if any(base.__name__ == "OffloadingConnector" for base in kind.__mro__) and spec not in _RESET_SPECS:
        return f"keeps blocks where its reset does not reach (spec_name={spec!r})"
    return ""


def _connectors(connector: Any) -> Iterator[Any]:
    """Yield a KV connector, and those that it passes calls on to."""
    yield connector
    for value in vars(connector).values():
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        for one in held:
            if isinstance(one, internals.KVConnectorBase_V1) and one is not connector:
                yield from _connectors(one)


def _keeps_encodings(worker: Any) -> str:
    config = worker.vllm_config.ec_transfer_config
    if config is not None and config.ec_connector:
        return (
            f"shares what its encoder makes of images through {config.ec_connector} (ec_transfer_config), which vLLM "
            "cannot reset, so that images encoded with the old weights would be answered from after a push: start it "
            "without ec_transfer_config"
        )
    manager = getattr(getattr(worker.vllm_config, "ec_manager_config", None), "encoder_cache_manager_cls", None)
    if not manager:
        return ""
    return (
        f"has an encoder cache of its own ({manager}, ec_manager_config), of which it is not known whether it "
        "forgets what the old weights made: start it without"
    )


def _scores(worker: Any) -> str:
    runner = worker.model_runner
    owner = runner if hasattr(runner, "late_interaction_runner") else getattr(runner, "pooling_runner", None)
    waiting = getattr(getattr(owner, "late_interaction_runner", None), "_query_cache", None)
    if not waiting:
        return ""
    return (
        f"has embedded {len(waiting)} queries whose documents it has not scored yet, and would compare them with "
        "documents of other weights: push when these requests have ended (or, if there are none, after "
        "reset_encoder_cache())"
    )


def _classifies_by_tokens(worker: Any) -> str:
    model = worker.model_config
    configs = model.hf_config, model.hf_config.get_text_config()
    if model.runner_type != "pooling" or not any(getattr(one, _TOKENS, None) for one in configs):
        return ""
    return (
        f"makes its classifier of rows of a head that it keeps no longer ({_TOKENS}), each time that it loads "
        "anything: a push brings tensors one after another, and rows of one that has not come would take its place. "
        "Start it on the model as a sequence classifier (with score.weight in its checkpoint), and train that"
    )


def _compiles_weights_in(worker: Any) -> str:
    options = worker.vllm_config.compilation_config.inductor_compile_config
    set_ = [name for name in ("freezing", "max_autotune") if options.get(name)]
    if worker.device.type != "cpu" and "freezing" not in set_:
        return ""  # there the second one chooses kernels alone
    if worker.model_config.enforce_eager or not set_:
        return ""
    return (
        f"compiles its weights in as constants (inductor_compile_config: {set_[0]}), which a push does not reach: "
        "start it without this option, or with enforce_eager=True"
    )


_REFUSED: tuple[Reason, ...] = (
    where(
        lambda worker: getattr(worker, "_weight_update_active", False),
        "is in the middle of a weight update of vLLM's own: finish it first (finish_weight_update)",
    ),
    _drafts,
    _offloads,
    where(
        lambda worker: str(worker.vllm_config.load_config.load_format) == "ipc_cache",  # vLLM 0.32 on
        'has its weights from a daemon that gives the same memory to other engines (load_format="ipc_cache"), which a '
        "push to one of them would change: start it with another load_format",
    ),
    _keeps_blocks,
    _keeps_encodings,
    _scores,
    _classifies_by_tokens,
    _compiles_weights_in,
    where(
        lambda worker: worker.parallel_config.enable_eplb,
        "moves its experts about (enable_eplb), and a push would put them where they were at first: start it with "
        "enable_eplb=False",
    ),
)
"""Settings under which something that belongs to the old weights outlives a push, of vLLM's worker."""


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


def backend_of(worker: Any) -> str:
    """Return the weight-transfer backend that an engine was started for; "" for none."""
    if isinstance(getattr(worker, "weight_transfer_engine", None), LoraMergeWeightTransferEngine):
        return BACKEND
    config = getattr(worker.vllm_config, "weight_transfer_config", None)
    return "" if config is None else str(config.backend)


def _barred(worker: Any, session: WorkerSession) -> str:
    """Return a module whose packed layout vLLM would not have chosen for an engine started for weight transfer; "" for
    none."""
    if backend_of(worker):
        return ""
    for path, module in session.modules.paths():
        method = getattr(module, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        for part in (module, method, kernel, getattr(kernel, "fused_experts", None)):
            if _BARRED in type(part).__module__:
                return f"{path} ({type(part).__name__})"
    return ""
