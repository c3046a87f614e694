"""Every name of SGLang's that is used in its schedulers and belongs to no interface that SGLang promises.

Read in SGLang 0.5.17 and 0.5.23; run with both.
"""

from __future__ import annotations

from typing import Any

SUPPORTED = "0.5.17 and 0.5.23"
_OF_MANAGERS = ("scheduler", "tp_worker", "draft_worker", "tp_cpu_group", "offload_tags", "is_fully_idle")
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


def lacks(manager: Any) -> list[str]:
    """What the SGLang of a scheduler does not have of all that is used here, by dotted name."""
    scheduler = getattr(manager, "scheduler", None)
    arguments = getattr(scheduler, "server_args", None)
    runner = getattr(getattr(manager, "tp_worker", None), "model_runner", None)
    asked = [(manager, _OF_MANAGERS), (scheduler, _OF_SCHEDULERS), (arguments, _OF_ARGUMENTS), (runner, ("model",))]
    if getattr(arguments, "enable_lora", False):
        asked.append((getattr(runner, "lora_manager", None), _OF_LORA))
    return [f"{type(one).__name__}.{name}" for one, names in asked for name in names if not hasattr(one, name)]
