"""An entry into `merged` after others: what was changed in between, by PEFT's methods or by hand, is merged as it is.

`test_snapshot.py` compares with what a new reading does; here float64 is the judge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_same_bits
from models import qwen2, with_lora
from peft import LoraConfig, PeftModel
from peft.tuners.lora import Linear
from torch import Tensor, nn

from lora_merge import AlreadyMerged, merged

Change = Callable[[Any, Any], object]


def layers(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


def base_of(layer: Any) -> Tensor:
    return layer.get_base_layer().weight.detach()


def wanted(layer: Any) -> tuple[Tensor, Tensor]:
    """In float64 what a base becomes; and how large what is added up is."""
    total = base_of(layer).double()
    size = total.abs()
    for name in () if layer.disable_adapters else layer.active_adapters:
        lora_A, lora_B = (half[name].weight.detach().double() for half in (layer.lora_A, layer.lora_B))
        part, most = (layer.scaling[name] * b @ a for a, b in ((lora_A, lora_B), (lora_A.abs(), lora_B.abs())))
        total = total + (part.t() if layer.fan_in_fan_out else part)
        size = size + (most.abs().t() if layer.fan_in_fan_out else most.abs())
    return total, size


def data(tensor: Tensor, to: Tensor) -> None:
    tensor.data = to


def weight(layer: Any, to: Tensor) -> None:
    layer.base_layer.weight = nn.Parameter(to, False)


def add(model: Any, layer: Any) -> None:
    model.add_adapter("three", LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False))
    model.base_model.set_adapter(["three", "one"])


def delete(model: Any, layer: Any) -> None:
    model.base_model.set_adapter(["two"])
    model.delete_adapter("one")


def another_rank(model: Any, layer: Any) -> None:
    layer.lora_A["one"].weight = nn.Parameter(torch.randn(7, 32))
    layer.lora_B["one"].weight = nn.Parameter(torch.randn(32, 7))


def in_every(change: Callable[[Any], object]) -> Change:
    return lambda model, layer: [change(each) for each in layers(model).values()]


CHANGES: dict[str, Change] = {
    "nothing": lambda model, layer: None,
    "values of a base": lambda model, layer: base_of(layer).mul_(1.5),
    "values of a factor": lambda model, layer: layer.lora_A["one"].weight.data.add_(0.5),
    "scaling, set_scale": lambda model, layer: layer.set_scale("one", 2.5),
    "scaling, scale_layer": lambda model, layer: layer.scale_layer(0.25),
    "scaling, by hand": lambda model, layer: layer.scaling.update(two=-0.5),
    "scaling, an int": lambda model, layer: layer.scaling.update(two=3),
    "scaling, another dict": lambda model, layer: setattr(layer, "scaling", {"one": 0.0, "two": 2.0}),
    "scaling, everywhere": in_every(lambda layer: layer.scaling.update(one=0.125)),
    "active, set_adapter": lambda model, layer: model.set_adapter("two"),
    "active, in one layer": lambda model, layer: layer.set_adapter(["two"]),
    "active, a list changed in place": lambda model, layer: layer._active_adapter.remove("one"),
    "active, by hand in one layer": lambda model, layer: setattr(layer, "_active_adapter", "one"),
    "active, by hand everywhere": in_every(lambda layer: setattr(layer, "_active_adapter", "one")),
    "active, an order": lambda model, layer: model.base_model.set_adapter(["two", "one"]),
    "active, one that a layer has not": lambda model, layer: [d.pop("two") for d in (
        layer.lora_A, layer.lora_B, layer.lora_dropout, layer.scaling)] and layer.set_adapter(["one"]),
    "disabled, disable_adapter_layers": lambda model, layer: model.base_model.disable_adapter_layers(),
    "disabled, in one layer": lambda model, layer: layer.enable_adapters(False),
    "disabled, by hand": lambda model, layer: setattr(layer, "_disable_adapters", True),
    "added": add,
    "deleted": delete,
    "merged and unmerged by PEFT": lambda model, layer: (model.merge_adapter(), model.unmerge_adapter()),
    "factor moved": lambda model, layer: data(layer.lora_B["two"].weight, torch.randn(32, 5)),
    "factor replaced": lambda model, layer: setattr(layer.lora_A["one"], "weight", nn.Parameter(torch.randn(4, 32))),
    "factor by columns": lambda model, layer: data(layer.lora_A["one"].weight, torch.randn(32, 4).t()),
    "factor transposed where it lies": lambda model, layer: data(
        layer.lora_B["one"].weight, layer.lora_B["one"].weight.data.view(4, 32).t()),
    "factor of another dtype": lambda model, layer: layer.lora_A["one"].to(torch.bfloat16),
    "factors of another rank": another_rank,
    "factor's module replaced": lambda model, layer: layer.lora_A.update({"one": nn.Linear(32, 4, bias=False)}),
    "factors' dict replaced": lambda model, layer: setattr(
        layer, "lora_A", nn.ModuleDict({"one": nn.Linear(32, 4, bias=False), "two": nn.Linear(32, 5, bias=False)})),
    "factor's parameters replaced": lambda model, layer: setattr(
        layer.lora_A["one"], "_parameters", {"weight": nn.Parameter(torch.randn(4, 32)), "bias": None}),
    "base moved": lambda model, layer: data(layer.base_layer.weight, torch.randn(32, 32)),
    "base replaced": lambda model, layer: weight(layer, torch.randn(32, 32)),
    "base's module replaced": lambda model, layer: setattr(layer, "base_layer", nn.Linear(32, 32)),
    "base transposed where it lies": lambda model, layer: data(layer.base_layer.weight, base_of(layer).t()),
    "base of another dtype": lambda model, layer: data(layer.base_layer.weight, torch.randn(32, 32).bfloat16()),
    "all of another dtype": lambda model, layer: model.to(torch.bfloat16),
    "fan_in_fan_out": lambda model, layer: setattr(layer, "fan_in_fan_out", True),
    "gradients asked for": lambda model, layer: model.requires_grad_(True),
    "layers swapped": lambda model, layer: swap(model),
}  # fmt: skip


def swap(model: Any) -> None:
    attention = model.base_model.model.model.layers
    attention[0].self_attn.q_proj, attention[1].self_attn.q_proj = (
        attention[1].self_attn.q_proj, attention[0].self_attn.q_proj
    )  # fmt: skip


def warm() -> tuple[PeftModel, Any]:
    """A model that has been merged some times, and a square layer of it."""
    model = with_lora(qwen2, adapters=("one", "two"))
    for _ in range(3):
        with merged(model):
            pass
    return model, model.base_model.model.model.layers[1].self_attn.q_proj


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_between_entries(change: str) -> None:
    torch.manual_seed(1)
    model, layer = warm()
    CHANGES[change](model, layer)
    for _ in range(2):
        before = {name: base_of(each).clone() for name, each in layers(model).items()}
        sums = {name: wanted(each) for name, each in layers(model).items()}
        with merged(model):
            for name, each in layers(model).items():
                total, size = sums[name]
                got = base_of(each)
                bound = torch.finfo(got.dtype).eps / 2 * total.abs() + 2.0**-19 * size
                assert ((got.double() - total).abs() <= bound).all(), f"{change}: {name}"
        for name, each in layers(model).items():
            assert_same_bits(base_of(each), before[name], name)


@pytest.mark.parametrize("merge", ["method", "by hand"])
def test_what_was_merged_between_entries(merge: str) -> None:
    model, layer = warm()
    layer.merge() if merge == "method" else layer.merged_adapters.append("one")
    with pytest.raises(AlreadyMerged), merged(model):
        pass
