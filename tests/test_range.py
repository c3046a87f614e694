"""float16 ends at 65504: what merges beyond it is refused by name on every way out, and costs bfloat16 nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from helpers import assert_same_bits

from lora_merge import InvalidInput, MergedWeights, save_merged
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
    monkeypatch.setattr(ranges, "_finite", lambda tensors: pytest.fail("bfloat16 and float32 cost nothing"))
    list(MergedWeights(policy(dtype)))
