"""examples/minimal_sync.py, a slow merge in plain torch, is what the stream has to be: every element within half an ulp
and the error of sums in float32 (docs/design.md, rule 1)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import models
import pytest
import torch
from helpers import PRODUCT_ERROR, SUM_ERROR, assert_same_bits, most_misrounded, ulp
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from repository import ROOT
from torch import Tensor, nn

from lora_merge import MergedWeights
from lora_merge.kernels import reference

BF16, FP16 = torch.bfloat16, torch.float16
CONV1D = {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "bf16, float32 adapters": (models.qwen2, {"dtype": BF16}),
    "bf16 throughout": (models.qwen2, {"dtype": BF16, "adapter_dtype": BF16}),
    "fp16, float32 adapters": (models.qwen2, {"dtype": FP16}),
    "float32": (models.qwen2, {}),
    "rslora": (models.qwen2, {"dtype": BF16, "use_rslora": True, "r": 7}),
    "two adapters": (models.qwen2, {"dtype": BF16, "adapters": ("one", "two")}),
    "fan_in_fan_out": (models.gpt2, {"dtype": BF16, **CONV1D}),
    "embedding and head": (models.qwen2, {"dtype": BF16, "target_modules": ["embed_tokens", "lm_head", "up_proj"]}),
    "tied head": (lambda: models.qwen2(tied=True), {"dtype": BF16}),
    "tied head, adapter on the embedding": (
        lambda: models.qwen2(tied=True),
        {"dtype": BF16, "target_modules": ["embed_tokens", "q_proj"]},
    ),
    "tied head, adapter on the head": (
        lambda: models.qwen2(tied=True),
        {"dtype": BF16, "target_modules": ["lm_head", "q_proj"]},
    ),
}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return import_module("minimal_sync")


def beyond(fast: dict[str, Tensor], slow: Any, model: PeftModel) -> int:
    """How many elements of a stream are further from the exact value than they may be."""
    found = 0
    for name, weight, value, products in slow.exact(model):
        out = fast[name].double()
        sums = SUM_ERROR * (weight.double().abs() + out.abs()) + PRODUCT_ERROR * products
        found += int(((out - value).abs() > ulp(out, weight.dtype) / 2 + sums).sum())
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_stream_is_the_slow_merge(case: str, slow: Any) -> None:
    build, config = CASES[case]
    model = models.with_lora(build, **config)
    fast, wanted = dict(MergedWeights(model, bucket_bytes=1 << 13)), dict(slow.merged_slowly(model))
    assert fast.keys() == wanted.keys()
    misrounded = adapted = 0
    for name, _, _, products in slow.exact(model):
        assert fast[name].dtype == wanted[name].dtype, name
        if products.any():
            misrounded, adapted = misrounded + int((fast[name] != wanted[name]).sum()), adapted + fast[name].numel()
        else:
            assert_same_bits(fast[name], wanted[name], name)
    assert adapted
    assert beyond(fast, slow, model) == 0
    dtype = config.get("dtype", torch.float32)
    assert dtype == torch.float32 or misrounded <= most_misrounded(dtype, adapted)


def test_what_the_bound_sees(slow: Any) -> None:
    """An update that is rounded before it is added, an adapter that is left out, and a scaling that is 0.5 % off."""
    model = models.with_lora(models.qwen2, dtype=BF16, adapters=("one", "two"))
    fast = dict(MergedWeights(model))
    assert beyond(fast, slow, model) == 0
    twice = {name: weight + (value - weight.double()).to(BF16) for name, weight, value, _ in slow.exact(model)}
    assert beyond(twice, slow, model) > 0
    assert beyond(dict(MergedWeights(model, adapter_names=["one"])), slow, model) > 0
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.scaling["one"] *= 1.005
    assert beyond(fast, slow, model) > 0


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
def test_rounding(dtype: torch.dtype, slow: Any) -> None:
    """Of values at and beside the middle between two results, in float64, as the reference rounds them."""
    some = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    middle = some.to(dtype).double()
    middle += ulp(middle, dtype) / 2
    values = torch.cat([some, middle, -middle, middle * (1 + 2.0**-40), middle * (1 - 2.0**-40)])
    assert_same_bits(slow.round_once(values, dtype), reference.round_once(values, dtype))


def test_the_script(slow: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["minimal_sync.py"])
    slow.main()
    printed = capsys.readouterr().out
    assert "MergedWeights: 0 of 361600 elements are beyond the bound" in printed
    assert printed.rstrip().endswith(": same")
