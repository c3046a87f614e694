"""What changes between two forwards of training on merged weights: seen by the next one, of the model or of a part."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import models
import pytest
import torch
from helpers import assert_same_bits
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn

from lora_merge import AlreadyMerged, InvalidInput, merged, train_merged
from tests.training.test_formulas import gradients
from tests.training.test_train import LINEARS, adapted, assert_base, bits, loss_of, shake, two_adapters


def layer_of(model: nn.Module) -> LoraLayer:
    return next(m for m in model.modules() if isinstance(m, LoraLayer))


@pytest.mark.parametrize("merges", [0, 1])
def test_a_parameter_over_the_memory_of_another(merges: int) -> None:
    """What is written to it counts, from then on: it has a version counter of its own."""
    model = adapted(models.qwen2)
    half = layer_of(model).lora_B["default"]
    with train_merged(model) as training, torch.no_grad():
        models.outputs(model)
        half.weight = nn.Parameter(half.weight.data)
        for _ in range(merges):
            shake(model)
            half.weight.mul_(0.5)
            models.outputs(model)
        half.weight.mul_(1.5)
        got = models.outputs(model)
        training.pause()
        with merged(model):
            assert_same_bits(got, models.outputs(model))


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "a scaling": lambda model: layer_of(model).set_scale("default", 3.0),
    "adapters that act": lambda model: vars(layer_of(model)).update(_active_adapter=["second"]),
    "values": shake,
}


@pytest.mark.parametrize("first", ["a forward of the model", "none"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_is_called_by_itself(change: str, first: str) -> None:
    model = two_adapters()
    layer = layer_of(model)
    x = torch.randn(1, 3, layer.in_features)
    with train_merged(model) as training:
        models.outputs(model) if first != "none" else layer(x)
        CHANGES[change](model)
        got = layer(x)
        got.sum().backward()
        gradients = [p.grad for n, p in layer.named_parameters() if "lora_" in n and p.grad is not None]
        assert len(gradients) == 2 * len(layer.active_adapters)
        training.pause()
        with merged(model):
            assert_same_bits(got, layer(x))


def test_a_forward_of_the_model_inside_merged_comes_first() -> None:
    model = two_adapters()
    with train_merged(model):
        with merged(model):
            inside = models.outputs(model)
        assert_same_bits(models.outputs(model), inside)


def test_a_model_whose_training_is_not_closed_is_freed() -> None:
    model = two_adapters()
    gone = weakref.ref(model)
    training = train_merged(model)
    loss_of(model).backward()
    del model, training
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("others", [["reference"], ["reference", "teacher"], ["reference", None], [None, "reference"]])
def test_reference_adapters_between_a_forward_and_its_backward(others: list[str | None]) -> None:
    """As TRL's DPO and KTO have them, for a policy that starts from an adapter; None: the base is one of them."""
    model = adapted(models.qwen2, target_modules=LINEARS)
    for name in ("reference", "teacher"):
        model.add_adapter(name, LoraConfig(r=4, lora_alpha=6, target_modules=LINEARS))
    shake(model)
    with train_merged(model) as training:
        loss_of(model).backward()
        wanted = gradients(model)
        model.zero_grad()
        for _ in range(3):
            loss = loss_of(model)
            for other in others:
                with torch.no_grad(), model.disable_adapter() if other is None else nullcontext():
                    model.set_adapter(other or "default")
                    loss_of(model)
            model.set_adapter("default")
            loss.backward()
            for name, gradient in gradients(model).items():
                assert_same_bits(gradient, wanted[name].to(gradient), name)
            model.zero_grad()
        loss = loss_of(model)
        model.set_adapter("reference")
        with pytest.raises(InvalidInput, match="before set_adapter"):
            loss.backward()
        model.set_adapter("default")
        loss = loss_of(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-2, fused=True)
        loss_of(model).backward()
        optimizer.step()
        with pytest.raises(InvalidInput, match="before the optimizer steps"):
            loss.backward()
        assert training.merges > 3


def test_adapters_are_deleted_at_any_time() -> None:
    model = two_adapters()
    before = bits(model)
    with train_merged(model) as training:
        loss_of(model)
        model.delete_adapter("second")
        assert_base(model, before)
        with torch.no_grad():
            got = models.outputs(model)
            training.pause()
            with merged(copy.deepcopy(model)) as other:
                assert_same_bits(got, models.outputs(other))
    model = adapted(models.qwen2, target_modules=LINEARS)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    with merged(model), pytest.raises(AlreadyMerged, match="delete_adapter"):
        model.delete_adapter("other")


def unfrozen() -> Any:
    model = adapted(models.qwen2, target_modules=["q_proj", "up_proj"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or "up_proj.base_layer" in name)
    return model


@pytest.mark.parametrize(
    "build",
    [unfrozen, lambda: adapted(models.qwen2, target_modules=["q_proj", "k_proj"], bias="all", lora_bias=True)],
    ids=["weight", "bias"],
)
def test_a_base_that_is_trained_itself(build: Callable[[], Any]) -> None:
    """An optimizer steps on the base, not on what is merged; all go as with PEFT's forward."""
    peft, model = build(), build()
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 1e-2) for m in (peft, model)]
    with train_merged(model) as training:
        for _ in range(4):
            losses = []
            for one, optimizer in zip((peft, model), optimizers, strict=True):
                losses.append(loss_of(one))
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.testing.assert_close(*losses)
        assert training.merges == 4
    for (name, wanted), got in zip(peft.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4, msg=name)


def test_parameters_that_are_replaced_twice() -> None:
    """As MeZO does, by `.data`: what lies where the first has lain is another one."""
    model = adapted(models.qwen2, target_modules=["q_proj"])
    parameter = layer_of(model).lora_B["default"].weight
    with train_merged(model) as training, torch.no_grad():
        for _ in range(30):
            models.outputs(model)
            for _ in range(2):
                parameter.data = parameter.data * 1.1
            got = models.outputs(model)
            training.pause()
            with merged(model):
                assert_same_bits(got, models.outputs(model))


def test_a_base_that_is_adapted_anew() -> None:
    """The training of its first adapters sees those that come after `unload()`, until it is closed."""
    model = adapted(models.qwen2, target_modules=LINEARS)
    first = train_merged(model)
    loss_of(model)
    anew: Any = get_peft_model(model.unload(), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(InvalidInput, match="already: close"):
        train_merged(anew)
    first.close()
    shake(anew)
    with train_merged(anew):
        loss_of(anew).backward()
    assert all(not parameter.eq(0).all() for parameter in gradients(anew).values())
    assert not any("forward" in vars(module) for module in anew.modules())


@contextmanager
def averaged(model: nn.Module) -> Iterator[None]:
    """As torch_ema and diffusers' EMAModel do: past version counters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    kept = [p.data.clone() for p in trained]
    for parameter in trained:
        parameter.data.copy_(parameter.data / 2)
    yield
    for parameter, before in zip(trained, kept, strict=True):
        parameter.data.copy_(before)


def test_averages_for_an_evaluation() -> None:
    """A forward computes with what the adapters hold, on both ways."""
    model = adapted(models.qwen2, target_modules=LINEARS).train()
    with train_merged(model) as training:
        before = loss_of(model)
        with averaged(model), torch.no_grad():
            model.eval()
            got = loss_of(model)
            training.pause()
            with merged(model):
                assert_same_bits(got, loss_of(model))
        model.train()
        after = loss_of(model)
        assert_same_bits(after, before)
        assert got != before
        before.backward()
        after.backward()
