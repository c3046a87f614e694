"""Real TRL trainings of tiny models on a CPU: a checkpoint with a tokenizer, a configuration, what is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engines
import torch
from torch import Tensor, nn

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LETTERS = "abcdefghijklmnop"
GREEDY_TOKENS = 6


def checkpoint(folder: Path, model: nn.Module | None = None, dtype: torch.dtype = torch.float32) -> Path:
    """A tiny Qwen2 with random weights that are large enough to have opinions, and bytes as tokens."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2TokenizerFast

    torch.manual_seed(0)
    model = engines.qwen2() if model is None else model
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 5
    model.to(dtype).save_pretrained(folder)
    vocabulary = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    # The models have 256 tokens: what nobody writes stands for the end and the padding.
    ends = {"eos_token": "ÿ", "pad_token": "þ", "unk_token": "þ"}
    Qwen2TokenizerFast(vocab=vocabulary, merges=[], **ends).save_pretrained(folder)
    return folder


def lora(**changes: Any) -> Any:
    """A PEFT configuration whose adapter acts from the first step."""
    from peft import LoraConfig

    return LoraConfig(**{"r": 8, "lora_alpha": 16, "target_modules": TARGETS, "init_lora_weights": False} | changes)


def prompts(count: int = 16) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [LETTERS[i % 7 : i % 7 + 2 + i % 5] for i in range(count)]})


def vowels(completions: Sequence[str], **kwargs: Any) -> list[float]:
    """A reward that differs between answers."""
    return [sum(ord(character) % 3 for character in text) / 10 for text in completions]


def arguments(out: Path, kind: str = "GRPO", **changes: Any) -> Any:
    """A configuration: 3 steps of 4 answers each, on the CPU, an engine in the same process."""
    import trl

    options: dict[str, Any] = {
        "output_dir": str(out),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": GREEDY_TOKENS,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": 64,
        "vllm_gpu_memory_utilization": 0.3,
        "gradient_checkpointing": False,
        "seed": 7,
    }
    return getattr(trl, f"{kind}Config")(**options | changes)


def logged(trainer: Any, name: str) -> list[float]:
    """What a trainer's history says under a name, step by step."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def policy(base: Path, state: dict[str, Tensor], *configs: Any) -> nn.Module:
    """A model in float64 that holds a policy, apart from the trainer's (whose forward TRL replaces): what PEFT computes
    of base and adapters, nothing merged.

    Args:
        base: the checkpoint that training began with.
        state: of the trainer's model.
        configs: of its adapters; all of them act.
    """
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    if configs:
        model = get_peft_model(model, configs[0], "default")
    for number, config in enumerate(configs[1:]):
        model.add_adapter(f"more{number}", config)
        model.base_model.set_adapter(["default", *(f"more{i}" for i in range(number + 1))])
    model.load_state_dict(state)
    return model.double().eval()


def base_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of what is not trained."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}


def changed(model: nn.Module, before: dict[str, Tensor]) -> int:
    """Elements of the base that have other bits now."""
    now = dict(model.named_parameters())
    return sum(int((now[name].detach().ne(tensor)).sum()) for name, tensor in before.items())


def shut(llm: Any) -> None:
    """End an engine that TRL has started, for the next one in this process."""
    import gc

    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    gc.collect()
    cleanup_dist_env_and_memory()
