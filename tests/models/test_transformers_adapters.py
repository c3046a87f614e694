"""Adapters that transformers itself adds (`model.add_adapter`): PEFT's layers in a model without PEFT's wrapper."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from helpers import assert_same_bits
from peft import LoraConfig
from torch import Tensor, nn

import lora_merge
from lora_merge import MergedWeights

IDS = torch.arange(5, 17)[None]
KINDS: dict[str, dict[str, Any]] = {
    "linear": {},
    "dora": {"use_dora": True},
    "bias": {"bias": "lora_only"},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"modules_to_save": ["lm_head"]},
}


@pytest.fixture(autouse=True)
def any_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.24 asks for a PEFT that is not released yet."""
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.18")


def config(**changes: Any) -> LoraConfig:
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    return LoraConfig(**options | changes)


def policy(base: nn.Module, **changes: Any) -> nn.Module:
    torch.manual_seed(1)
    model = copy.deepcopy(base)
    model.add_adapter(config(**changes), "first")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter))
    return model.eval()


def answers(model: nn.Module) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(IDS).logits
    return logits


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_merged_and_streamed(kind: str, tied: bool) -> None:
    """What the model computes; names are those of a checkpoint, and the base is back."""
    model = policy(models.qwen2(tied), **KINDS[kind])
    wanted, before = answers(model), bits(model)
    with lora_merge.merged(model):
        assert_close(answers(model), wanted)
    stream = {name: tensor.clone() for name, tensor in MergedWeights(model)}
    fresh = models.qwen2(tied=False).eval()
    fresh.load_state_dict({"lm_head.weight": stream["model.embed_tokens.weight"]} | stream)
    assert_close(answers(fresh), wanted)
    for name, tensor in model.state_dict().items():
        assert_same_bits(tensor, before[name], name)


def assert_close(got: Tensor, wanted: Tensor) -> None:
    """Within roundings of float32 of sums that are as large as these."""
    assert (got - wanted).abs().max() < 1e-6 * max(1.0, float(wanted.abs().max()))


def test_several_and_none() -> None:
    base = models.qwen2().eval()
    model = policy(base)
    model.add_adapter(config(r=3, target_modules=["q_proj", "o_proj"]), "second")
    plain = answers(base)
    for active in (["first", "second"], ["second"], ["first"]):
        model.set_adapter(active)
        wanted = answers(model)
        assert (wanted - plain).abs().max() > 1e-3
        with lora_merge.merged(model):
            assert_close(answers(model), wanted)
    model.disable_adapters()
    base_stream = dict(base.state_dict())
    with pytest.warns(UserWarning, match="first"):
        stream = {name: tensor.clone() for name, tensor in MergedWeights(model)}
    for name, tensor in stream.items():
        assert_same_bits(tensor, base_stream[name], name)


def test_saved(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = policy(models.qwen2())
    lora_merge.save_merged(model, tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert not [name for name, _ in loaded.named_parameters() if "lora_" in name]
    assert_close(answers(loaded), answers(model))


@pytest.mark.parametrize("kind", ["linear", "dora"])
def test_trained_merged(kind: str) -> None:
    """Steps lead where PEFT's forward leads, and the base is back."""
    made = policy(models.qwen2(), **KINDS[kind])
    before = bits(made)
    trained: list[dict[str, Tensor]] = []
    for begin in (lora_merge.train_merged, lambda model: None):
        model = copy.deepcopy(made)
        training = begin(model)
        steps(model)
        if training is not None:
            training.close()
        trained.append(bits(model))
    for name, tensor in trained[0].items():
        if "lora_" in name:
            assert (tensor - before[name]).abs().max() > 1e-3, name
            assert_close(tensor, trained[1][name])
        else:
            assert_same_bits(tensor, before[name], name)


def steps(model: nn.Module) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=10)
    for _ in range(2):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_what_would_see_merged_weights(tmp_path: Path) -> None:
    """transformers' own methods are refused inside the block, and an adapter that is deleted there leaves the base."""
    base = models.qwen2()
    model = policy(base)
    with lora_merge.merged(model):
        for call in (lambda: model.add_adapter(config(), "late"), lambda: model.save_pretrained(tmp_path / "saved")):
            with pytest.raises(lora_merge.LoraMergeError, match="leave the block"):
                call()
        model.delete_adapter("first")
    plain = base.state_dict()
    for name, tensor in model.state_dict().items():
        assert_same_bits(tensor, plain[name.replace(".base_layer", "")], name)
