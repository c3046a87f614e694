"""Names of SGLang's that are used, in its schedulers and of an `sglang.Engine`, and belong to no interface that SGLang
promises.

Read in SGLang 0.5.17 and 0.5.23; run with both.
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
from typing import Any

RELEASES = ("0.5.17", "0.5.23")
SUPPORTED = " and ".join(RELEASES)
REGISTRY = "sglang.srt.plugins.hook_registry.HookRegistry"
"""The registry of hooks."""
PREFIX = "lora_merge:"
"""Begins actions of `check_weights` that are requests of this package; JSON follows."""
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
HOOKED = f"{_MANAGER}.check_weights"
"""A scheduler's method that takes a string and returns one, on every rank, also while generation stands still."""
RELEASE_MEMORY = f"{_MANAGER}.release_memory_occupation"
"""A scheduler's method that unmaps what its memory saver has made."""
RESUME_MEMORY = f"{_MANAGER}.resume_memory_occupation"
"""A scheduler's method that maps it again."""
PENALTIES = "sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.__init__"
"""What makes the penalties of a batch, in a scheduler."""
QUEUE_LIMIT = "sglang.srt.managers.scheduler.Scheduler._abort_on_queued_limit"
"""A scheduler's method that ends a request for which its queue has no place (`max_queued_requests`)."""
RETRACT = "sglang.srt.managers.schedule_batch.Req.reset_for_retract"
"""A request's method that forgets what was computed of it, as it goes back to the queue."""
_PLUGIN = (REGISTRY, HOOKED, RELEASE_MEMORY, RESUME_MEMORY, PENALTIES, QUEUE_LIMIT, RETRACT)
"""What the plugin takes and hooks, by path, as all names that follow."""
_STRUCTURES = "sglang.srt.managers.io_struct."
_OF_CALLERS = tuple(
    _STRUCTURES + name for name in ("CheckWeightsReqInput", "ContinueGenerationReqInput", "PauseGenerationReqInput")
)
_OF_WORKERS: tuple[str, ...] = (
    f"{_STRUCTURES}CheckWeightsReqOutput",
    f"{_STRUCTURES}PauseGenerationReqInput",
    f"{_STRUCTURES}ReleaseMemoryOccupationReqInput",
    f"{_STRUCTURES}ResumeMemoryOccupationReqInput",
    "sglang.srt.layers.quantization.unquant",
    "sglang.srt.lora.layers.BaseLayerWithLoRA",
)
_LORA_REFERENCE = "sglang.srt.lora.lora_registry.LoRARef"
_LORA_MODULES = "sglang.srt.lora.utils.get_normalized_target_modules"
_OF_MANAGERS = (
    *("scheduler", "tp_worker", "draft_worker", "tp_cpu_group", "is_fully_idle"),
    *("offload_tags", "memory_saver_adapter", "release_memory_occupation", "resume_memory_occupation"),
)
_OF_SCHEDULERS = (
    *("waiting_queue", "running_batch", "last_batch", "chunked_req", "grammar_manager", "forward_ct"),
    *("pause_generation", "_engine_paused", "flush_cache", "server_args", "model_config"),
)
_OF_ARGUMENTS = (
    *("pp_size", "dp_size", "enable_dp_attention", "disaggregation_mode", "tokenizer_worker_num"),
    *("enable_eplb", "ep_num_redundant_experts", "init_expert_location"),
    *("cpu_offload_gb", "offload_group_size", "enable_weights_cpu_backup", "weight_cache_mode"),
    *("enable_hierarchical_cache", "enable_lmcache", "kv_cache_dtype", "quantization_param_path"),
    *("enable_lora", "model_impl", "speculative_algorithm", "device", "enable_torch_compile"),
)
_OF_LORA = (
    *("loras", "target_modules", "max_lora_rank", "dtype"),
    *("load_lora_adapter_from_tensors", "unload_lora_adapter"),
)
_OF_TOKENIZERS = (
    *("check_weights", "lora_registry", "event_loop"),
    *("pause_generation", "continue_generation", "is_pause", "is_pause_cond"),
    *("rid_to_state", "abort_request", "_validate_and_resolve_lora"),
)
_LABELS = ("update_weight_version", "_update_weight_version_if_provided")
"""The second one of SGLang 0.5.17."""
_OF_REGISTRIES = ("get_unregistered_loras", "register", "unregister")
_EMBEDDING_CACHES = ("sglang.srt.managers.mm_utils.embedding_cache", "sglang.srt.managers.mm_schedule.embedding_cache")
"""Where a scheduler keeps what encoders made of images; the first one in SGLang 0.5.17."""


def installed() -> str:
    """Return the version of SGLang in this process."""
    import sglang

    return str(sglang.__version__)


def unknown_release(lacks: list[str]) -> str:
    """Return why an SGLang that lacks these names cannot be pushed to, in words that follow the engine's name; "" for
    none."""
    return (
        f"runs SGLang {installed()}, which does not offer {', '.join(lacks)}; {SUPPORTED} are supported: "
        "install one of these"
        if lacks
        else ""
    )


def handle_lacks(engine: Any) -> list[str]:
    """Return the names that an `sglang.Engine` lacks in the process that started it; its schedulers run the same
    SGLang."""
    manager = engine.tokenizer_manager
    registry = getattr(manager, "lora_registry", None)
    asked, paths = [(engine, ("loop",)), (manager, _OF_TOKENIZERS)], _PLUGIN + _OF_CALLERS
    if registry is not None:
        asked.append((registry, _OF_REGISTRIES))
        paths += (_LORA_REFERENCE,)
    labels = [] if any(hasattr(manager, name) for name in _LABELS) else [f"{type(manager).__name__}.{_LABELS[0]}"]
    return [*_unresolved(paths), *_lacking(asked), *labels]


def lacks(manager: Any) -> list[str]:
    """Return the names, dotted, that a scheduler's SGLang lacks of all that is used here."""
    scheduler = getattr(manager, "scheduler", None)
    arguments = getattr(scheduler, "server_args", None)
    runner = getattr(getattr(manager, "tp_worker", None), "model_runner", None)
    asked = [(manager, _OF_MANAGERS), (scheduler, _OF_SCHEDULERS), (arguments, _OF_ARGUMENTS), (runner, ("model",))]
    paths = _PLUGIN + _OF_WORKERS
    if getattr(arguments, "enable_lora", False):
        asked.append((getattr(runner, "lora_manager", None), _OF_LORA))
        paths += (_LORA_REFERENCE, _LORA_MODULES)
    seeing = getattr(getattr(scheduler, "model_config", None), "is_multimodal", False)
    caches = _EMBEDDING_CACHES[:1] if seeing and embedding_cache() is None else ()
    return [*_unresolved(paths), *_lacking(asked), *caches]


def embedding_cache() -> Any:
    """Return the scheduler's cache of encoders' outputs, by the hashes of images; None where SGLang has moved it."""
    for path in _EMBEDDING_CACHES:
        with contextlib.suppress(ImportError, AttributeError):
            return pkgutil.resolve_name(path)
    return None


def _lacking(asked: list[tuple[Any, tuple[str, ...]]]) -> list[str]:
    return [f"{type(one).__name__}.{name}" for one, names in asked for name in names if not hasattr(one, name)]


@functools.cache  # a hello asks, in every push
def _unresolved(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths that lead nowhere. When a hook finds no target, SGLang only logs it."""
    lacking = []
    for path in paths:
        try:
            pkgutil.resolve_name(path)
        except (ImportError, AttributeError):
            lacking.append(path)
    return tuple(lacking)
