"""Bases and adapters on disk, of tiny models of the real classes, for the tests of saving; and what lies there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn

EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def tied() -> nn.Module:
    return models.qwen2(tied=True)


KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "qwen2": (models.qwen2, {}),
    "bf16": (models.qwen2, {"dtype": torch.bfloat16}),
    "bf16 adapters": (models.qwen2, {"dtype": torch.bfloat16, "adapter_dtype": torch.bfloat16}),
    "tied, rslora": (tied, {"use_rslora": True}),
    "patterns": (models.qwen2, {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"up_proj": 32}}),
    "lora_bias": (models.qwen2, {"target_modules": ["q_proj", "v_proj"], "lora_bias": True}),
    "gpt2": (models.gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "gpt2 dora": (models.gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
    "dora": (models.qwen2, {"use_dora": True, "dtype": torch.bfloat16}),
    "mixtral": (models.mixtral, EXPERTS),
    "qwen3_moe": (models.qwen3_moe, EXPERTS),
    "gpt_oss": (models.gpt_oss, EXPERTS),
    "whole": (models.qwen2, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "bias": "all"}),
    "embeddings": (models.qwen2, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "embedding of a tied model": (tied, {"target_modules": ["q_proj", "embed_tokens"]}),
    "head of a tied model": (tied, {"target_modules": ["q_proj", "lm_head"]}),
    "copy of the embedding of a tied model": (
        tied,
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ),
    "copy of the head of a tied model": (tied, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "both of a tied model": (tied, {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}),
}


def write_base(folder: Path, build: Callable[[], nn.Module], dtype: torch.dtype, shard: str = "5GB") -> Any:
    """A base as transformers saves it."""
    torch.manual_seed(7)
    model: Any = build().to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def write_adapter(folder: Path, base: Path, build: Callable[[], nn.Module], seed: int = 0, **config: Any) -> Any:
    """An adapter as PEFT saves it, every tensor of which was changed by training."""
    model = models.with_lora(build, seed=seed, **config)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.peft_config["default"].task_type = "CAUSAL_LM"
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder, save_embedding_layers=False)
    return model


def pair(kind: str, folder: Path, shard: str = "5GB") -> tuple[Path, Path]:
    """A base and an adapter."""
    build, options = KINDS[kind]
    write_base(folder / "base", build, options.get("dtype", torch.float32), shard)
    write_adapter(folder / "adapter", folder / "base", build, **options)
    return folder / "base", folder / "adapter"


def load(base: Path, *adapters: Path) -> Any:
    """The model with all of the adapters active, as PEFT loads it."""
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapters[0], adapter_name="n0"
    )
    for number, adapter in enumerate(adapters[1:], start=1):
        model.load_adapter(adapter, f"n{number}")
    model.base_model.set_adapter([f"n{number}" for number in range(len(adapters))])
    return model.eval()


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, which its index names where there is one."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        inside = load_file(file)
        assert not found.keys() & inside.keys()
        found |= inside
    index = folder / "model.safetensors.index.json"
    if index.exists():
        told = json.loads(index.read_text())
        assert told["weight_map"].keys() == found.keys()
        assert told["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
        for name, file in told["weight_map"].items():
            assert name in load_file(folder / file), name
    return found


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """The same names, dtypes, shapes and bits."""
    assert got.keys() == wanted.keys(), got.keys() ^ wanted.keys()
    for name, tensor in wanted.items():
        mine = got[name]
        assert (mine.dtype, mine.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(
            mine.contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
        ), name


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """A folder holds after the block what it held before, hidden files too."""
    before = sorted(folder.rglob("*"))
    yield
    assert sorted(folder.rglob("*")) == before
