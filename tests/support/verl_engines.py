"""verl's real FSDP engines for tests, on CPUs; what they need is not vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry

FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def engine_of(folder: Path, **changes: Any) -> Any:
    """verl's engine for language models, whoever registered it, of strategy fsdp2 unless said otherwise; initialised.

    Args:
        changes: fields of its configurations.
    """
    model = {
        "path": str(folder),
        "lora_rank": 8,
        "lora_alpha": 32,
        "lora": {"merge": True},
        "use_remove_padding": False,
        "enable_gradient_checkpointing": False,
        "override_config": {"attn_implementation": "eager"},
    }
    engine = {
        "strategy": "fsdp2",
        "use_torch_compile": False,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "use_remove_padding": False,
        "mixed_precision": FLOAT32,
    }
    optimizer = {"lr": 1e-2, "total_training_steps": 10}
    model |= {name: value for name, value in changes.items() if name in HFModelConfig.__dataclass_fields__}
    engine |= {name: value for name, value in changes.items() if name in FSDPEngineConfig.__dataclass_fields__}
    made = EngineRegistry.new(
        model_type="language_model",
        backend=engine["strategy"],
        model_config=HFModelConfig(**model),
        engine_config=FSDPEngineConfig(**engine),
        optimizer_config=FSDPOptimizerConfig(**optimizer),
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    return made
