"""float16 ends at 65504: what merges beyond it is refused by name on every way out and inside `merged`, where the base
is finite, and costs bfloat16 nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from helpers import assert_same_bits

from lora_merge import InvalidInput, MergedWeights, Plan, Segment, merged, save_merged
from lora_merge.kernels import ranges

BEYOND = "{}: expected merged values up to 65504, the largest number of float16"
ADAPTED = "model.layers.1.self_attn.q_proj.weight"


def policy(dtype: torch.dtype = torch.float16, **options: Any) -> Any:
    return models.with_lora(models.qwen2, dtype=dtype, target_modules=["q_proj"], **options)


def scale_up(model: Any, factor: float) -> None:
    """Multiply the adapter of one weight."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers.1.self_attn.q_proj.lora_B" in name:
                parameter.mul_(factor)


def adapted(model: Any) -> torch.Tensor:
    """The base of that weight."""
    return model.base_model.model.model.layers[1].self_attn.q_proj.base_layer.weight.data


def held(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("bucket_bytes", [2048, 1 << 20])
@pytest.mark.parametrize("dora", [False, True])
def test_streams(bucket_bytes: int, dora: bool) -> None:
    """Finite weights and adapters whose sum is not; and the same stream once more when it fits again."""
    model = policy(use_dora=dora)
    if dora:
        magnitude = model.base_model.model.model.layers[1].self_attn.q_proj.lora_magnitude_vector["default"]
        magnitude.float().weight.data.fill_(3e5)
    weights = MergedWeights(model, bucket_bytes=bucket_bytes)
    if not dora:
        before = {name: tensor.clone() for name, tensor in weights}
        scale_up(model, 2.0**20)
    seen: list[str] = []
    with pytest.raises(InvalidInput, match=BEYOND.format(ADAPTED)):
        seen += [name for name, _ in weights]
    assert ADAPTED not in seen, "nobody gets it"
    with pytest.raises(InvalidInput, match=BEYOND.format(ADAPTED)):
        list(weights.buckets())
    list(MergedWeights(model, dtype=torch.bfloat16))
    if not dora:
        scale_up(model, 2.0**-20)
        for name, tensor in weights:
            assert_same_bits(tensor, before[name], name)


def test_conversions_and_stochastic_rounding(tmp_path: Path) -> None:
    """A float32 base that float16 does not hold, adapted or not, whatever the rounding."""
    model = policy(torch.float32)
    model.base_model.model.model.norm.weight.data[3] = -7e4
    for options in ({}, {"rounding": "stochastic"}):
        with pytest.raises(InvalidInput, match=BEYOND.format("model.norm.weight")):
            list(MergedWeights(model, dtype=torch.float16, **options))
    with pytest.raises(InvalidInput, match=BEYOND.format("model.norm.weight")):
        save_merged(model, tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()
    model.base_model.model.model.norm.weight.data[3] = -torch.inf  # is no fault of the merge
    assert dict(MergedWeights(model, dtype=torch.float16))["model.norm.weight"].isinf().any()


def test_saving_a_model_of_float16(tmp_path: Path) -> None:
    model = policy()
    scale_up(model, 2.0**20)
    with pytest.raises(InvalidInput, match=BEYOND.format(ADAPTED)):
        save_merged(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_experts_that_are_converted() -> None:
    """Tensors that are merged whole and cut by a conversion."""
    experts = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
    model = models.with_lora(models.qwen3_moe, dtype=torch.float16, **experts)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name and "experts" in name:
                parameter.mul_(2.0**20)
    with pytest.raises(InvalidInput, match=r"experts.*expected merged values up to 65504"):
        list(MergedWeights(model))
    with pytest.raises(InvalidInput, match=r"experts.*expected merged values up to 65504"):
        list(MergedWeights(model, strategy="unshard"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_dtypes_are_not_looked_at(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "finite", lambda tensors: pytest.fail("bfloat16 and float32 cost nothing"))
    list(MergedWeights(policy(dtype)))


@pytest.mark.parametrize("change", ["product", "dora", "experts", "token"])
def test_inside_merged(change: str) -> None:
    """Nothing is merged, every bit is as before, and the model merges again when it fits."""
    if change == "experts":
        options = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
        model = models.with_lora(models.qwen3_moe, dtype=torch.float16, **options)
        name = "experts.*"
        culprit = next(p for n, p in model.named_parameters() if "experts" in n and "lora_B" in n)
    elif change == "token":
        model = policy(trainable_token_indices={"embed_tokens": [3, 5]})
        name = "model.embed_tokens.weight"
        culprit = next(p for n, p in model.named_parameters() if "trainable_tokens_delta" in n)
        culprit.data = culprit.data.float()
    else:
        model, name = policy(use_dora=change == "dora"), ADAPTED
        wanted = "lora_magnitude_vector" if change == "dora" else "lora_B"
        culprit = next(p for n, p in model.named_parameters() if f"layers.1.self_attn.q_proj.{wanted}" in n)
        culprit.data = culprit.data.float()
    with merged(model):
        fits = held(model)
    good = culprit.detach().clone()
    culprit.data.mul_(2.0**24)
    before = held(model)
    for _ in range(2):  # the second entry knows the plans of the first
        with pytest.raises(InvalidInput, match=BEYOND.format(name)), merged(model):
            pytest.fail("the block is not entered")
        for key, tensor in held(model).items():
            assert_same_bits(tensor, before[key], key)
    culprit.data.copy_(good)
    with merged(model):
        for key, tensor in held(model).items():
            assert_same_bits(tensor, fits[key], key)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_an_element_of_the_base_that_is_not_finite(value: float, tmp_path: Path) -> None:
    """It stays what it is, and hides no other one."""
    model = policy()
    adapted(model)[3, 5] = value
    before = held(model)
    made = dict(MergedWeights(model))[ADAPTED].clone()
    assert torch.equal(made.isfinite(), adapted(model).isfinite())
    with merged(model):
        assert_same_bits(adapted(model), made)
    for key, tensor in held(model).items():
        assert_same_bits(tensor, before[key], key)
    save_merged(model, tmp_path / "kept")
    scale_up(model, 2.0**20)
    for way in (lambda: list(MergedWeights(model)), lambda: save_merged(model, tmp_path / "out")):
        with pytest.raises(InvalidInput, match=BEYOND.format(ADAPTED)):
            way()
    with pytest.raises(InvalidInput, match=BEYOND.format(ADAPTED)), merged(model):
        pytest.fail("the block is not entered")


def test_factors_that_are_not_numbers() -> None:
    """What came is said as it is: no larger number, which another dtype would hold."""
    model = policy()
    scale_up(model, torch.nan)
    wanted = f"{ADAPTED}: expected merged values that are numbers, got NaN where the base holds numbers"
    with pytest.raises(InvalidInput, match=wanted):
        list(MergedWeights(model))
    with pytest.raises(InvalidInput, match=wanted), merged(model):
        pytest.fail("the block is not entered")


LIMIT = 65520.0
"""Half-way from the largest number of float16 to what would follow it: from here on, nearest rounding is infinite."""
BELOW = 65519.99609375
"""The float32 before it, which becomes 65504."""


@pytest.mark.parametrize("rounding", [{}, {"rounding": "stochastic", "seed": 5}], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("shape", [(1, 1), (37, 77), (2050, 2112)])
@pytest.mark.parametrize("turned", [False, True])
def test_plans_tell(shape: tuple[int, int], turned: bool, rounding: dict[str, Any]) -> None:
    """What a plan says of its results is true, wherever in the weight an element is and however it goes to memory; the
    look that other backends need says the same."""
    rows, cols = shape
    source = torch.full(shape, 2.0**-25)
    out = torch.empty(cols, rows, dtype=torch.float16).t() if turned else torch.empty(shape, dtype=torch.float16)
    plan = Plan([Segment("w", source, out)])
    wide = Plan([Segment("w", source, torch.empty_like(source), torch.zeros(1, cols), torch.zeros(rows, 1))])
    for value in (BELOW, -BELOW, LIMIT, -LIMIT, torch.inf, -torch.inf, torch.nan):
        for place in {(0, 0), (rows - 1, cols - 1), (rows // 2, cols // 3)}:
            source[place] = value
            fits = abs(value) < LIMIT
            assert plan.run(**rounding) in (None, fits), (value, place)
            assert ranges.finite([out]) == bool(out.isfinite().all()) == fits, (value, place)
            source[place] = 2.0**-25
    source[0, 0] = torch.inf
    assert wide.run(**rounding) in (None, True), "float32 is not looked at"


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Nothing is seen on the way there: the look after it finds it, and waits once."""
    model = policy().cuda()
    adapted(model)[3, 5] = torch.nan
    before = held(model)
    with merged(model):
        made = adapted(model).clone()
    assert_same_bits(dict(MergedWeights(model))[ADAPTED], made)
    scale_up(model, 2.0**20)
    with pytest.raises(InvalidInput, match=BEYOND.format(ADAPTED)):
        list(MergedWeights(model))
    with pytest.raises(InvalidInput, match=BEYOND.format(ADAPTED)), merged(model):
        pytest.fail("the block is not entered")
    assert_same_bits(adapted(model), before["base_model.model.model.layers.1.self_attn.q_proj.base_layer.weight"])
