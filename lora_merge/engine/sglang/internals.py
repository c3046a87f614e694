"""Every name of SGLang's that is used, in its schedulers and of an `sglang.Engine`, and belongs to no interface that
SGLang promises.

Read in SGLang 0.5.17 and 0.5.23; run with both.
"""

from __future__ import annotations

from typing import Any

SUPPORTED = "0.5.17 and 0.5.23"
_OF_MANAGERS = (
    "scheduler",
    "tp_worker",
    "draft_worker",
    "tp_cpu_group",
    "offload_tags",
    "is_fully_idle",
    "memory_saver_adapter",
)
_OF_SCHEDULERS = (
    "pause_generation",
    "flush_cache",
    "waiting_queue",
    "running_batch",
    "last_batch",
    "chunked_req",
    "grammar_manager",
    "server_args",
    "model_config",
    "_engine_paused",
)
_OF_ARGUMENTS = (
    "cpu_offload_gb",
    "disaggregation_mode",
    "dp_size",
    "enable_dp_attention",
    "enable_eplb",
    "enable_hierarchical_cache",
    "enable_lmcache",
    "enable_lora",
    "enable_weights_cpu_backup",
    "ep_num_redundant_experts",
    "init_expert_location",
    "model_impl",
    "offload_group_size",
    "pp_size",
    "speculative_algorithm",
    "tp_size",
    "weight_cache_mode",
)
_OF_LORA = (
    "loras",
    "target_modules",
    "max_lora_rank",
    "dtype",
    "load_lora_adapter_from_tensors",
    "unload_lora_adapter",
)
_OF_TOKENIZERS = (
    "check_weights",
    "continue_generation",
    "event_loop",
    "is_pause",
    "is_pause_cond",
    "lora_registry",
    "pause_generation",
)
_LABELS = ("update_weight_version", "_update_weight_version_if_provided")
"""The second one of SGLang 0.5.17."""
_OF_REGISTRIES = ("get_unregistered_loras", "register", "unregister")


def unknown_release(lacks: list[str]) -> str:
    """Why an SGLang that lacks this cannot be pushed to, in words that follow the engine's name; "" for nothing."""
    import sglang

    return (
        f"runs SGLang {sglang.__version__}, which does not offer {', '.join(lacks)}; {SUPPORTED} are supported: "
        "install one of these"
        if lacks
        else ""
    )


def handle_lacks(engine: Any) -> list[str]:
    """As `lacks`, of an `sglang.Engine` in the process that started it."""
    manager = engine.tokenizer_manager
    registry = getattr(manager, "lora_registry", None)
    asked = [(engine, ("loop",)), (manager, _OF_TOKENIZERS)]
    if registry is not None:
        asked.append((registry, _OF_REGISTRIES))
    labels = [] if any(hasattr(manager, name) for name in _LABELS) else [f"{type(manager).__name__}.{_LABELS[0]}"]
    return _lacking(asked) + labels


def lacks(manager: Any) -> list[str]:
    """What the SGLang of a scheduler does not have of all that is used here, by dotted name."""
    scheduler = getattr(manager, "scheduler", None)
    arguments = getattr(scheduler, "server_args", None)
    runner = getattr(getattr(manager, "tp_worker", None), "model_runner", None)
    asked = [(manager, _OF_MANAGERS), (scheduler, _OF_SCHEDULERS), (arguments, _OF_ARGUMENTS), (runner, ("model",))]
    if getattr(arguments, "enable_lora", False):
        asked.append((getattr(runner, "lora_manager", None), _OF_LORA))
    return _lacking(asked)


def _lacking(asked: list[tuple[Any, tuple[str, ...]]]) -> list[str]:
    return [f"{type(one).__name__}.{name}" for one, names in asked for name in names if not hasattr(one, name)]
