"""Gradients of every kind of adapter that is trained on merged weights, beside float64 autograd of PEFT's forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import models
import pytest
import torch
from helpers import assert_same_bits
from peft import LoraConfig, PeftModel, TrainableTokensConfig, get_peft_model
from torch import Tensor, nn

from lora_merge import InvalidInput, merged, train_merged
from lora_merge.training import products, straight
from tests.training.test_train import LINEARS, assert_base, bits, loss_of

ADAPTERS = ("lora_", "trainable_tokens_delta")


def adapted(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float32, **config: Any) -> PeftModel:
    """A model in `dtype` with adapters in float32 that add something."""
    torch.manual_seed(1)
    return shaken(get_peft_model(build().to(dtype), LoraConfig(**({"r": 4, "lora_alpha": 6} | config))))


def shaken(model: Any) -> PeftModel:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not any(part in name for part in ADAPTERS):
                continue
            parameter.data = parameter.data.float()
            if "magnitude" in name:
                parameter *= 1 + 0.3 * torch.randn_like(parameter)
            else:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


class Scaled(nn.Module):
    """An embedding with a factor (as Gemma's), a padding row, gradients by frequency; a head of its own."""

    def __init__(self, by_frequency: bool = False) -> None:
        super().__init__()
        from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

        self.embed = Gemma3TextScaledWordEmbedding(models.VOCABULARY, 24, 5, embed_scale=4.0)
        self.embed.scale_grad_by_freq = by_frequency
        self.head = nn.Linear(24, models.VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(torch.tanh(self.embed(input_ids))).flatten(0, 1).float()
        return type("Output", (), {"loss": nn.functional.cross_entropy(logits, labels.flatten())})


class Changed(nn.Module):
    """What changes the outputs of its layers in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCABULARY, 24)
        self.inner = nn.Linear(24, 24)
        self.head = nn.Linear(24, models.VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        x *= 2
        x = self.inner(x).relu_()
        logits = self.head(x).flatten(0, 1).float()
        return type("Output", (), {"loss": nn.functional.cross_entropy(logits, labels.flatten())})


def two_of_tokens() -> PeftModel:
    model = get_peft_model(models.qwen2(), TrainableTokensConfig(token_indices=[9, 4], target_modules=["embed_tokens"]))
    model.add_adapter("second", TrainableTokensConfig(token_indices=[7, 50], target_modules=["embed_tokens"]))
    model.base_model.set_adapter(["default", "second"])
    return shaken(model)


def beside_dora() -> PeftModel:
    """A DoRA adapter on some layers, a plain one on others."""
    model = adapted(models.qwen2, target_modules=["q_proj", "v_proj"], use_dora=True)
    model.add_adapter("second", LoraConfig(r=3, lora_alpha=9, target_modules=["down_proj"]))
    model.base_model.set_adapter(["default", "second"])
    return shaken(model)


DORA: dict[str, Any] = {"use_dora": True}
MODELS: dict[str, Callable[[torch.dtype], PeftModel]] = {
    "dora": lambda dtype: adapted(models.qwen2, dtype, target_modules=LINEARS, **DORA),
    "dora, Conv1D": lambda dtype: adapted(
        models.gpt2, dtype, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, **DORA
    ),
    "dora, embedding and head": lambda dtype: adapted(
        models.qwen2, dtype, target_modules=["embed_tokens", "lm_head", "v_proj"], **DORA
    ),
    "dora, tied embedding": lambda dtype: adapted(
        partial(models.qwen2, tied=True), dtype, target_modules=["embed_tokens", "q_proj"], **DORA
    ),
    "dora, convolutions": lambda dtype: adapted(
        models.Convolutions, dtype, target_modules=models.CONVOLUTIONS, **DORA
    ),
    "dora, scaled embedding": lambda dtype: adapted(Scaled, dtype, target_modules=["embed", "head"], **DORA),
    "dora, modules beside": lambda dtype: adapted(
        models.qwen2, dtype, target_modules=["q_proj"], modules_to_save=["lm_head", "norm"], **DORA
    ),
    "scaled embedding": lambda dtype: adapted(Scaled, dtype, target_modules=["embed"]),
    "embedding by frequency": lambda dtype: adapted(partial(Scaled, True), dtype, target_modules=["embed"]),
    "bias": lambda dtype: adapted(models.qwen2, dtype, target_modules=["q_proj", "v_proj"], lora_bias=True),
    "changed in place": lambda dtype: adapted(Changed, dtype, target_modules=["embed", "inner"]),
    "tokens": lambda dtype: adapted(
        models.qwen2, dtype, target_modules=LINEARS, trainable_token_indices={"embed_tokens": [50, 3, 4, 8, 100]}
    ),
    "tokens, tied": lambda dtype: adapted(
        partial(models.qwen2, tied=True), dtype, target_modules=["q_proj"], trainable_token_indices=[50, 3, 4, 8]
    ),
    "tokens, scaled": lambda dtype: adapted(
        Scaled, dtype, target_modules=["head"], trainable_token_indices={"embed": [5, 8, 9, 50, 51, 52]}
    ),
    "tokens by frequency": lambda dtype: adapted(
        partial(Scaled, True), dtype, target_modules=["head"], trainable_token_indices={"embed": list(range(5, 60))}
    ),
    "tokens, bias, dora's opposite, modules beside": lambda dtype: adapted(
        models.qwen2,
        dtype,
        target_modules=["q_proj"],
        lora_bias=True,
        modules_to_save=["norm"],
        trainable_token_indices={"embed_tokens": [50, 3, 4, 8], "lm_head": [3, 9]},
    ),
    "tokens, dora": lambda dtype: adapted(
        models.qwen2, dtype, target_modules=LINEARS, trainable_token_indices={"embed_tokens": [50, 3, 4, 8]}, **DORA
    ),
    "tokens of two": lambda dtype: two_of_tokens().to(dtype),
    "beside dora": lambda dtype: beside_dora().to(dtype),
}


def layers_of(model: nn.Module) -> dict[str, Any]:
    return {n: m for n, m in model.named_modules() if hasattr(m, "base_layer") and hasattr(m, "merged_adapters")}


@contextmanager
def on_merged(model: nn.Module, bases: dict[str, dict[str, Tensor]]) -> Iterator[None]:
    """Let layers compute what `bases` give, and have the gradients of PEFT's own forward on their own base."""
    layers = layers_of(model)

    def through(layer: Any, forward: Any, base: nn.Module) -> Any:
        def call(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            added = forward(x.detach(), *args, **kwargs)
            return base(x, *args, **kwargs) + (added - added.detach())

        return call

    for name, layer in layers.items():
        base = copy.deepcopy(layer.base_layer)
        for key, value in bases[name].items():
            getattr(base, key).data = value.double()
        layer.forward = through(layer, layer.forward, base.requires_grad_(False))
    try:
        yield
    finally:
        for layer in layers.values():
            del layer.forward


def truth(model: PeftModel) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients in float64, of a forward with the merged weights as they are in the model now."""
    with merged(model):
        bases = {
            n: {k: p.detach().clone() for k, p in layer.base_layer.named_parameters()}
            for n, layer in layers_of(model).items()
        }
    exact: Any = copy.deepcopy(model).double()
    exact.zero_grad()
    with on_merged(exact, bases):
        loss = loss_of(exact)
        loss.backward()
    return loss.item(), gradients(exact)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == wanted.keys()
    for name, gradient in got.items():
        error = (gradient.double() - wanted[name]).norm() / wanted[name].norm().clamp_min(1e-30)
        assert error <= tolerance, f"{name}: {error}"


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str) -> None:
    """They are those of PEFT's formula at the merged weight; the base comes back bit for bit."""
    model = MODELS[name](torch.float32)
    before = bits(model)
    wanted_loss, wanted = truth(model)
    with train_merged(model):
        loss = loss_of(model)
        loss.backward()
        if not name.startswith("tokens of"):
            assert any(any(part in n for part in ADAPTERS) for n in gradients(model))
    assert abs(loss.item() - wanted_loss) < 1e-5
    assert_close(gradients(model), wanted, 2e-5)
    for key, tensor in model.state_dict().items():
        if not any(part in key for part in ADAPTERS):
            assert_same_bits(tensor, before[key], key)
