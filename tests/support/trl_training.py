"""Real TRL trainings of tiny models on a CPU: a checkpoint with a tokenizer, a configuration, what is looked at."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from torch import Tensor, nn

from lora_merge.integrations.trl.attach import attached

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


def tokenizer(base: Path) -> Any:
    """The checkpoint's, with a chat template that knows conversations."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(base)
    found.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return found


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


def arguments(out: Path, kind: type | None = None, **changes: Any) -> Any:
    """A configuration: 3 steps of 4 answers each, on the CPU, an engine in the same process.

    Args:
        kind: of TRL's configurations; default: GRPO's. What it does not know is left out, `changes` aside.
    """
    from trl import GRPOConfig

    kind = GRPOConfig if kind is None else kind
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
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in options.items() if name in known} | changes)


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


kept: list[Any] = []
"""The engine that TRL started for the first trainer of a test file. The others are given it, too: one takes seconds."""


@contextmanager
def one_engine(plain: bool = False) -> Iterator[None]:
    """TRL starts one engine inside, which takes adapters, computes in float32 and is ended afterwards.

    Args:
        plain: whether its weights keep the layout of a GPU's.
    """
    import trl.generation.vllm_generation
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        for name in [name for name in os.environ if name.startswith("LORA_MERGE")]:
            patch.delenv(name)
        if plain:
            engines.plain_layout(patch)
        start = trl.generation.vllm_generation.LLM
        chosen = {"dtype": "float32", "enforce_eager": True, "enable_lora": True, "max_lora_rank": 32}
        chosen |= {"max_num_seqs": 32, "tensor_parallel_size": 1, "quantization": None}

        def started_once(**options: Any) -> Any:
            if not kept:
                kept.append(start(**options | chosen))
            return kept[0]

        patch.setattr(trl.generation.vllm_generation, "LLM", started_once)
        yield
    for llm in kept:
        llm.llm_engine.engine_core.shutdown()
    kept.clear()
    gc.collect()
    cleanup_dist_env_and_memory()


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[None]:
    with one_engine():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("trl") / "base")


@contextmanager
def letting_go() -> Iterator[Callable[[Any], Any]]:
    """Trainers that are passed to what this gives let go of the engine afterwards."""
    made: list[Any] = []

    def note(trainer: Any) -> Any:
        made.append(trainer)
        return trainer

    yield note
    for trainer in made:
        let_go(trainer)
    made.clear()
    gc.collect()


def let_go(trainer: Any) -> None:
    rollout = attached(trainer)
    if rollout is not None:
        rollout.detach()


def assert_all_ratios(trainer: Any, steps: int) -> None:
    """In float32 the engine's log-probs of every token of every step are the trainer's."""
    for name in ("lora_merge/ratio_min", "lora_merge/ratio_max"):
        ratios = logged(trainer, name)
        assert len(ratios) == steps
        assert all(abs(ratio - 1) < 1e-4 for ratio in ratios), ratios
